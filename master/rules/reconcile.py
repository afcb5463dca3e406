"""What to do next: the decisions of the master, as a pure function over its state.

`reconcile` looks at the level of things, not at the event that came last: each rule compares what
is with what should be, and the first rule with something to decide wins. What it decides are
facts (`Journaled` events); the shell records and applies them and asks again until nothing is
left. Telling the agents needs no action: their assignments follow from the state, and the shell
sends whichever has changed. Must not know the clock, I/O, or how messages travel.
"""

from oobleck.host.detection import Detection
from oobleck.master.config import GIVES_WAY_S, Retention
from oobleck.master.events.nodes import NodeCleared
from oobleck.master.planning.requests import Planner, StillPlanning
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules import (
    adoption,
    checkpoints,
    completion,
    draining,
    first_plan,
    job_faults,
    job_queue,
    node_faults,
    quarantine,
    replacing,
    replan,
    retention,
    stalls,
)
from oobleck.master.rules.decision import Context, Decision, Rule
from oobleck.master.rules.losses import lost_nodes, next_verdict
from oobleck.master.state.cluster import ClusterState

_RETENTION = Retention()


def reconcile(
    state: ClusterState,
    now: float,
    config: Detection,
    *,
    nonce: str,
    planner: Planner | None = None,
    retain: Retention = _RETENTION,
    gives_way_s: float = GIVES_WAY_S,
) -> Decision:
    """What to do next, when to look again, and why. Pure: no clock, no I/O, no randomness.

    `planner` gives the plans; None: they are made on the way.
    """
    context = Context(
        state=state,
        now=now,
        timing=config,
        nonce=nonce,
        planner=planner or AtOnce(),
        retention=retain,
        gives_way_s=gives_way_s,
    )
    wake_at: float | None = None
    reasons: list[str] = []
    for rule in _RULES:
        try:
            decision = rule(context)
        except StillPlanning as still:
            reason = "; ".join([*reasons, str(still)])
            return Decision(wake_at=wake_at, reason=reason, awaits=still.request)
        if decision is None:
            continue
        if decision.actions:
            return decision
        if decision.wake_at is not None:
            wake_at = decision.wake_at if wake_at is None else min(wake_at, decision.wake_at)
        if decision.reason:
            reasons.append(decision.reason)
        if decision.hold:
            break
    return Decision(wake_at=wake_at, reason="; ".join(reasons))


def _lose_nodes(context: Context) -> Decision | None:
    lost = lost_nodes(context.state, context.now, context.timing)
    if lost:
        return Decision(actions=lost, reason="; ".join(f"{n.node}: {n.reason}" for n in lost))
    return Decision(wake_at=next_verdict(context.state, context.now, context.timing))


def _clear_nodes(context: Context) -> Decision | None:
    cleared = tuple(
        NodeCleared(node=name)
        for name, node in sorted(context.state.nodes.items())
        if node.connected and node.stale_workers and not node.seen.status.workers
    )
    return Decision(actions=cleared, reason="stale workers are gone") if cleared else None


_RULES: tuple[Rule, ...] = (
    _lose_nodes,
    _clear_nodes,
    draining.take_wishes,
    job_queue.next_job,
    adoption.adopt,
    draining.farewell,
    quarantine.put_aside,
    quarantine.release,
    draining.finish,
    checkpoints.note,
    completion.first_step,
    completion.caught_up,
    job_faults.fail_jobs,
    completion.end_jobs,
    job_faults.leave_out,
    node_faults.leave_out,
    replan.lose_workers,
    replacing.give_up_late,
    first_plan.start,
    replan.replan,
    replan.meet_after_peer_loss,
    job_queue.give_way,
    stalls.rouse,
    draining.move_off,
    replan.join,
    retention.forget_nodes,
    retention.forget_jobs,
)
