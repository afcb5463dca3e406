"""The rule about a job's first plan: which nodes it waits for, and for how long.

Nodes get ready for a job before it has a plan. Must not know later plans.
"""

from oobleck.core.errors import PlanInfeasible
from oobleck.core.units import count
from oobleck.master.events.jobs import JobFailed, JobStarted
from oobleck.master.planning import client
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.jobs import profiling
from oobleck.master.rules.nodes import node_faults
from oobleck.master.rules.plans.next_plan import names, next_generation, plan_made, wait
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.node import Node


def start(context: Context, job: Job) -> Decision | None:
    """Plan generation 1 once every node that may still get ready is."""
    state = context.state
    candidates, _ = state.alike(job)
    ready, unlike = node_faults.like_data(
        state, [node for node in candidates if state.is_ready(node, job)]
    )
    timeout_s = context.timing.start_timeout_s
    pending: list[Node] = []
    given_up: list[Node] = []
    for node in candidates:
        if not state.is_ready(node, job):
            (pending if _start_deadline(context, node) > context.now else given_up).append(node)
    here = [node for node in pending if not _is_away(context, node)]
    try:
        if len(here) < len(pending) and _enough(job, [*ready, *here]):
            pending = here
        _check_enough(job, [*ready, *pending])
        if job.state == "waiting for nodes":
            _check_shadows(context, job, [*ready, *pending])
            return Decision(actions=(JobStarted(job_id=job.id),), reason="enough nodes are here")
        if pending:
            return _getting_ready(context, job, pending)
        if (due := _settled_at(context, job, ready)) is not None and context.now < due:
            return Decision(wake_at=due, reason="enough nodes are ready; more may follow")
        if (first := profiling.before_plan(context, job, ready)) is not None:
            return first
        plan = client.first_plan(context.planner, job, ready, next_generation(context, job))
    except PlanInfeasible as infeasible:
        if client.never_fits(job, candidates):
            reason = "; ".join(infeasible.causes)
            return Decision(actions=(JobFailed(job_id=job.id, reason=reason),), reason=reason)
        if given_up and (start := _still_starting(context, job, [*ready, *pending], given_up)):
            return start
        late = f"not ready after {timeout_s:g} s: {names(given_up)}"
        odd = f"{names(unlike)}: {node_faults.OTHER_DATA}"
        more = [*([late] if given_up else []), *([odd] if unlike else [])]
        return wait(state, job, infeasible, *more)
    reason = f"{count(len(ready), 'node')} {'is' if len(ready) == 1 else 'are'} ready"
    if idle := client.idle_slots(plan, ready[0].facts.worker_slots):
        reason += f"; {idle}"
    event = plan_made(
        context, job, plan, boundary=False, cause="start", rule="start", reason=reason
    )
    out = [node_faults.left_out(job, node, node_faults.OTHER_DATA) for node in unlike]
    return Decision(actions=(*out, event), reason=reason)


def shortfall(state: ClusterState, job: Job) -> str:
    """Describe the nodes that the cluster lacks for a job without a plan; empty: none, as far as is
    known."""
    if job.current.made is not None or job.state in ENDED:
        return ""
    nodes = state.candidates(job)
    try:
        _check_enough(job, nodes)
    except PlanInfeasible as infeasible:
        causes = "; ".join(infeasible.causes)
        return causes if client.never_fits(job, nodes) else f"{causes}; the job waits until then"
    return ""


def get_ready(context: Context, job: Job) -> Decision | None:
    """Return the decision to wait for nodes that get ready for a job about to go on after another
    one; None: no node is worth waiting for."""
    pending = [
        node
        for node in context.state.candidates(job)
        if not context.state.is_ready(node, job)
        and not _is_away(context, node)
        and _start_deadline(context, node) > context.now
    ]
    return _getting_ready(context, job, pending) if pending else None


def _getting_ready(context: Context, job: Job, pending: list[Node]) -> Decision:
    return Decision(
        wake_at=min(_look_again(context, node) for node in pending),
        reason=f"nodes get ready for {job.id}: {names(pending)}",
    )


def _still_starting(
    context: Context, job: Job, nodes: list[Node], late: list[Node]
) -> Decision | None:
    """Wait for slow nodes that are needed and make progress; None: there is no reason to wait."""
    coming = [node for node in late if node.connected and _has_all(job, node)]
    if not coming or not _enough(job, [*nodes, *coming]):
        return None
    if job.state == "waiting for nodes":
        return Decision(actions=(JobStarted(job_id=job.id),), reason="enough nodes get ready")
    return Decision(reason=f"slow, but they get ready: {names(coming)}")


def _has_all(job: Job, node: Node) -> bool:
    """Return whether every slot has a process of the job, up or not. Processes known to have ended
    do not count, though the last status may still list them."""
    status = node.seen.status
    here = [worker for worker in status.workers if not job.seen.is_gone(worker.incarnation)]
    return status.job_id == job.id and len(here) == node.facts.worker_slots


def _start_deadline(context: Context, node: Node) -> float:
    """Return the time until which the first plan waits for the node."""
    since = context.now if node.seen.assigned_at is None else node.seen.assigned_at
    return since + context.timing.start_timeout_s


def _look_again(context: Context, node: Node) -> float:
    """Return when to check again whether the node is still worth waiting for."""
    closed_at = node.seen.closed_at
    if closed_at is None or _is_away(context, node):
        return _start_deadline(context, node)
    return min(_start_deadline(context, node), closed_at + context.timing.away_s)


def _is_away(context: Context, node: Node) -> bool:
    """Return whether the agent's stream has been closed for so long that the others do not wait for
    it."""
    closed_at = node.seen.closed_at
    return closed_at is not None and context.now >= closed_at + context.timing.away_s


def _check_enough(job: Job, nodes: list[Node]) -> None:
    """Raises PlanInfeasible. To measure a model, any node is enough."""
    if job.profile_only and nodes:
        return
    client.check_enough(job, nodes)


def _check_shadows(context: Context, job: Job, nodes: list[Node]) -> None:
    """Raises PlanInfeasible where `nodes` are enough with shadows alone, and lack the memory for
    them, which only a plan tells."""
    if not job.profile_only and client.needs_shadows(job, nodes):
        client.first_plan(context.planner, job, nodes, next_generation(context, job))


def _settled_at(context: Context, job: Job, ready: list[Node]) -> float | None:
    """Return the time until which a start on fewer nodes than templates need waits for others. When
    a cluster is switched on, all of its nodes come up at about the same time. None: there are
    enough."""
    if job.profile_only or not client.needs_shadows(job, ready):
        return None
    return max(node.seen.ready_at or context.now for node in ready) + context.timing.join_settle_s


def _enough(job: Job, nodes: list[Node]) -> bool:
    try:
        _check_enough(job, nodes)
    except PlanInfeasible:
        return False
    return True
