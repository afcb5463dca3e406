"""Rules about drains: moving work off a node before it goes away, without a loss.

A drain is a planned change, as a join is: the plan without the node is pushed while training goes
on, and all switch after a vote; what the node alone holds is handed over first (`Assign` in
`oobleck.core.messages`). Until that plan has committed a step the node goes on with its part,
and after a loss meanwhile the next plan may use it again. It is kept where the job cannot go on
without it, unless the drain is forced, as that of an agent is that was told to end: then the job
must do without it as after a loss. A node that no job needs is drained at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from oobleck.core.errors import PlanInfeasible
from oobleck.core.units import count
from oobleck.master.events.jobs import CheckpointRequested
from oobleck.master.events.nodes import NodeDrained, NodeDrainRequested, NodeKept, NodeLost
from oobleck.master.events.unions import Journaled
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.rules.nodes import sickness
from oobleck.master.rules.plans.next_plan import next_generation, next_plan, plan_made
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried
from oobleck.master.state.job import Job
from oobleck.master.state.node import Drain, Node
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.reconfigure import can_lose

TOLD_TO_END = "its agent was told to end"


def take_wishes(context: Context) -> Decision | None:
    """An agent that was told to end asks for its node's drain in its status."""
    wished = tuple(
        NodeDrainRequested(node=name, request_id="", reason=TOLD_TO_END, force=True)
        for name, node in sorted(context.state.nodes.items())
        if node.connected
        and node.seen.status.leaving
        and (node.drain is None or not (node.drain.force or node.drain.done))
    )
    return decide(wished, _names(wished))


def farewell(context: Context) -> Decision | None:
    """Nodes whose agents end by their own word are not waited for: a drained one has nothing that
    others need, and any other's workers end with it."""
    gone = tuple(
        _gone(context, node)
        for _, node in sorted(context.state.nodes.items())
        if node.registered and (node.seen.status.ending or _has_left(node))
    )
    return decide(gone, _names(gone))


def _has_left(node: Node) -> bool:
    drained = node.drain is not None and node.drain.done
    return drained and node.seen.status.leaving and node.seen.closed_at is not None


def _gone(context: Context, node: Node) -> NodeLost:
    job, name = context.state.job, node.facts.node
    drained = node.drain is not None and node.drain.done
    closed_at = node.seen.closed_at
    concerned = job if job is not None and job.current.has_member(name) else None
    return NodeLost(
        node=name,
        incarnation=node.facts.incarnation,
        cause="left",
        reason="its agent has ended, as it was told to" if drained else "its agent ends at once",
        detect_s=0.0 if closed_at is None else context.now - closed_at,
        evidence=carried(concerned, context.now) if concerned is not None else (),
    )


def finish(context: Context) -> Decision | None:
    """Nodes that nobody needs any more are drained. One that trains a job that this master does not
    know is needed until that is adopted or over."""
    job = context.state.job
    needed = {*job.current.members, *job.current.leaving} if job is not None else set()
    done = tuple(
        NodeDrained(node=name)
        for name, node in sorted(context.state.nodes.items())
        if node.drain is not None and not node.drain.done
        if name not in needed and node.held is None
    )
    return decide(done, _names(done))


def _names(events: Sequence[NodeDrainRequested | NodeDrained | NodeLost]) -> str:
    return f"{', '.join(event.node for event in events)}: drained, or asked to be"


def on_the_move(state: ClusterState, job: Job) -> list[Node]:
    """Members of the plan that are to be drained, in the order of their names."""
    return [state.nodes[name] for name in job.current.members if state.nodes[name].moves_off]


def is_undecided(state: ClusterState, node: Node) -> bool:
    """Return whether the planner is still asked if the node's work can move off it."""
    job, drain = state.job, node.drain
    if job is None or drain is None or job.state != "running":
        return False
    known = drain.save if drain.force else drain.kept
    return node.moves_off and node.facts.node in job.current.members and not known


def _still_there(state: ClusterState, job: Job) -> list[Node]:
    """Also those that the newest plan is without, and that are needed until it trains."""
    held = (state.nodes[name] for name in {*job.current.members, *job.current.leaving})
    return _sorted([node for node in held if node.moves_off])


def plan_without_drained(context: Context, job: Job, live: Sequence[Node]) -> Answer:
    """Without the nodes that are to be drained; with them where nothing else is possible, but for
    forced drains, and with those that are only sick where the job can lose fewer nodes than it
    wants. Raises PlanInfeasible."""
    state, generation = context.state, next_generation(context, job)
    kept = [
        node
        for node in _still_there(state, job)
        if state.is_ready(node, job) and node.drain is not None and not node.drain.force
    ]
    try:
        found = next_plan(context, job, live, generation)
    except PlanInfeasible:
        if not kept:
            raise
        return next_plan(context, job, _sorted([*live, *kept]), generation)
    left = can_lose(found.found.plan)
    needed = [node for node in kept if sickness.is_too_much(job, node, left)]
    if needed:
        with suppress(PlanInfeasible):
            more = next_plan(context, job, _sorted([*live, *needed]), generation)
            return more if can_lose(more.found.plan) > left else found
    return found


def _sorted(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.facts.node)


def move_off(context: Context, job: Job) -> Decision | None:
    """Make the plan without the nodes that are to be drained, and can be."""
    state = context.state
    if job.state == "waiting for nodes":
        return _give_up(job, _still_there(state, job))
    moving = on_the_move(state, job)
    if (
        not moving
        or job.current.losses
        or not all(state.nodes[name].connected for name in job.current.members)
    ):
        return None
    if job.state != "running" or job.seen.peers_lost:
        return None
    if job.seen.steps.furthest_step >= job.spec.training.steps:
        return Decision(reason="the job ends before work could move")
    answer, events = _find(context, job, moving)
    members = job.current.made.plan.nodes if job.current.made is not None else None
    if answer is None or members == answer.found.plan.nodes:
        return Decision(actions=tuple(events)) if events else None
    found = answer.found
    staying = frozenset(found.plan.nodes)
    gone = ", ".join(node for node in job.current.members if node not in staying)
    reason = f"{gone} is drained: {found.reason}"
    event = plan_made(
        context,
        job,
        found.plan,
        boundary=True,
        cause="node drained",
        rule=found.rule,
        reason=reason,
        detect_s=0.0,
        policy=answer.policy,
        then=answer.then or "",
        answer=answer,
    )
    return Decision(actions=(*events, event), reason=reason)


def _give_up(job: Job, moving: Sequence[Node]) -> Decision | None:
    """A job that does not train has nothing to lose but what the node holds of its state."""
    forced = tuple(_without(job, node) for node in moving if node.drain and node.drain.force)
    if forced:
        return Decision(actions=forced, reason="a drain is forced while the job waits for nodes")
    kept = "it waits for nodes, and this one holds a part of its state"
    events = tuple(event for node in moving for event in _kept(job, node, kept))
    return decide(events, kept)


def _without(job: Job, node: Node) -> NodeDrained:
    reason = node.drain.reason if node.drain is not None else ""
    return NodeDrained(node=node.facts.node, job_id=job.id, reason=reason)


def _find(
    context: Context, job: Job, moving: Sequence[Node]
) -> tuple[Answer | None, list[Journaled]]:
    """The plan without as many of `moving` as the job can go on without, and what becomes of the
    others: they are kept, or gone all the same where that is forced."""
    state, generation = context.state, next_generation(context, job)
    ready = [node for node in state.candidates(job) if state.is_ready(node, job)]
    staying = list(moving)
    found: Answer | None = None
    events: list[Journaled] = []
    for node in moving:
        rest = [other for other in staying if other is not node]
        try:
            live = _sorted([*ready, *rest])
            without = next_plan(context, job, live, generation, "templates")
        except PlanInfeasible as infeasible:
            if node.drain is not None and node.drain.force:
                return None, _by_force(job, node, node.drain)
            events += _kept(job, node, "; ".join(infeasible.causes))
            continue
        left = can_lose(without.found.plan)
        if sickness.is_too_much(job, node, left):
            wanted = job.spec.fault_tolerance
            why = f"without it {left} can be lost, of the {count(wanted, 'node')} that it wants"
            events += _kept(job, node, why)
        else:
            found, staying = without, rest
    return found, events


def _by_force(job: Job, node: Node, drain: Drain) -> list[Journaled]:
    """The job must do without the node, but not without what a last checkpoint can save."""
    if job.spec.checkpoint is None or 0 < drain.save <= job.saves.answered:
        return [_without(job, node)]
    if drain.save:
        return []
    number, name = job.saves.requested + 1, node.facts.node
    reason = f"job {job.id} cannot go on without it, and takes a checkpoint first"
    return [
        CheckpointRequested(job_id=job.id, request_id=f"drain-{name}-{number}", number=number),
        NodeKept(node=name, job_id=job.id, reason=reason, save=number),
    ]


def _kept(job: Job, node: Node, why: str) -> Iterator[NodeKept]:
    """Once for each reason."""
    reason = f"job {job.id} needs it: {why}"
    if node.drain is not None and node.drain.kept != reason:
        yield NodeKept(node=node.facts.node, job_id=job.id, reason=reason)
