"""A job that no plan is possible for waits for nodes, and says what for.

Where its state is gone for good nothing is worth the wait: it fails.
"""

from collections.abc import Iterable

from oobleck.master.events.jobs import JobWaiting
from oobleck.master.events.nodes import NodeLost
from oobleck.master.rules import holders
from oobleck.master.rules.completion import fail
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.state import versions
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import NodeName
from oobleck.planner.units import count, listed

_BACK = "put that right, and 'oobleck node undrain NODE' takes a node back"


def names(nodes: Iterable[Node]) -> str:
    return listed(node.facts.node for node in nodes)


def wait(state: ClusterState, job: Job, infeasible: PlanInfeasible, *more: str) -> Decision:
    out = _left_out(sorted(job.left_out.items()))
    odd = _left_out((node.facts.node, why) for node, why in versions.alike(state, job)[1])
    slots = state.worker_slots(job) or 0
    connected = [node for node in state.nodes.values() if node.connected]
    others = [node for node in connected if node.facts.worker_slots != slots]
    drained = [
        n for n in connected if n.drain is not None and n.drain.by == "operator" and n.drain.done
    ]
    undrain = f"drained: {names(drained)} ('oobleck node undrain NODE' takes one back)"
    idle = f"kept idle: {names(others)}, because the job uses nodes with {count(slots, 'worker')}"
    causes = (
        *infeasible.causes,
        *more,
        *([idle] if others else []),
        *([undrain] if drained else []),
        *odd,
        *out,
        *([_BACK] if out else []),
    )
    reason = "; ".join(causes)
    if job.state == "waiting for nodes" and job.reason == reason:
        return Decision(reason=reason)
    return Decision(actions=(JobWaiting(job_id=job.id, causes=causes),), reason=reason)


def _left_out(nodes: Iterable[tuple[NodeName, str]]) -> list[str]:
    """Each reason once, with all that it keeps out."""
    by_reason: dict[str, list[NodeName]] = {}
    for node, why in nodes:
        by_reason.setdefault(why, []).append(node)
    return [
        f"{listed(found)} {'is' if len(found) == 1 else 'are'} left out: {why}"
        for why, found in by_reason.items()
    ]


def give_up_lost(context: Context, job: Job) -> Decision | None:
    """The end of a job whose state nobody has, nor can bring back, where there is no checkpoint and
    it does not want to begin anew."""
    if job.has_checkpoint or job.spec.on_state_lost == "restart":
        return None
    if (lost := holders.gone_for_good(context, job)) is None:
        return None
    why = [f"{loss.node}: {loss.reason}" for loss in job.losses if isinstance(loss, NodeLost)]
    reason = "; ".join(
        (
            f"{lost}, nor can any node that is away bring it back, and there is no checkpoint",
            *_left_out(sorted(job.left_out.items())),
            *why,
            "submit the job again, with checkpoint.path to go on from one after such a loss, or "
            "with on_state_lost: restart to begin anew by itself",
        )
    )
    return fail(context, job, reason)
