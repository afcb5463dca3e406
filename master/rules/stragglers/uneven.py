"""Plans that give slow workers less to do, or nothing, and what they had back once they are well.

Nothing waits for such a plan: it comes at a step boundary. Whether one is worth it is the
planner's word (`oobleck.planner.recovery.uneven.answer`). A node that stands by and is well is one
that joins (`oobleck.master.rules.plans.replan`). Must not know how a worker is found slow.
"""

from collections.abc import Iterable
from typing import Literal

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import WorkerRate
from oobleck.master.events.plans import Cause, PlanMade
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.plans.boundary import undisturbed
from oobleck.master.rules.plans.next_plan import next_generation, next_plan, plan_made
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import EVENS_OUT, Job
from oobleck.master.state.node import Node
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.rules import OF_OTHER_NODES, Next

#: Between two plans around slow workers: a change costs a part of a second, and a worker that is
#: slow now and then must not keep the job busy. So long also behind what follows an answer to a
#: loss: what has just moved shall not move again.
REST_S = 60.0
_FOLLOWS: frozenset[Cause] = frozenset({"re-routed", "few holders"})


def even_out(context: Context, job: Job) -> Decision | None:
    """Plan anew where workers compute at other rates than the newest plan counts on, or it counts
    on slow ones, or leaves them out, and was made for something else."""
    state, made = context.state, job.current.made
    if made is None or job.spec.recovery.policy not in EVENS_OUT:
        return None
    if not undisturbed(state, job):
        return None
    planned, rates = made.plan.rates, made.plan.with_rates(job.rates).rates
    waiting = _standing_by(state, job)
    counted = made.policy == "uneven" or not (rates or waiting)
    if counted and rates == planned and _as_slow(job, made):
        return None
    members = [state.nodes[name] for name in job.current.members]
    # A plan of templates, after a loss or a join, has but other shares for slow workers.
    well = rates != planned and _all_better(rates, planned)
    due = (job.seen.planned_at or 0.0) + REST_S
    rests = made.policy == "uneven" or made.cause in _FOLLOWS
    if rests and not well and context.now < due:
        return Decision(wake_at=due, reason="the last voluntary change is not a minute old")
    try:
        live = sorted([*members, *waiting], key=lambda node: node.facts.node)
        answer = next_plan(context, job, live, next_generation(context, job), "uneven")
    except PlanInfeasible as infeasible:
        return Decision(reason=f"slow workers keep their part: {'; '.join(infeasible.causes)}")
    better = well or answer.found.rule == "take back"
    cause: Cause = "worker well" if better else "worker slow"
    event = plan_made(
        context,
        job,
        answer.found.plan,
        boundary=True,
        cause=cause,
        rule=answer.found.rule,
        reason=answer.found.reason,
        detect_s=0.0,  # nothing waits for it
        policy=answer.policy,
        then=what_follows(made.then, answer),
        answer=answer,
    )
    return Decision(actions=(event,), reason=answer.found.reason)


def _standing_by(state: ClusterState, job: Job) -> list[Node]:
    """Nodes that stand by and could take part."""
    names = job.standing_by
    idle = [node for node in state.candidates(job) if node.facts.node in names] if names else []
    return [node for node in idle if state.is_ready(node, job)]


def _as_slow(job: Job, made: PlanMade) -> bool:
    """Return whether the workers that stand by are as slow as when the plan was made."""
    before = {slow.worker: slow.rate for slow in made.standing_by}
    here = (worker for worker in job.rates if worker.node in job.standing_by)
    return all(job.rates[worker] == before.get(worker) for worker in here)


def what_follows(due: Next | Literal[""], answer: Answer) -> Next | Literal[""]:
    """Templates that the plan before waited for are due as long as none have come; they bring
    shadows of their own."""
    if due == "templates" and answer.found.rule not in OF_OTHER_NODES:
        return due
    return answer.then or ""


def _all_better(rates: Iterable[WorkerRate], planned: Iterable[WorkerRate]) -> bool:
    """Return whether no worker is slower than planned. Such a change need not rest REST_S: it
    cannot recur before some worker turns slow, and that change rests."""
    before = {one.worker: one.rate for one in planned}
    return all(one.rate >= before.get(one.worker, 1.0) for one in rates)
