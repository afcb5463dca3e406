"""Event of the next plan: its processes, rendezvous, causes, and stand-by times.

Owns also the limit of rendezvous without a step, after which the job ends instead. Must not know
the plan's source, nor what it answers.
"""

from collections.abc import Iterator
from typing import Literal

from oobleck.core.ids import Incarnation, WorkerId
from oobleck.core.messages import Rendezvous
from oobleck.core.plan import Plan, WorkerRate
from oobleck.master.events.jobs import Cause, Expected, PlanMade, RunnerUp, StandByFor
from oobleck.master.events.nodes import (
    NodeYielded,
    WorkerLost,
)
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, fail
from oobleck.master.rules.questions import (
    is_up,
    next_generation,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried, transition_stats
from oobleck.master.state.job import Job
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.course import MOVING
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.rules import Next

#: Fewer bytes are not mentioned: copying them takes no noticeable time.
_WORTH_SAYING_BYTES = 1_000_000
#: Longest stand-by, seconds. A process that turns out slow again after it was taken back stands by
#: for twice as long as before: measured alone it may only seem well.
LONGEST_STAND_BY_S = 3600.0
#: Seconds with a better rate after which a process stands by as if for the first time.
FORGET_STAND_BY_S = 3600.0
#: Fewest rendezvous without a step that a job may fail after.
_ENOUGH = 5


def plan_made(
    context: Context,
    job: Job,
    plan: Plan,
    *,
    boundary: bool,
    cause: Cause,
    rule: str,
    reason: str,
    detect_s: float | None = None,
    restore: bool = False,
    policy: str = MOVING,
    then: Next | Literal[""] = "",
    passes_over: bool = False,
    answer: Answer | None = None,
) -> PlanMade:
    """Return the event that `plan` is made.

    `restore`: workers return to the newest checkpoint. They also do so if the previous plan asked
    for it and has committed no step, since it is not known which of them have. `passes_over`: as in
    `PlanMade`. `answer`: the planner's answer that the plan is from.
    """
    if detect_s is None:
        loss = job.seen.loss
        detect_s = loss.declared_at - loss.evidence_at if loss is not None else 0.0
    current = job.current
    unfinished = current.made if current.on_the_way else None
    go_back = restore or (unfinished is not None and unfinished.restore)
    before = set(current.members)
    handover = not restore and _needs_handover(context.state, job, plan)
    leaving = _leaving(context.state, job, plan, boundary=boundary, handover=handover)
    return PlanMade(
        job_id=job.id,
        plan=plan,
        rendezvous=_rendezvous(context, job, plan),
        boundary=boundary,
        incarnations=tuple(_process(context.state, worker) for worker in plan.workers),
        cause=cause,
        rule=rule,
        reason=reason + (_outrun(answer.outrun_bytes) if answer is not None and boundary else ""),
        nodes_lost=tuple(
            loss.node
            for loss in job.current.losses
            if not isinstance(loss, WorkerLost | NodeYielded)
        ),
        workers_lost=tuple(
            loss.worker for loss in job.current.losses if isinstance(loss, WorkerLost)
        ),
        nodes_joined=tuple(node for node in plan.nodes if node not in before),
        can_lose=can_lose(plan),
        worker_slots=_slots(context.state, plan),
        detect_s=detect_s,
        leaving=leaving,
        leaving_incarnations=tuple(_process(context.state, worker) for worker in leaving),
        handover=handover,
        starting=tuple(worker for worker in plan.workers if not is_up(context.state, worker)),
        data=_data(context.state, job, plan),
        torch=_torch(context.state, plan),
        engine=context.state.nodes[plan.nodes[0]].build.engine,
        restore=go_back,
        anew=go_back and not job.has_checkpoint and job.spec.on_state_lost == "restart",
        policy=policy,
        then=then,
        expected=_expected(context, job, answer, boundary=boundary, restore=go_back),
        passes_over=passes_over,
        standing_by=tuple(
            WorkerRate(worker=worker, rate=rate)
            for worker, rate in sorted(job.rates.items())
            if worker.node not in plan.nodes and worker.node not in job.current.lost_nodes
        ),
        stand_by_for=tuple(_taken_out(context, job, plan)),
        overtaken=transition_stats(job, context.now),
        evidence=() if boundary else carried(job, context.now),
    )


def answer_made(
    context: Context,
    job: Job,
    answer: Answer,
    *,
    boundary: bool,
    cause: Cause,
    reason: str = "",
    then: Next | Literal[""] | None = None,
    restore: bool = False,
    passes_over: bool = False,
) -> PlanMade:
    """Return the event that the plan of `answer` is made, for its own reason and with its own
    follow-up unless others are given."""
    return plan_made(
        context,
        job,
        answer.found.plan,
        boundary=boundary,
        cause=cause,
        rule=answer.found.rule,
        reason=reason or answer.found.reason,
        # Nothing waits for a plan at a step boundary.
        detect_s=0.0 if boundary else None,
        restore=restore,
        policy=answer.policy,
        then=(answer.then or "") if then is None else then,
        passes_over=passes_over,
        answer=answer,
    )


def _expected(
    context: Context, job: Job, answer: Answer | None, *, boundary: bool, restore: bool
) -> Expected | None:
    if answer is None:
        return None
    other = answer.runner_up
    moves_s = job.lineage.back_s if restore else answer.stall_s
    return Expected(
        step_s=answer.step_s,
        stall_s=answer.late_s if boundary else job.lineage.rejoin_s + moves_s,
        transfer_s=0.0 if boundary or restore else answer.stall_s,
        redone_s=0.0
        if boundary
        else questions.redone_s(context.state, job, context.now, restore=restore),
        moved_bytes=answer.moved_bytes,
        value=answer.value,
        runner_up=None
        if other is None
        else RunnerUp(policy=other.policy, rule=other.rule, value=other.value),
    )


def _outrun(count: int) -> str:
    if count < _WORTH_SAYING_BYTES:
        return ""
    return (
        f"; of the state that moves, about {count / 1e6:.0f} MB are copied at the switch: the "
        "gradients of a step outrun the links"
    )


def _needs_handover(state: ClusterState, job: Job, plan: Plan) -> bool:
    """Return whether only leaving workers hold some layers of `plan`."""
    if questions.lost_layers(state, job, plan, handed_over=False) is None:
        return False
    return questions.lost_layers(state, job, plan) is None


def _leaving(
    state: ClusterState, job: Job, plan: Plan, *, boundary: bool, handover: bool
) -> tuple[WorkerId, ...]:
    """Return the workers outside `plan` that must receive it: those that hand over layers, and at a
    boundary those of the previous plan, whose votes the switch needs."""
    leaving = set(job.current.processes()) if boundary else set()
    if handover:
        leaving.update(questions.departing(state, job, plan))
    return tuple(sorted(leaving - set(plan.workers)))


def _slots(state: ClusterState, plan: Plan) -> int:
    return state.nodes[plan.nodes[0]].facts.worker_slots


def _data(state: ClusterState, job: Job, plan: Plan) -> str:
    before = job.current.made.data if job.current.made is not None else ""
    return before or state.data_of(state.nodes[plan.nodes[0]])


def _torch(state: ClusterState, plan: Plan) -> str:
    series = {state.nodes[node].build.torch for node in plan.nodes} - {""}
    return series.pop() if len(series) == 1 else ""


def _process(state: ClusterState, worker: WorkerId) -> Incarnation:
    """Return the process in the worker's slot; plans are made for ready nodes only."""
    process = state.nodes[worker.node].seen.status.worker(worker.slot)
    if process is None:
        raise RuntimeError(f"planned for {worker}, which has no process")
    return process.incarnation


def _rendezvous(context: Context, job: Job, plan: Plan) -> Rendezvous:
    """Return the rendezvous of `plan`. Its host is a survivor if there is one (its address is
    proven), lowest name first. After a rendezvous that led to no step, the next candidate hosts it,
    since the host may be at fault.
    """
    old = job.current.processes()
    up = [worker for worker in plan.workers if is_up(context.state, worker)]
    proven = [worker for worker in up if old.get(worker) == _process(context.state, worker)] or up
    host = proven[job.seen.since_step.regroups % len(proven)]
    prefix = f"{job.id}/{plan.generation}/{context.nonce}"
    cards = tuple(_card(context.state, worker) for worker in plan.workers)
    return Rendezvous(host=_card(context.state, host), prefix=prefix, cards=cards)


def _card(state: ClusterState, worker: WorkerId) -> str:
    status = state.nodes[worker.node].seen.status.worker(worker.slot)
    return status.card if status is not None else ""


def _taken_out(context: Context, job: Job, plan: Plan) -> Iterator[StandByFor]:
    """Yield the stand-by times of slow workers of the newest plan that `plan` leaves out."""
    before, lost = job.current.processes(), job.current.lost_nodes
    for worker, slow in sorted(job.slow.items()):
        if worker in before and worker.node not in plan.nodes and worker.node not in lost:
            yield StandByFor(
                worker=worker,
                incarnation=slow.incarnation,
                seconds=_stand_by_s(context, job, worker),
            )


def _stand_by_s(context: Context, job: Job, worker: WorkerId) -> float:
    last = job.stand_bys.get(worker)
    if last is None or last.process != job.slow[worker].incarnation:
        return 0.0
    better_at = job.seen.stand_by_times[worker].better_at
    if better_at is None:  # it was taken back because it was needed, not because it was well
        return last.seconds
    if context.now > better_at + FORGET_STAND_BY_S:
        return 0.0
    return min(LONGEST_STAND_BY_S, 2 * max(last.seconds, context.timing.stand_by_s))


def meet_again(
    context: Context, job: Job, *, cause: Cause, reason: str, detect_s: float
) -> Decision:
    """Have the workers of the newest plan meet anew, in the next generation, or end the job after
    too many rendezvous."""
    if (end := met_enough(context, job, reason)) is not None:
        return end
    made = job.current.made
    assert made is not None, "only asked of a job with a plan"
    event = plan_made(
        context,
        job,
        made.plan.having(generation=next_generation(context, job)),
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
    """Return the job's end after too many rendezvous; None: its workers meet again.

    `reason`: why they would meet.
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
