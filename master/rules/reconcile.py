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
    held = False
    for rule in (*_RULES, *_AT_LAST):
        if held and rule in _RULES:
            continue
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
        held = held or decision.holds_plans
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


#: In this order; the comment of each rule says why it stands before those that follow.
_RULES: tuple[Rule, ...] = (
    # Everything else counts on nodes: who is gone must be known before anything is planned.
    _lose_nodes,
    # A node becomes a candidate by this, and the plans below shall have it.
    _clear_nodes,
    # A node that is to be drained is no candidate, so wishes come before plans too.
    draining.take_wishes,
    # Most rules below are about the active job: there must be one.
    job_queue.next_job,
    # What runs already is taken over before anyone declares a part of it lost, or plans anew.
    adoption.adopt,
    # An agent that says goodbye is no failure: its node goes before failures are counted.
    draining.farewell,
    # Failures are counted before plans are made, so that a node that is put aside is in none.
    quarantine.put_aside,
    # A node comes back only after the same look at its failures, and in time for the plans.
    quarantine.release,
    # A node that nobody needs is told so before a plan could need it again.
    draining.finish,
    # How far the job is decides all that follows; checkpoints may set it back.
    checkpoints.note,
    # A step ends an incident: what is found below belongs to the next one.
    completion.first_step,
    # The same of a step that only repeats known ones.
    completion.caught_up,
    # A job that has failed by its own fault blames no node, and is not planned again.
    job_faults.fail_jobs,
    # A job that is over, or cancelled, gets no more losses nor plans.
    completion.end_jobs,
    # A node at fault is left out as a whole before its workers are declared lost one by one.
    job_faults.leave_out,
    # So is one that cannot take part; both before a first plan or the next has it.
    node_faults.leave_out,
    # Losses of workers are declared before they are answered, all of one moment together.
    replan.lose_workers,
    # A replacement that does not get up is one more loss for the same answer.
    replacing.give_up_late,
    # With no plan yet there is nothing to answer: the rules below have nothing to do.
    first_plan.start,
    # Declared losses are answered first: they say more than want of progress does.
    replan.replan,
    # Only where nobody is missing, a lost peer means that all meet again.
    replan.meet_after_peer_loss,
    # Only a job that no plan was found for by now lets another one train.
    job_queue.give_way,
    # Want of progress says least about who is at fault, so it comes after all other evidence.
    stalls.rouse,
    # What can wait for a step boundary comes after what cannot; leaving nodes before new ones, so
    # that one plan does both.
    draining.move_off,
    replan.join,
)
#: Nothing above depends on what is long over; these wait for no plan but one that is being made.
_AT_LAST: tuple[Rule, ...] = (retention.forget_nodes, retention.forget_jobs)
