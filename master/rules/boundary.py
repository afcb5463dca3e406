"""Rules about voluntary plans: joins, follow-ups, and plans around slow workers.

Such a plan is pushed while training continues, and all workers switch to it at a step boundary.
None is made while the job is disturbed. The planner decides whether a plan around slow workers is
worth the change (`oobleck.planner.recovery.uneven.answer`). Must not know how a worker is found
slow.
"""

from collections.abc import Iterable, Sequence

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.core.plan import Plan, WorkerRate
from oobleck.master.events.jobs import Cause, FollowUpDropped, PlanMade
from oobleck.master.planning.requests import PlanningFailed
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.next_plan import next_plan
from oobleck.master.rules.plan_made import answer_made
from oobleck.master.rules.questions import (
    by_name,
    next_generation,
    undisturbed,
    usable_nodes,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.recovery import course
from oobleck.planner.recovery.course import PlanWanted

_FOLLOWS: frozenset[Cause] = frozenset({"re-routed", "few holders"})


def join(context: Context, job: Job) -> Decision | None:
    """Take in nodes that are ready and have no part in the plan, at a step boundary."""
    state = context.state
    if not undisturbed(state, job):  # a drained node still has its place, for instance
        return None
    ready = usable_nodes(state, job)
    # Stand-by nodes are taken back when that is worth the change (`even_out`).
    due = _settled_at(context, job, [n for n in ready if n.facts.node not in job.standing_by])
    if due is None:
        return None
    policy = job.spec.recovery.policy
    if not course.takes_joins(policy):
        return _stay_idle(f"by policy {policy} no node joins a plan that trains")
    if context.now < due:
        return Decision(wake_at=due, reason="nodes are about to join")
    try:
        answer = next_plan(context, job, ready, next_generation(context, job), course.JOINED)
    except PlanInfeasible as infeasible:
        return _stay_idle("; ".join(infeasible.causes))
    made = answer.found
    if not course.takes_in(made.plan, job.current.members):
        return _stay_idle("no combination of templates uses it")
    cause: Cause = "worker well" if _stood_by(state, job, made.plan) else "node joined"
    event = answer_made(context, job, answer, boundary=True, cause=cause)
    return Decision(actions=(event,), reason=made.reason)


def _stay_idle(why: str) -> Decision:
    return Decision(reason=f"ready nodes stay idle: {why}", why_idle=why)


def _stood_by(state: ClusterState, job: Job, plan: Plan) -> bool:
    """Return whether all nodes that `plan` takes in were standing by, so that it answers their
    recovery."""
    if job.current.made is None:
        return False
    before = {slow.worker for slow in job.current.made.standing_by}
    return all(
        any(worker.node == name for worker in before) and _has_trained(state, job, name)
        for name in plan.nodes
        if not job.current.has_member(name)
    )


def _has_trained(state: ClusterState, job: Job, name: NodeName) -> bool:
    """Return whether all processes of the node have had a part in a plan."""
    workers = state.nodes[name].seen.status.workers
    return all(worker.incarnation in job.lineage.replaced for worker in workers)


def _settled_at(context: Context, job: Job, ready: Sequence[Node]) -> float | None:
    """Return when `ready` nodes outside the plan are taken in together; None: there are none."""
    members = job.current.has_member
    since = [n.seen.ready_at or context.now for n in ready if not members(n.facts.node)]
    return course.settled_at(since, context.timing.join_settle_s)


def follow_up(context: Context, job: Job) -> Decision | None:
    """Make the follow-up plan at a step boundary; None: none is due.

    A plan that moved no state, so that training continued at once, is followed by one of templates
    or one with a stage moved. A plan that leaves layers with few nodes is followed by its shadows.
    The follow-up is dropped if no stage is worth moving, no shadow is worth adding or planning
    failed: the next loss or join decides anew. Templates are tried again, since new nodes may make
    them possible.
    """
    state, made = context.state, job.current.made
    if made is None or not made.then or not undisturbed(state, job):
        return None
    ready = usable_nodes(state, job)
    due = _settled_at(context, job, [n for n in ready if n.facts.node not in job.standing_by])
    if due is not None and context.now < due and course.takes_joins(job.spec.recovery.policy):
        return None  # they join in the same plan
    wanted: PlanWanted = course.behind_answer(made.then)
    try:
        answer = next_plan(context, job, ready, next_generation(context, job), wanted)
    except PlanInfeasible as infeasible:
        why = "; ".join(infeasible.causes)
        if course.is_tried_again(made.then) and not isinstance(infeasible, PlanningFailed):
            return Decision(reason=f"no {made.then} so far: {why}")
        dropped = FollowUpDropped(job_id=job.id, generation=job.current.generation, reason=why)
        return Decision(actions=(dropped,), reason=f"no {made.then}: {why}")
    cause: Cause = "few holders" if course.adds_holders(answer.policy) else "re-routed"
    event = answer_made(context, job, answer, boundary=True, cause=cause)
    return Decision(actions=(event,), reason=answer.found.reason)


def even_out(context: Context, job: Job) -> Decision | None:
    """Make a plan around slow workers if their rates differ from those in the newest plan. Also
    make one if there are slow workers and the newest plan was made for another purpose."""
    state, made = context.state, job.current.made
    if made is None or not course.evens_out(job.spec.recovery.policy):
        return None
    if not undisturbed(state, job):
        return None
    planned, rates = made.plan.rates, made.plan.with_rates(job.rates).rates
    waiting = _standing_by(state, job)
    # Plans after a loss or a join only give slow workers other shares; a better one may be due.
    counted = made.policy == course.AROUND_SLOW or not (rates or waiting)
    if counted and rates == planned and _as_slow(job, made):
        return None
    members = [state.nodes[name] for name in job.current.members]
    well = rates != planned and _all_better(rates, planned)
    due = (job.seen.planned_at or 0.0) + course.REST_S
    rests = made.policy == course.AROUND_SLOW or made.cause in _FOLLOWS
    if rests and not well and context.now < due:
        return Decision(wake_at=due, reason="the last voluntary change is not a minute old")
    try:
        live = by_name([*members, *waiting])
        answer = next_plan(context, job, live, next_generation(context, job), course.AROUND_SLOW)
    except PlanInfeasible as infeasible:
        return Decision(reason=f"slow workers keep their part: {'; '.join(infeasible.causes)}")
    better = well or course.takes_back(answer.found.rule)
    cause: Cause = "worker well" if better else "worker slow"
    then = course.follow_up_of(made.then, answer.found.rule, answer.then)
    event = answer_made(context, job, answer, boundary=True, cause=cause, then=then)
    return Decision(actions=(event,), reason=answer.found.reason)


def _standing_by(state: ClusterState, job: Job) -> list[Node]:
    """Return the nodes that stand by and could take part."""
    names = job.standing_by
    idle = [node for node in state.candidates(job) if node.facts.node in names] if names else []
    return [node for node in idle if state.is_ready(node, job)]


def _as_slow(job: Job, made: PlanMade) -> bool:
    """Return whether the workers that stand by are as slow as when the plan was made."""
    before = {slow.worker: slow.rate for slow in made.standing_by}
    here = (worker for worker in job.rates if worker.node in job.standing_by)
    return all(job.rates[worker] == before.get(worker) for worker in here)


def _all_better(rates: Iterable[WorkerRate], planned: Iterable[WorkerRate]) -> bool:
    """Return whether no worker is slower than planned. Such a change need not wait REST_S: it can
    recur only after a worker turned slow again, and that change waits."""
    before = {one.worker: one.rate for one in planned}
    return all(one.rate >= before.get(one.worker, 1.0) for one in rates)
