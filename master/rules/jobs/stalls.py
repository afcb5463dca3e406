"""Rendezvous without a step, and want of progress: the net under all other rules.

Workers that lost each other though nobody is missing meet anew. Most often that helps; where it
does not, the network between them may be gone for a while. So they meet at ever longer intervals,
and the job fails only if many rendezvous and a long time have led to no step.

What nobody tells of is that a job does not get on though every worker waits for another one: a
message that never comes, a mistake of ours. (Losses are told by agents and peers, and a process
that hangs by its own agent.) So in every state in which a job should get on (its workers meet, move
layers, train, save the result) it may stay without progress only for so long. Then:

1. The workers meet anew, in a new generation of the same plan, at another worker.
2. Who does not come to that rendezvous while others do is known then. Where the others can go on
   without their nodes, all workers there are ended and started anew; a node that never had a part
   in a step is left out. The others go on at once, and the node joins them again.
3. Where they cannot, they meet again, each time after twice as long, until it is enough.
"""

from collections.abc import Sequence, Set
from dataclasses import replace
from functools import lru_cache

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import PeerLost
from oobleck.core.plan import Plan
from oobleck.host.detection import Detection, patience_s
from oobleck.master.events.nodes import NodeLeftOut, NodeReset
from oobleck.master.events.plans import Cause
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.jobs.completion import fail
from oobleck.master.rules.nodes import node_faults
from oobleck.master.rules.plans.next_plan import next_generation, next_plan, plan_made
from oobleck.master.state.job import Job
from oobleck.planner.profile.estimate import estimate_profile

#: Steps after which it is known how long they take; the first one often takes longer.
_KNOWN_STEPS = 2
#: Slower than this no network and no disk moves layers.
_SLOWEST_BYTES_PER_S = 25e6
#: Rendezvous without a step, the least number that a job may fail after.
_ENOUGH = 5
#: Of the interval; enough for any that is worth waiting for.
_MOST_DOUBLINGS = 20


def first_peer_lost(job: Job) -> tuple[float, WorkerId, PeerLost] | None:
    """Return when workers of the newest generation first lost a peer, with a worker's report of it.
    A worker that has left the others caused the loss, so its report counts before earlier ones."""
    lost = job.seen.peers_lost
    if not lost:
        return None
    _, _, worker = min((not report.left, at, worker) for worker, (at, report) in lost.items())
    return min(at for at, _ in lost.values()), worker, lost[worker][1]


def interval_s(job: Job, timing: Detection) -> float:
    """Return the seconds from the loss of a peer to the workers' next rendezvous. It doubles with
    each rendezvous that led to no step, up to a limit."""
    if job.current.newcomers:  # which are left out where a rendezvous with them has failed
        return timing.regroup_s
    longest = max(timing.regroup_s, timing.longest_regroup_s)
    doublings = min(_MOST_DOUBLINGS, max(0, job.seen.since_step.regroups - 1))
    return min(longest, timing.regroup_s * float(2**doublings))


def next_rendezvous(job: Job, timing: Detection, now: float) -> str:
    """Describe for operators why and when the workers meet again; empty: no rendezvous is due."""
    if job.current.made is None or job.current.losses or (first := first_peer_lost(job)) is None:
        return ""
    at, worker, lost = first
    left_s = max(0.0, at + interval_s(job, timing) - now)
    before = (
        f", meeting {job.seen.since_step.regroups + 1} since the last step"
        if job.seen.since_step.regroups
        else ""
    )
    told = lost.detail if lost.left else f"{worker} lost a peer: {lost.detail}"
    return f"{told}; the workers meet again in {left_s:.0f} s{before}"


def meet_again(
    context: Context, job: Job, *, cause: Cause, reason: str, detect_s: float
) -> Decision:
    """The workers of the newest plan meet anew, in the next generation, or that was enough."""
    if (end := met_enough(context, job, reason)) is not None:
        return end
    made = job.current.made
    assert made is not None, "only asked of a job with a plan"
    event = plan_made(
        context,
        job,
        replace(made.plan, generation=next_generation(context, job)),
        boundary=False,
        cause=cause,
        rule="regroup",
        reason=reason,
        detect_s=detect_s,
        policy=made.policy,
        then=made.then,
    )
    return Decision(actions=(event,), reason=reason)


def met_enough(context: Context, job: Job, reason: str) -> Decision | None:
    """The job's end, in place of one more rendezvous; None: they shall meet again.

    `reason`: why they would have to.
    """
    since, regroups = job.seen.since_step.fruitless_since, job.seen.since_step.regroups
    if since is None or regroups < _ENOUGH or context.now < since + context.timing.fruitless_s:
        return None
    return fail(
        context,
        job,
        f"the workers have met {regroups} times in {context.now - since:.0f} s without a committed "
        f"step between: {reason}",
    )


def rouse(context: Context, job: Job) -> Decision | None:
    if job.current.losses or job.state == "waiting for nodes":
        return None
    since = job.seen.progressed_at
    if since is None or job.all_finished():
        return None
    if not all(context.state.nodes[name].connected for name in job.current.members):
        return None  # until they are back, or their leases end
    if first_peer_lost(job) is not None:
        return None  # they meet again in time anyway
    due = since + _patience_s(context, job)
    if context.now < due:
        return Decision(wake_at=due)
    idle_s = context.now - since
    absent = _absent(job) if job.seen.since_step.stalls else ()
    if (out := _give_up(context, job, absent, idle_s)) is not None:
        return out
    names = ", ".join(map(str, absent))
    reason = f"no progress for {idle_s:.0f} s though nobody is missing"
    if absent:
        reason += f"; {names} did not come, and the others cannot go on without"
    return meet_again(context, job, cause="no progress", reason=reason, detect_s=idle_s)


def _patience_s(context: Context, job: Job) -> float:
    """Return how long the newest generation may go without progress, seconds."""
    timing, seen = context.timing, job.seen
    known = len(seen.steps.recent) >= _KNOWN_STEPS
    usual_s = max(record.step_seconds for record in seen.steps.recent) if known else 0.0
    usual_s *= 1 + _evaluation_steps(job)
    made, timeline = job.current.made, seen.timeline
    assert made is not None, "only asked of a job with a plan"
    met = timeline is None or len(timeline.entered) == len(made.plan.workers)
    if not met or seen.steps.furthest_step >= job.spec.training.steps:
        moving_s = _moving_s(job.spec, made.plan, made.worker_slots)
        limit_s = patience_s(timing.meeting_s, usual_s) + moving_s
    elif not known:
        limit_s = timing.first_step_s
    else:
        limit_s = patience_s(timing.stall_s, usual_s)
    if _busy(context, job):
        # Whom the others wait for: its agent says whether it hangs, sooner than this.
        limit_s = max(limit_s, timing.storage_s + timing.stall_s)
    return limit_s * float(2 ** max(0, seen.since_step.stalls - 1))


def _busy(context: Context, job: Job) -> bool:
    """Return whether a worker of the plan is busy with work of its own, and waits for no other."""
    for worker in job.current.processes():
        status = context.state.nodes[worker.node].seen.status.worker(worker.slot)
        if status is not None and status.doing and not status.waiting:
            return True
    return False


def _evaluation_steps(job: Job) -> float:
    """Return an upper bound on the time of an evaluation that may be under way, in steps."""
    evaluation, training = job.spec.evaluation, job.spec.training
    if evaluation is None or not evaluation.due(job.seen.steps.furthest_step, training.steps):
        return 0.0
    done = job.seen.steps.evaluation
    if done is not None and done.step >= job.seen.steps.furthest_step:
        return 0.0
    return evaluation.samples / training.global_batch


@lru_cache(maxsize=32)
def _moving_s(spec: JobSpec, plan: Plan, worker_slots: int) -> float:
    """Return how long the layers of any one worker may take to reach it, or a disk, seconds."""
    profile = estimate_profile(spec, gpus_per_node=worker_slots, memory_per_worker_bytes=1)
    sizes = [layer.travelling_bytes for layer in profile.layers]
    most = max(sum(sizes[layer] for layer in layers) for layers in plan.held.values())
    return most / _SLOWEST_BYTES_PER_S


def _absent(job: Job) -> tuple[WorkerId, ...]:
    """Return the workers missing at the newest generation's rendezvous where others have arrived;
    empty where all are missing or none is."""
    made, timeline = job.current.made, job.seen.timeline
    if made is None or made.boundary or timeline is None:
        return ()
    finished = {w for w, process in job.current.processes().items() if job.has_finished(process)}
    for here in (timeline.answered, timeline.joined, timeline.entered, finished):
        absent = tuple(worker for worker in made.plan.workers if worker not in here)
        if absent:
            return absent if len(absent) < len(made.plan.workers) else ()
    return ()


def _give_up(
    context: Context, job: Job, absent: Sequence[WorkerId], idle_s: float
) -> Decision | None:
    """Have the absent workers' nodes begin anew; None where the others need what they hold."""
    if not absent or not can_spare(context, job, {worker.node for worker in absent}):
        return None
    out: list[NodeLeftOut | NodeReset] = []
    for name in sorted({worker.node for worker in absent}):
        who = ", ".join(str(worker) for worker in absent if worker.node == name)
        generation = job.current.generation
        why = f"{who} did not come to the others of generation {generation} for {idle_s:.0f} s"
        if name in job.current.newcomers:
            out.append(node_faults.left_out(job, context.state.nodes[name], why))
        else:
            out.append(NodeReset(job_id=job.id, node=name, reason=why))
    return Decision(actions=tuple(out), reason="; ".join(event.reason for event in out))


def can_spare(context: Context, job: Job, nodes: Set[NodeName]) -> bool:
    """Return whether the job can go on without these nodes and the layers that only they hold."""
    return nodes <= set(job.current.newcomers) or plan_without(context, job, nodes) is not None


def plan_without(context: Context, job: Job, nodes: Set[NodeName]) -> Plan | None:
    """Return the plan for the other ready nodes; None: they cannot go on alone."""
    state = context.state
    rest = [
        node
        for node in state.candidates(job)
        if state.is_ready(node, job) and node.facts.node not in nodes
    ]
    try:
        return next_plan(context, job, rest, next_generation(context, job)).found.plan
    except PlanInfeasible:
        return None
