"""Rule about plans after losses, and the end of a job whose state is lost for good.

Must not know how plans are made.
"""

from collections.abc import Sequence
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost
from oobleck.host.detection import GATHER_REPORTS_S
from oobleck.master.events.jobs import Cause
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeLost,
    NodeReset,
    WorkerLost,
)
from oobleck.master.planning.requests import PlanningFailed
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, fail
from oobleck.master.rules.next_plan import (
    describe_left_out,
    get_ready,
    plan_without_drained,
    wait,
    without_state,
)
from oobleck.master.rules.plan_made import answer_made, met_enough
from oobleck.master.rules.questions import (
    is_up,
    names,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.recovery import course
from oobleck.planner.recovery.answer import Answer


def replan(context: Context, job: Job) -> Decision | None:
    """Answer losses, or try again while waiting, with all nodes that are ready."""
    state = context.state
    again = job.astray or job.state == "waiting for nodes"
    if not (job.current.losses or again or _unanswered(job) or _forsaken(state, job)):
        return None
    members = [state.nodes[name] for name in job.current.members]
    away = [node for node in members if not node.connected]
    if away:
        # No wait for nodes yet, so the job does not give way.
        reason = f"{names(away)}: back, or lost after the lease, before planning"
        return Decision(reason=reason, holds_plans=True)
    unready = [node for node in members if not state.is_ready(node, job)]
    if job.current.put_back and (start := get_ready(context, job)) is not None:
        return start
    coming = (
        questions.nodes_starting(state, job, unready) if job.current.losses and not again else []
    )
    missing = [node for node in unready if node not in coming]
    patience = _for_replacements(context, job, missing)
    if patience and not all(questions.takes_longer(job, node) for node in missing):
        return patience
    on_the_way = job.current.on_the_way and job.state != "waiting for nodes"
    if on_the_way and (late := _wait_for_reports(context, job, 2 * GATHER_REPORTS_S)) is not None:
        return late
    live = [node for node in state.candidates(job) if state.is_ready(node, job) or node in coming]
    try:
        answer = plan_without_drained(context, job, live)
    except PlanningFailed as failed:
        raise RuntimeError(f"nothing answers the loss: {failed}") from failed
    except PlanInfeasible as infeasible:
        return patience or _give_up_lost(context, job) or _wait_for_nodes(context, job, infeasible)
    plan = answer.found.plan
    if not any(is_up(state, worker) for worker in plan.workers):
        return Decision(reason=f"{names(coming)}: to be up before planning")
    if job.state == "waiting for nodes" and (more := _wait_for_more(context, live, plan)):
        return more
    lost = questions.lost_layers(state, job, plan)
    if lost is not None and patience:
        return patience
    cause = _cause(job, plan)
    reason = _reason(job, answer, cause, lost, coming, missing)
    if cause == "worker lost" and (end := met_enough(context, job, _worker_losses(job))):
        return end
    event = answer_made(
        context,
        job,
        answer,
        boundary=False,
        cause=cause,
        reason=reason,
        restore=lost is not None or answer.policy == course.MORPH,
        passes_over=job.unentered,
    )
    return Decision(actions=(event,), reason=reason)


def _reason(
    job: Job,
    answer: Answer,
    cause: Cause,
    lost: LayerLost | None,
    coming: Sequence[Node],
    missing: Sequence[Node],
) -> str:
    """Describe for operators why this plan was made, and what it does without."""
    reason = answer.found.reason
    if lost is not None:
        reason += f"; {lost}, so that all {_way_back(job)}"
    elif answer.policy == course.MORPH:
        reason += f"; all {_way_back(job)}"
    if coming:
        reason += f"; a process is being started on {names(coming)}"
    if missing:
        reason += f"; no replacement was ready in time on {names(missing)}"
    wanted = job.spec.recovery.policy
    if cause == "worker lost" and course.routes_losses(wanted) and answer.policy == course.MOVING:
        reason += f"; not by {wanted}: the node is there, with a new process"
    return reason


def _wait_for_nodes(context: Context, job: Job, infeasible: PlanInfeasible) -> Decision:
    """Wait for nodes, or for the return of those that hold the state."""
    gone = None if job.has_checkpoint else questions.layers_away(context.state, job)
    # New nodes without state do not help then.
    why = infeasible if gone is None else without_state(context, job, gone)
    wake_at = questions.given_up_at(context, job)
    return replace(wait(context.state, job, why), wake_at=wake_at)


def _wait_for_more(context: Context, live: Sequence[Node], plan: Plan) -> Decision | None:
    """Wait a little for further nodes that return after the same disturbance; None: enough time
    has passed."""
    # The plan may also have nodes that are to be drained.
    nodes = (*live, *(context.state.nodes[name] for name in plan.nodes))
    due = max(node.seen.ready_at or context.now for node in nodes) + context.timing.join_settle_s
    if context.now >= due:
        return None
    # It holds plans rather than waits for nodes, so that the job does not give way.
    return Decision(wake_at=due, reason="enough nodes are here; more may follow", holds_plans=True)


def _for_replacements(context: Context, job: Job, missing: list[Node]) -> Decision | None:
    """Wait while replacement processes may still start on `missing` nodes; None: do not wait."""
    if not missing or job.seen.loss is None:
        return None
    due = job.seen.loss.declared_at + context.timing.replacement_grace_s
    if context.now >= due:
        return None
    return Decision(wake_at=due, reason=f"{names(missing)}: replacement to come", holds_plans=True)


def _wait_for_reports(context: Context, job: Job, patience_s: float) -> Decision | None:
    """Wait while agents may still report that their workers have entered the newest plan, if
    without such reports some state has no holder; None: do not wait.

    `patience_s` counts from the newest loss, or from the start of this head, which does not know
    earlier loss times.
    """
    seen = job.seen
    since = [seen.since, *(at for at, _ in seen.peers_lost.values())]
    since += [seen.loss.declared_at] if seen.loss is not None else []
    due = max(since) + patience_s
    if context.now >= due or not questions.may_be_unreported(context.state, job):
        return None
    reason = "agents may still report that their workers have entered the plan"
    return Decision(wake_at=due, reason=reason, holds_plans=True)


def _give_up_lost(context: Context, job: Job) -> Decision | None:
    """End a job whose state is lost for good; None: it may still be found.

    The end cannot be taken back, so it waits as long as a lease for reports of connected agents. An
    agent whose report takes longer is lost itself.
    """
    if (end := give_up_lost(context, job)) is None:
        return None
    return _wait_for_reports(context, job, context.timing.lease_s) or end


def _way_back(job: Job) -> str:
    looks = job.may_have_checkpoint and job.spec.on_state_lost != "restart"
    known = job.has_checkpoint or looks
    return "go back to the newest checkpoint" if known else "begin anew at step 1"


def _unanswered(job: Job) -> bool:
    """Return whether declared losses were taken back before a plan was made, so that some workers
    may have stopped training."""
    return job.state == "reconfiguring" and not job.current.on_the_way


def _forsaken(state: ClusterState, job: Job) -> bool:
    """Return whether the workers met and found a layer with neither a holder nor a checkpoint. That
    happens if the plan was made before the report of a step that lost workers had committed."""
    if (
        job.current.made is None
        or not job.current.on_the_way
        or not job.seen.peers_lost
        or job.has_checkpoint
    ):
        return False
    return questions.lost_layers(state, job, job.current.made.plan) is not None


def _worker_losses(job: Job) -> str:
    lost = (loss for loss in job.current.losses if isinstance(loss, WorkerLost))
    return "; ".join(f"{loss.worker}: {loss.reason}" for loss in lost)


def _cause(job: Job, plan: Plan) -> Cause:
    if job.current.put_back:
        return "put back"
    if any(isinstance(loss, NodeLost) for loss in job.current.losses):
        return "node lost"
    if any(isinstance(loss, NodeReset) for loss in job.current.losses):
        return "no progress"
    if any(isinstance(loss, NodeDrained) for loss in job.current.losses):
        return "node drained"
    if job.current.lost_nodes:
        return "node left out"
    if job.current.lost_workers:
        return "worker lost"
    if job.astray:
        return "journal cut"
    return "node returned" if set(job.current.members) == set(plan.nodes) else "node joined"


def give_up_lost(context: Context, job: Job) -> Decision | None:
    """Return the end of a job whose state no node holds or can bring back. None: it may resume,
    from a checkpoint or anew, or the state may be found."""
    if job.has_checkpoint or job.may_have_checkpoint or job.spec.on_state_lost == "restart":
        return None
    if (lost := questions.layers_gone(context, job)) is None:
        return None
    why = [
        f"{loss.node}: {loss.reason}" for loss in job.current.losses if isinstance(loss, NodeLost)
    ]
    reason = "; ".join(
        (
            f"{lost}, nor can any node that is away bring it back, and there is no checkpoint",
            *describe_left_out(sorted(job.left_out.items())),
            *why,
            "submit the job again, with checkpoint.path to go on from one after such a loss, or "
            "with on_state_lost: restart to begin anew by itself",
        )
    )
    return fail(context, job, reason)
