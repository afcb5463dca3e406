"""Rules about drains: moving work off a node before it leaves, without a loss.

A drain is a planned change, as a join is. The plan without the node is pushed while training
continues, and all switch after a vote. Layers that the node alone holds are handed over first
(`Assign` in `oobleck.core.messages`). Until that plan has committed a step the node keeps its part,
and after a loss meanwhile the next plan may use it again. The node is kept if the job cannot
continue without it, or could then lose fewer nodes than it asks for, unless the drain is forced. A
drain is forced if the agent was ordered to end: then the job must do without the node as after a
loss. All drains under way count together. A node that no job needs is drained at once.

A node whose agent reports a sick GPU is drained before it dies. This happens only while the job
without it can lose as many nodes as it wants. Nodes go one at a time, the sickest first. NVML may
be wrong. So no node is drained if at least half of the others are sick too. Sick nodes return if
the job waits for nodes or can lose fewer than it wants. A trouble that an operator undrained does
not count until the agent is started anew.
"""

import contextlib
from collections.abc import Iterator, Sequence

from oobleck.core.errors import NoNodeReady, PlanInfeasible
from oobleck.core.units import count
from oobleck.master.events.jobs import CheckpointRequested
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeDrainRequested,
    NodeKept,
    NodeLost,
    NodeReleased,
)
from oobleck.master.events.unions import Journaled
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision, decide
from oobleck.master.rules.next_plan import next_plan
from oobleck.master.rules.plan_made import answer_made
from oobleck.master.rules.questions import (
    by_name,
    draining_members,
    draining_nodes,
    next_generation,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried
from oobleck.master.state.job import Job
from oobleck.master.state.node import Drain, Node
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.course import WITHOUT_DRAINED
from oobleck.planner.recovery.reconfigure import can_lose

TOLD_TO_END = "its agent was told to end"


def take_wishes(context: Context) -> Decision | None:
    """Journal the drains that ending agents request in their statuses."""
    wished = tuple(
        NodeDrainRequested(node=name, request_id="", reason=TOLD_TO_END, force=True)
        for name, node in sorted(context.state.nodes.items())
        if node.connected
        and node.seen.status.leaving
        and (node.drain is None or not (node.drain.force or node.drain.done))
    )
    return decide(wished, _names(wished))


def farewell(context: Context) -> Decision | None:
    """Declare nodes lost as soon as their agents announce their end. Other nodes need nothing from
    a drained node, and workers end with their agent."""
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
    """Mark drains as done once their nodes are no longer needed. A node that trains a job unknown
    to this master is needed until that job is adopted or over."""
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


def move_off(context: Context, job: Job) -> Decision | None:
    """Make the plan without the nodes that are to be drained, and can be."""
    state = context.state
    if job.state == "waiting for nodes":
        return _give_up(job, draining_nodes(state, job))
    moving = draining_members(state, job)
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
    answer, events = _plan_without_most(context, job, moving)
    members = job.current.made.plan.nodes if job.current.made is not None else None
    if answer is None or members == answer.found.plan.nodes:
        return Decision(actions=tuple(events)) if events else None
    made = answer.found
    staying = frozenset(made.plan.nodes)
    gone = [node for node in job.current.members if node not in staying]
    verb = "is" if len(gone) == 1 else "are"
    reason = f"{', '.join(gone)} {verb} drained: {made.reason}"
    event = answer_made(context, job, answer, boundary=True, cause="node drained", reason=reason)
    return Decision(actions=(*events, event), reason=reason)


def _give_up(job: Job, moving: Sequence[Node]) -> Decision | None:
    """Drain nodes of a job that waits for nodes, if their drain is forced. Other nodes are kept,
    since they hold a part of its state."""
    forced = tuple(_without(job, node) for node in moving if node.drain and node.drain.force)
    if forced:
        return Decision(actions=forced, reason="a drain is forced while the job waits for nodes")
    kept = "it waits for nodes, and this one holds a part of its state"
    events = tuple(event for node in moving for event in _kept(job, node, kept))
    return decide(events, kept)


def _without(job: Job, node: Node) -> NodeDrained:
    reason = node.drain.reason if node.drain is not None else ""
    return NodeDrained(node=node.facts.node, job_id=job.id, reason=reason)


def _plan_without_most(
    context: Context, job: Job, moving: Sequence[Node]
) -> tuple[Answer | None, list[Journaled]]:
    """Return the plan without as many of `moving` as the job can spare, and events about the
    others: they are kept, or lost if their drain is forced."""
    ready = [node for node in context.state.candidates(job) if context.state.is_ready(node, job)]

    def plan_with(staying: Sequence[Node]) -> Answer:
        generation = next_generation(context, job)
        return next_plan(context, job, by_name([*ready, *staying]), generation, WITHOUT_DRAINED)

    if len(moving) > 1:  # usually one plan without all of them is enough
        with contextlib.suppress(PlanInfeasible):
            taken = plan_with(())
            if not any(questions.lowers_tolerance(job, node, taken) for node in moving):
                return taken, []
    best: Answer | None = None
    staying = list(moving)
    events: list[Journaled] = []
    # Forced drains first: those nodes leave in any case.
    for node in sorted(moving, key=lambda node: node.drain is None or not node.drain.force):
        rest = [other for other in staying if other is not node]
        try:
            without = plan_with(rest)
        except PlanInfeasible as infeasible:
            if node.drain is not None and node.drain.force:
                return None, _by_force(job, node, node.drain)
            events += _kept(job, node, _why_needed(infeasible))
            continue
        if questions.lowers_tolerance(job, node, without):
            left, wanted = can_lose(without.found.plan), job.spec.fault_tolerance
            why = f"without it {count(left, 'node')} can be lost, but fault_tolerance is {wanted}"
            events += _kept(job, node, why)
        else:
            best, staying = without, rest
    return best, events


def _why_needed(infeasible: PlanInfeasible) -> str:
    if isinstance(infeasible, NoNodeReady):
        return "it is the last node that can train it; start or undrain another one"
    return "; ".join(infeasible.causes)


def _by_force(job: Job, node: Node, drain: Drain) -> list[Journaled]:
    """Take the node from the job, after a last checkpoint if the job has any."""
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
    """Yield the event that the node is kept, unless it was kept for the same reason before."""
    reason = f"job {job.id} needs it: {why}"
    if node.drain is not None and node.drain.kept != reason:
        yield NodeKept(node=node.facts.node, job_id=job.id, reason=reason)


def take_out(context: Context) -> Decision | None:
    """Drain the sickest node, once the drain of the previous one is decided."""
    state, job = context.state, context.state.job
    if job is not None and (job.state != "running" or falls_short(job)):
        return None
    drains = [node.drain for node in state.nodes.values() if node.drain and node.is_out_as_sick]
    if any(not (drain.done or drain.kept) for drain in drains) or _most_are_sick(state):
        return None
    sick = [
        node for node in state.nodes.values() if node.drain is None and not node.seen.status.leaving
    ]
    troubles = {node.facts.node: node.troubles for node in sick if node.troubles}
    if not troubles:
        return None
    name = min(troubles, key=lambda name: (-len(troubles[name]), name))
    wish = NodeDrainRequested(
        node=name, request_id="", reason="; ".join(troubles[name]), force=False
    )
    return Decision(actions=(wish,), reason=f"{name}: a GPU is sick")


def take_back(context: Context) -> Decision | None:
    """Undo drains of sick nodes that are needed, or whose sickness seems a false alarm."""
    state, job = context.state, context.state.job
    if _most_are_sick(state):
        why = "most nodes are sick, so it may be a false alarm"
    elif job is not None and job.state == "waiting for nodes":
        why = f"job {job.id} waits for nodes"
    elif job is not None and job.state == "running" and falls_short(job):
        why = f"job {job.id} can lose fewer nodes than it wants"
    else:
        return None
    return decide(
        [
            NodeReleased(node=name, reason=why)
            for name, node in sorted(state.nodes.items())
            if node.connected and node.is_out_as_sick and not node.seen.status.leaving
        ]
    )


def falls_short(job: Job) -> bool:
    """Return whether the job's newest plan tolerates fewer lost nodes than the job asks for, with
    no follow-up plan due that could help."""
    made = job.current.made
    if made is None or made.then:
        return False
    return can_lose(made.plan) < job.spec.fault_tolerance


def _most_are_sick(state: ClusterState) -> bool:
    """Return whether at least half of the other nodes are sick, for each sick node. Registered
    nodes that are not connected count as well."""
    registered = [node for node in state.nodes.values() if node.registered]
    sick = [node for node in registered if node.troubles]
    return bool(sick) and 2 * (len(sick) - 1) >= len(registered) - 1
