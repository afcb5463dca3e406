"""Next plan of a job: requests to the planner, and the decision to wait if no plan is possible.

No plan is made that would lose state for good. Also owns the requests that are likely to be next
(`Foresight`). Must not know which rule asks, nor how plans are made.
"""

import logging
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace

from oobleck.core.errors import NoNodeReady, PlanInfeasible
from oobleck.core.ids import Generation, JobId, NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost
from oobleck.core.units import comma_separated, count
from oobleck.master.events.jobs import JobWaiting
from oobleck.master.planning import client
from oobleck.master.planning.requests import PlanReply, PlanRequest, StillPlanning
from oobleck.master.planning.solve import AtOnce
from oobleck.master.rules import questions
from oobleck.master.rules.decision import Context, Decision
from oobleck.master.rules.questions import (
    by_name,
    draining_nodes,
    is_away,
    look_again,
    names,
    next_generation,
    start_deadline,
    undisturbed,
)
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.recovery import course
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.course import PlanWanted
from oobleck.planner.recovery.reconfigure import can_lose

log = logging.getLogger(__name__)


#: Most nodes of a job whose plans for losses are made ahead: with more, planning takes too long.
_MOST_NODES = 64
_BACK = "put that right, and 'oobleck node undrain NODE' takes a node back"


def next_plan(
    context: Context,
    job: Job,
    live: Sequence[Node],
    generation: Generation,
    wanted: PlanWanted | None = None,
) -> Answer:
    """Return the plan that replaces `job`'s newest one on `live`, by the `wanted` policy; None: the
    policy after a loss.

    Stand-by nodes are used only if without them no plan is possible, or none that can lose as many
    nodes as wanted.

    Raises StillPlanning and PlanInfeasible. A plan is also infeasible if it leaves a layer of a
    trained model without a holder and there is no checkpoint, unless the layer is gone for good and
    the job is to begin anew then.
    """
    wanted = wanted or _for_losses(job)
    at_work = [node for node in live if node.facts.node not in job.standing_by]
    if wanted == course.AROUND_SLOW or len(at_work) == len(live):
        return _next_plan(context, job, live, generation, wanted)
    try:
        taken = _next_plan(context, job, at_work, generation, wanted)
    except PlanInfeasible:
        if wanted in course.VOLUNTARY:
            raise
        return _next_plan(context, job, live, generation, wanted)
    if can_lose(taken.found.plan) >= job.spec.fault_tolerance:
        return taken
    with suppress(PlanInfeasible):
        with_all = _next_plan(context, job, live, generation, wanted)
        if can_lose(with_all.found.plan) > can_lose(taken.found.plan):
            return with_all
    return taken


def _next_plan(
    context: Context, job: Job, live: Sequence[Node], generation: Generation, wanted: PlanWanted
) -> Answer:
    if wanted == course.MORPH and not job.has_checkpoint:
        answer = _next_plan(context, job, live, generation, course.MOVING)
        reason = f"{answer.found.reason}; not by {wanted}: there is no checkpoint yet"
        return replace(answer, found=replace(answer.found, reason=reason))
    outlook = questions.outlook(context.state, job, context.now)
    answer = client.next_plan(context.planner, job, live, generation, wanted, outlook)
    lost = questions.lost_layers(context.state, job, answer.found.plan)
    if lost is not None and wanted in course.VOLUNTARY:
        raise PlanInfeasible(*lost.causes)  # a voluntary change must not lose state
    if lost is not None and job.has_checkpoint and wanted != course.MORPH:
        # All state is loaded anyway, so the shape is free.
        return _next_plan(context, job, live, generation, course.MORPH)
    if lost is not None and wanted not in (course.MOVING, course.MORPH):
        # State must move anyway, so move it to where it is best.
        return _next_plan(context, job, live, generation, course.MOVING)
    if lost is None or job.has_checkpoint:
        return answer
    looks = job.spec.on_state_lost == "restart" or job.may_have_checkpoint
    if looks and questions.layers_gone(context, job) is not None:
        return answer
    raise without_state(context, job, lost) from lost


def without_state(context: Context, job: Job, lost: LayerLost) -> PlanInfeasible:
    """Return the error that no live worker holds these layers of a job without a checkpoint; it
    names the nodes that may bring them back, and until when."""
    away = comma_separated(questions.may_bring_back(context, job, lost.layers))
    most = f"{context.retention.node_s / 3600:g} h"
    hope = f"only {away} with the workers of before can bring it back, within {most}; or "
    fix = "cancel the job and submit it again, since there is no checkpoint"
    if job.spec.on_state_lost == "restart":
        fix = "it begins anew once nothing can, since there is no checkpoint"
    return PlanInfeasible(*lost.causes, (hope if away else "") + fix)


def _for_losses(job: Job) -> RecoveryPolicy:
    """Return the policy for the job's losses. It depends on whether workers certainly hold the
    layers of the plan to change: not while a plan that moves state has no committed step, nor after
    another job was active."""
    made = job.current.made
    moving = made is not None and not course.keeps_state(made.policy) and job.current.on_the_way
    moving = moving and not job.unentered
    certain = not (moving or job.current.put_back)
    return course.for_losses(job.spec.recovery.policy, certain=certain)


def wait(state: ClusterState, job: Job, infeasible: PlanInfeasible, *more: str) -> Decision:
    """Return the decision to wait for nodes, with all reasons that keep nodes out of the job."""
    out = describe_left_out(sorted(job.left_out.items()))
    odd = describe_left_out((node.facts.node, why) for node, why in state.alike(job)[1])
    slots = state.worker_slots(job) or 0
    connected = [node for node in state.nodes.values() if node.connected]
    others = [node for node in connected if node.facts.worker_slots != slots]
    idle = f"kept idle: {names(others)}, because the job uses nodes with {count(slots, 'worker')}"
    causes = (
        *waits_for(state, infeasible),
        *more,
        *([idle] if others else []),
        *odd,
        *out,
        *([_BACK] if out else []),
    )
    reason = "; ".join(causes)
    if job.state == "waiting for nodes" and job.reason == reason:
        return Decision(reason=reason)
    return Decision(actions=(JobWaiting(job_id=job.id, causes=causes),), reason=reason)


def waits_for(state: ClusterState, infeasible: PlanInfeasible) -> list[str]:
    """Return why a job waits for nodes, and the fix: undraining nodes may be enough."""
    drained = [
        node
        for node in state.nodes.values()
        if node.connected
        and node.drain is not None
        and node.drain.by == "operator"
        and node.drain.done
    ]
    if not drained:
        return [*infeasible.causes]
    why, *fixes = infeasible.causes
    undrain = f"drained: {names(drained)} ('oobleck node undrain NODE' takes one back)"
    return [why, *([] if isinstance(infeasible, NoNodeReady) else fixes), undrain]


def describe_left_out(nodes: Iterable[tuple[NodeName, str]]) -> list[str]:
    """List each reason for leaving nodes out once, with all its nodes."""
    by_reason: dict[str, list[NodeName]] = {}
    for node, why in nodes:
        by_reason.setdefault(why, []).append(node)
    return [
        f"{comma_separated(names)} {'is' if len(names) == 1 else 'are'} left out: {why}"
        for why, names in by_reason.items()
    ]


def can_spare(context: Context, job: Job, nodes: Set[NodeName]) -> bool:
    """Return whether the job can continue without these nodes and the layers that only they
    hold."""
    return nodes <= set(job.current.newcomers) or plan_without(context, job, nodes) is not None


def plan_without(context: Context, job: Job, nodes: Set[NodeName]) -> Plan | None:
    """Return the plan for the other ready nodes; None: they cannot continue alone."""
    state = context.state
    rest = [
        node
        for node in state.candidates(job)
        if state.is_ready(node, job) and node.facts.node not in nodes
    ]
    try:
        return next_plan(context, job, rest, next_generation(context, job)).found.plan
    except PlanInfeasible:
        return None


def plan_without_drained(context: Context, job: Job, live: Sequence[Node]) -> Answer:
    """Return the next plan without the nodes that are to be drained. Nodes whose drain is not
    forced get a part if no other plan is possible, or if without them the job could lose fewer
    nodes than it wants. Raises PlanInfeasible."""
    state, generation = context.state, next_generation(context, job)
    kept = [
        node
        for node in draining_nodes(state, job)
        if state.is_ready(node, job) and node.drain is not None and not node.drain.force
    ]
    try:
        taken = next_plan(context, job, live, generation)
    except PlanInfeasible:
        if not kept:
            raise
        return next_plan(context, job, by_name([*live, *kept]), generation)
    needed = [node for node in kept if questions.lowers_tolerance(job, node, taken)]
    if needed:
        left = can_lose(taken.found.plan)
        with suppress(PlanInfeasible):
            more = next_plan(context, job, by_name([*live, *needed]), generation)
            return more if can_lose(more.found.plan) > left else taken
    return taken


def get_ready(context: Context, job: Job) -> Decision | None:
    """Return the decision to wait for nodes that start workers for a job about to resume after
    another one; None: no node is worth waiting for."""
    pending = [
        node
        for node in context.state.candidates(job)
        if not context.state.is_ready(node, job)
        and not is_away(context, node)
        and start_deadline(context, node) > context.now
    ]
    return getting_ready(context, job, pending) if pending else None


def getting_ready(context: Context, job: Job, pending: list[Node]) -> Decision:
    """Return the decision to wait until `pending` nodes are ready."""
    return Decision(
        wake_at=min(look_again(context, node) for node in pending),
        reason=f"nodes get ready for {job.id}: {names(pending)}",
    )


class _Asked(AtOnce):
    """Planner without replies, which records the request."""

    def reply(self, request: PlanRequest) -> PlanReply:
        raise StillPlanning(request)


class Foresight:
    """Requests for the plans after the loss of any one node, made in advance.

    They change only with the inputs of these plans.
    """

    def __init__(self) -> None:
        #: Their job and generation, and their other inputs.
        self._of: tuple[JobId, Generation] | None = None
        self._seen: object = None
        self._found: tuple[PlanRequest, ...] = ()

    def look(self, context: Context) -> tuple[PlanRequest, ...]:
        """Return the requests that follow from the loss of each single node. While the job is
        disturbed they stay as they are: the first signs of a loss must not drop them."""
        state, job = context.state, context.state.job
        if job is None or job.current.made is None or len(job.current.members) > _MOST_NODES:
            return ()
        if job.current.losses or job.current.on_the_way or not undisturbed(state, job):
            return self._found if self._of == (job.id, job.newest_known) else ()
        live = [node for node in state.candidates(job) if state.is_ready(node, job)]
        sizes = tuple((node.facts.node, node.facts.memory_per_worker_bytes) for node in live)
        seen = (
            (job.id, job.newest_known, sizes),
            (job.profiling.chosen, job.current.base, tuple(sorted(job.rates.items()))),
        )
        if seen != self._seen:
            self._of, self._seen, self._found = (job.id, job.newest_known), seen, ()
            asking = replace(context, planner=_Asked())
            for name in job.current.members:
                left = [node for node in live if node.facts.node != name]
                try:
                    plan_without_drained(asking, job, left)
                except StillPlanning as still:
                    self._found += (still.request,)
                except PlanInfeasible:
                    pass  # a refusal is found quickly
                except Exception:
                    # No decision depends on it yet; if the loss occurs, the rules raise the error
                    # again.
                    log.exception("what a loss would ask for is not known", extra={"node": name})
        return self._found
