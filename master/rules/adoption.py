"""Rules about jobs that nodes train though the journal has lost their start or their plan.

At every registration agents name the plan that their workers run. If a master has found the job in
its journal and has made no plan for it since, it takes over a newer plan that agents name, so that
no worker has to stop. A job that waits in the journal's queue and that nodes train becomes the
active job. One agent may be broken or hostile, so its report alone is not enough:

1. The plan must be one that a master could have made. It has every layer, each worker once, the
   whole batch, and a generation that leaves room for later ones.
2. An agent speaks for a plan that its own node is in. It must name the whole plan as others do.
3. A plan is adopted when all its nodes speak for it. They must be more than half of all nodes in it
   or in the newest plan of the journal.
4. Nodes have the same time to return as after any restart of the master. When all are back, or that
   time is over, lost nodes do not count in that half. A node that has returned counts, even if its
   stream is cut since. Most of them may speak for newer plans, without all nodes of any. Then the
   plan that most speak for says what workers hold (`PlanFound`). The master makes a new plan with
   the nodes that are there, as after a loss.
5. Otherwise the job continues by the journal.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign
from oobleck.master.events.jobs import JobPutBack, JobStarted, PlanFound, PlanMade
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.questions import profile_of_adopted
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import transition_stats
from oobleck.master.state.job import MOST_GENERATION, Job
from oobleck.master.state.node import Node
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.course import of_adopted
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.proto.types import Assignment


class NotAdopted(Exception):
    """Refusal to take over a job that nodes train; the text says why, and the fix."""


def check_adoptable(state: ClusterState, job_id: JobId) -> Assign:
    """Return the newest plan of a job that this master does not know, if all its nodes report it.
    Raises NotAdopted where `adopt` would not take it over at once."""
    held = state.held.get(job_id, [])
    if job_id in state.jobs and (not held or is_queued(held)):
        raise NotAdopted(f"this master has it already; see 'oobleck status {job_id}'")
    if not held:
        raise NotAdopted("no node trains an unknown job of that name; see 'oobleck jobs'")
    if job_id in state.jobs:
        raise NotAdopted(
            "this master has another job of that name; end this one with 'oobleck cancel "
            f"{job_id} --unknown', or start the master that has it"
        )
    if state.active is not None:
        raise NotAdopted(
            f"job {state.active} has the turn, and one job trains at a time: cancel that first, or "
            "wait for its end"
        )
    return _reported_by_all(held)


def is_queued(held: Sequence[Node]) -> bool:
    """Return whether the job for which the nodes are held waits in this master's queue."""
    return any(node.held is not None and node.held.queued for node in held)


def _reported_by_all(held: Sequence[Node]) -> Assign:
    """Return the newest plan that the held nodes report. Raises NotAdopted unless all its nodes
    report it, and no other node another plan."""
    if not any(node.connected for node in held):
        names = _names(node.facts.node for node in held)
        are = "are" if len(held) > 1 else "is"
        raise NotAdopted(f"{names} {are} not connected; ask again in some seconds")
    reporters: dict[Assign, set[NodeName]] = {}
    for node in held:
        running = node.seen.running
        if node.connected and running is not None and running.assign is not None:
            reporters.setdefault(running.assign, set()).add(node.facts.node)
    if not reporters:
        raise NotAdopted("none of its nodes has a plan of it: it has not begun to train")
    newest = max(reporters, key=lambda assign: assign.plan.generation)
    nodes, generation = nodes_of(newest), newest.plan.generation
    if generation > MOST_GENERATION:
        raise NotAdopted(
            f"{_names(reporters[newest])} report generation {generation}, above any possible one"
        )
    if others := set().union(*(of for assign, of in reporters.items() if assign != newest)):
        raise NotAdopted(
            f"{_names(reporters[newest])} report generation {generation}, and {_names(others)} "
            "another plan; ask again in some seconds, or cancel it with --unknown"
        )
    if missing := nodes - reporters[newest]:
        raise NotAdopted(
            f"its plan (generation {generation}) also has {_names(missing)}, not heard of here: "
            "ask again when the agents that had its workers are connected; if they have ended, "
            "cancel it with --unknown and submit it again"
        )
    return newest


def ways_on(state: ClusterState, job_id: JobId) -> str:
    """Describe what happens next to a job that nodes train and this master does not know, or has in
    its queue, and the operator's choices."""
    if is_queued(state.held[job_id]):
        return (
            "it has its turn as soon as its nodes are most of the cluster's and no node trains the "
            f"job that has the turn now; or end it with 'oobleck cancel {job_id}'"
        )
    # A job with the id of another one is not adopted.
    adopt = "" if job_id in state.jobs else f"or take it over with 'oobleck adopt {job_id}', "
    return (
        f"start the master on the --state-dir that has the job, {adopt}or end it with 'oobleck "
        f"cancel {job_id} --unknown'"
    )


def _names(nodes: Iterable[NodeName]) -> str:
    return ", ".join(sorted(nodes))


def adopt(context: Context, job: Job) -> Decision | None:
    """Take over the plan that agents run and the journal lacks; None: there is none."""
    state = context.state
    if job.cancel_requested or job.state == "profiling":
        return None
    speakers = _speakers(state, job)
    if not speakers:
        return None
    newest = _newest(speakers)
    assignments, nodes = speakers[newest], nodes_of(newest)
    due = job.seen.since + context.timing.return_s
    what = f"the workers run generation {newest.plan.generation}, which the journal does not have"
    everyone = {*job.current.members, *(name for of in speakers for name in nodes_of(of))}
    away = {name for name in everyone if name not in state.nodes or not state.nodes[name].connected}
    registered = {name for name in everyone & state.nodes.keys() if state.nodes[name].registered}
    early = context.now < due
    waits = bool(away) and (
        early or any(state.nodes[name].seen.awaited for name in away & registered)
    )
    if not waits:
        everyone = registered
    if assignments.keys() == nodes and 2 * len(nodes) > len(
        {*job.current.members, *nodes} & everyone
    ):
        event = _adopted(context, job, newest, assignments, what)
        if event is not None:
            return Decision(actions=(event,), reason=what)
    if waits:
        reason = f"{what}; {', '.join(sorted(away))} may still come back"
        return Decision(wake_at=due if early else None, reason=reason, holds_plans=True)
    if 2 * sum(map(len, speakers.values())) > len(everyone):
        return Decision(actions=(PlanFound(job_id=job.id, plan=newest.plan),), reason=what)
    return None


def newest_reported(state: ClusterState, job: Job) -> tuple[set[NodeName], set[NodeName]]:
    """Return the nodes that report the newest plan of the job, and all nodes of that plan."""
    if not (speakers := _speakers(state, job)):
        return set(), set()
    newest = _newest(speakers)
    return set(speakers[newest]), nodes_of(newest)


def _newest(speakers: Mapping[Assign, Collection[NodeName]]) -> Assign:
    """Return the plan that most nodes speak for; the newest on a tie."""
    return max(speakers, key=lambda assign: (len(speakers[assign]), assign.plan.generation))


def _speakers(state: ClusterState, job: Job) -> dict[Assign, dict[NodeName, Assignment]]:
    """Return the plans that a master could have made, and the nodes that speak for each."""
    reported: dict[Assign, dict[NodeName, Assignment]] = {}
    for name, node in sorted(state.nodes.items()):
        running = node.seen.running
        if running is None or running.assign is None or not node.connected:
            continue
        if running.job_id == job.id and state.lacks(running):
            reported.setdefault(running.assign, {})[name] = running
    speakers = {
        assign: {name: of[name] for name in sorted(of.keys() & nodes_of(assign))}
        for assign, of in reported.items()
        if _could_be_ours(job.spec, assign)
    }
    return {assign: of for assign, of in speakers.items() if of}


def _could_be_ours(spec: JobSpec, assign: Assign) -> bool:
    plan, workers = assign.plan, (*assign.plan.workers, *assign.leaving)
    return (
        len(set(workers)) == len(workers)
        and plan.microbatches == spec.training.microbatches
        and plan.layer_count == spec.model.layer_count
    )


def nodes_of(assign: Assign) -> set[NodeName]:
    """Return all nodes of a plan, including those that it takes out."""
    return {*assign.plan.nodes, *(worker.node for worker in assign.leaving)}


def _adopted(
    context: Context,
    job: Job,
    newest: Assign,
    assignments: Mapping[NodeName, Assignment],
    reason: str,
) -> PlanMade | None:
    """Return the adopted plan; None: by the nodes' statuses, not every worker has its own
    process."""
    state, plan, before = context.state, newest.plan, set(job.current.members)
    slots = state.nodes[plan.nodes[0]].facts.worker_slots
    incarnations = tuple(_processes(plan.workers, assignments))
    leaving = tuple(_processes(newest.leaving, assignments))
    named = {process for process in (*incarnations, *leaving) if process}
    if len(named) < len(plan.workers) + len(newest.leaving):
        return None
    if any(state.nodes[name].facts.worker_slots != slots for name in plan.nodes):
        return None
    policy, then = of_adopted(job.spec, rerouted=bool(listed_routes(plan)), can_lose=can_lose(plan))
    return PlanMade(
        **msgspec.structs.asdict(newest),
        job_id=job.id,
        incarnations=incarnations,
        cause="journal cut",
        rule="adopt",
        reason=reason,
        nodes_lost=tuple(sorted(before - set(plan.nodes))),
        workers_lost=(),
        nodes_joined=tuple(node for node in plan.nodes if node not in before),
        can_lose=can_lose(plan),
        worker_slots=slots,
        detect_s=0.0,
        engine=state.nodes[plan.nodes[0]].build.engine,
        leaving_incarnations=leaving,
        policy=policy,
        then=then,
        overtaken=transition_stats(job, context.now),
    )


def _processes(
    workers: Iterable[WorkerId], assignments: Mapping[NodeName, Assignment]
) -> Iterable[Incarnation]:
    """Yield each worker's process as its node names it; empty: the node names none."""
    for worker in workers:
        named = assignments[worker.node].worker_incarnations
        yield named[worker.slot] if worker.slot < len(named) else Incarnation("")


def take_up(context: Context) -> Decision | None:
    """Make a queued job active that nodes train: the copy of the journal that this master runs from
    lacks its start.

    The active job goes back into the queue: if no node has a process of its plan, it has ended
    since, or given way. Nodes that are away may have one, so the nodes that train the other job
    must outnumber them. They must also be most of the cluster, so that no single node's report
    decides.
    """
    state, active = context.state, context.state.job
    for job_id in state.held:
        job = state.jobs.get(job_id)
        if job is None or not is_queued(state.held[job_id]):
            continue
        reporters, nodes = newest_reported(state, job)
        due = job.seen.since + context.timing.return_s
        registered = [node for node in state.nodes.values() if node.registered]
        if context.now < due and (reporters != nodes or not all(n.connected for n in registered)):
            reason = f"{job_id} is trained, and waits in the queue until all nodes are back"
            return Decision(wake_at=due, reason=reason, holds_plans=True)
        if 2 * len(reporters) <= max(len(nodes), len(registered)) or _may_go_on(
            state, active, reporters
        ):
            continue
        put_back = (JobPutBack(job_id=active.id, instead=job_id),) if active is not None else ()
        profile = (profile_of_adopted(state, job, reporters),) if _lacks_profile(job) else ()
        return Decision(
            actions=(*put_back, JobStarted(job_id=job_id), *profile),
            reason=f"{job_id} is trained already",
        )
    return None


def _may_go_on(state: ClusterState, job: Job | None, others: Collection[NodeName]) -> bool:
    """Return whether a node has a process of the job's plan, or may have one: at least as many
    nodes as `others` are away."""
    if job is None or job.current.made is None:
        return False
    away: set[NodeName] = set()
    for worker, process in job.current.processes().items():
        node = state.nodes.get(worker.node)
        status = None if node is None else node.seen.status.worker(worker.slot)
        if node is None or not node.connected:
            away.add(worker.node)
        elif node.held is None and status is not None and status.incarnation == process:
            return True
    return len(away) >= len(others)


def _lacks_profile(job: Job) -> bool:
    return job.profiling.chosen is None and job.spec.profile == "measure"
