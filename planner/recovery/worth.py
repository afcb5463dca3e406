"""Answers to lost and joining nodes, and offers that may be worth a voluntary change. Pure.

Owns the answers by templates and by re-routing, and the shadows that follow them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, place
from oobleck.core.routes import Hop, Route
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.units import comma_separated, count
from oobleck.planner.cost.estimate import SPLITTING_TIE, Replays, estimate_step
from oobleck.planner.cost.kinds import Place, pipeline_kinds
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.answer import (
    Answer,
    Change,
    answer,
    idle,
    situation,
    splitting_weight,
)
from oobleck.planner.recovery.changes import change_to
from oobleck.planner.recovery.chooser import LEAST_GAIN, weighed_s
from oobleck.planner.recovery.placement import Slot, reseated, spread
from oobleck.planner.recovery.reconfigure import can_lose, reconfigure
from oobleck.planner.recovery.reroute import reroute
from oobleck.planner.recovery.rules import Next, Reconfiguration
from oobleck.planner.recovery.uneven.candidates import MOST_VISITS, hop_ticks, scheduled
from oobleck.planner.recovery.uneven.cuts import reshared
from oobleck.planner.search.choose import choose_among, keep_schedule, settled
from oobleck.planner.search.demand import share_batch
from oobleck.planner.search.shadows import with_shadows

#: Least share of a step that another cut must gain.
_LEAST_RECUT = 0.01
#: Most offers that are left to choose from: each is proven, which takes time.
_MOST_OFFERS = 3


def worth_choosing(offers: Sequence[Answer], running: Plan, staying_s: float) -> Sequence[Answer]:
    """Return the offers that are worth a change from `running`, at so many seconds a step, by step
    time alone: the fastest, and others that move less. List-scheduled ones are proven free of
    deadlock. Raises PlanInfeasible where none is worth it."""
    now = splitting_weight(running)
    # Offers that no longer split the backward get no credit for it: its gain is not known.
    equal = [replace(offer, weight=max(offer.weight, now)) for offer in offers]
    by_step = sorted(equal, key=weighed_s)
    most_s = staying_s * now * (1 - LEAST_GAIN)
    chosen: list[Answer] = []
    for offer in by_step:
        fewer = not chosen or offer.stall_s < min(each.stall_s for each in chosen)
        if weighed_s(offer) <= most_s and fewer and len(chosen) < _MOST_OFFERS:
            chosen.append(offer)
    if not chosen:
        comparison = f"a step would take {by_step[0].step_s:.4g} s in place of {staying_s:.4g} s"
        split = by_step[0].weight > now
        raise PlanInfeasible(f"{comparison}{', with backwards split' * split}: not worth a change")
    for offer in chosen:
        if listed_routes(offer.found.plan):
            prove(offer.found.plan)
    return chosen


# ---- Shadows after an answer: plans in which more nodes hold each layer.
#
# List-scheduled workers may need an order that takes less memory for that. Owns how much memory
# they keep.


#: Least share of the memory of micro-batches that list-scheduled workers keep, in the order of
#: trying. An order is made for speed alone and often keeps more than it needs.
_KEPT = (1.0, 0.5, 0.25)


def shadows_behind(plan: Plan, change: Change) -> Next | None:
    """Return the follow-up of `plan` at a step boundary if more shadows would let more nodes be
    lost; else None. A loss waits for this, so orders with less memory are tried only after it."""
    if not change.shadows:
        return None
    shadowed_plan = _more_shadows(plan, change, change.tolerated, _KEPT[-1])
    return None if shadowed_plan is plan else "shadow"


def with_following(plan: Plan, change: Change) -> Plan:
    """Return `plan` with the shadows that follow it."""
    return _more_shadows(plan, change, change.tolerated) if change.shadows else plan


def can_lose_behind(plan: Plan, change: Change) -> int:
    """Return how many nodes can be lost once `plan` has the shadows that follow it."""
    return can_lose(with_following(plan, change))


def shadowed(change: Change) -> Answer:
    """Answer, for a step boundary, with the running plan and all shadows that let more nodes be
    lost.

    Routes and schedule stay as they are. Raises PlanInfeasible where no shadow can be added.
    """
    plan = _with_more(change).having(generation=change.generation)
    if plan.listing is None:
        plan = settled(plan, change.profile)
    else:
        prove(plan)
    step_s = _step_s(plan, change)
    nodes = sorted({worker.node for worker in plan.shadows})
    made = Reconfiguration(
        plan=plan,
        rule="shadow",
        reason=f"{comma_separated(nodes)} hold layers of others too, so that "
        f"{count(can_lose(plan), 'node')} can be lost",
        idle=idle(change, plan),
    )
    return answer("shadow", made, step_s, change)


def shadowed_s(plan: Plan, change: Change) -> float:
    """Return the seconds of a step of `plan`, which has shadows, with the cost of a split backward.
    Sums of gradients are over more nodes then."""
    if plan.listing is None:
        plan = settled(plan, change.profile)
    return _step_s(plan, change) * splitting_weight(plan)


def _step_s(plan: Plan, change: Change) -> float:
    estimate = estimate_step if plan.listing is None else estimate_listed
    return estimate(plan, change.profile, tied=change.tied).step_s


def _more_shadows(plan: Plan, change: Change, wanted: int, kept: float = 1.0) -> Plan:
    return with_shadows(
        plan,
        change.profile,
        fault_tolerance=wanted,
        held=plan.shards,
        kept=kept,
        thorough=not change.more,
    )


def _with_more(change: Change) -> Plan:
    """Return the running plan with more shadows. The order of list-scheduled workers stays where it
    fits beside them; else it is made anew. Raises PlanInfeasible."""
    plan, listed = change.plan, change.plan.listing is not None
    most = min(change.tolerated, len(plan.nodes) - 1)
    why = "no layer can be on one node more, or none has to be"
    for wanted in range(most, can_lose(plan), -1):
        for kept in _KEPT if listed else _KEPT[:1]:
            shadowed_plan = _more_shadows(plan, change, wanted, kept)
            if can_lose(shadowed_plan) < wanted:
                continue
            if kept == 1.0:
                return shadowed_plan
            anew = _listed_anew(shadowed_plan, change)
            if anew is not None:
                return anew
            why = (
                "beside shadows that let one node more be lost there is so little memory for "
                "micro-batches that a step would take longer"
            )
    raise PlanInfeasible(why)


def _listed_anew(shadowed_plan: Plan, change: Change) -> Plan | None:
    """List-schedule the plan anew, in an order that fits into the memory beside the shadows.

    Returns None where some micro-batch has no room, or a step would take longer by more than the
    least gain of a change.
    """
    assert shadowed_plan.listing is not None, "its workers are list-scheduled"
    anew = with_listing(shadowed_plan, change.profile, split=shadowed_plan.listing.split)
    try:
        step_s, before_s = (
            estimate_listed(plan, change.profile, tied=change.tied).step_s
            for plan in (anew, shadowed_plan)
        )
    except PlanInfeasible:
        return None
    return anew if step_s <= before_s * (1 + LEAST_GAIN) else None


# ---- Answers to lost or joined nodes: by templates, and by re-routing around the lost ones.


def by_templates(change: Change) -> Answer:
    """Answer with a plan of templates for the live nodes. Raises PlanInfeasible."""
    base, why = _base_for_rates(change)
    made = reconfigure(
        base,
        change.live,
        templates=change.templates,
        profile=change.profile,
        fault_tolerance=change.tolerated,
        generation=change.generation,
        judge=change.judge,
        costs=change.costs,
    )
    return _settled(replace(made, reason=made.reason + why), change)


def anew(change: Change) -> Answer:
    """Answer with the shape of a first plan on the live nodes, placed so that few bytes move.
    Raises PlanInfeasible."""
    if change.first is None or change.rates or change.base.rates:
        raise PlanInfeasible("no first plan is made here")
    plan = reseated(
        change.first(change.live, change.generation, change.tolerated),
        change.plan,
        [layer.travelling_bytes for layer in change.profile.layers],
        live=change.live,
    )
    slots = [Slot(size=len(each.nodes), kept=None, origin=None) for each in plan.pipelines]
    described = change_to(tuple(slots), change.base, frozenset(change.live))
    made = Reconfiguration(
        plan=plan, rule=described.rule, reason=described.reason, idle=idle(change, plan)
    )
    return replace(_settled(made, change, recut=False), anew=True)


def _settled(made: Reconfiguration, change: Change, *, recut: bool = True) -> Answer:
    """Return the answer with the plan under its schedule, with the shadows that move no state.
    `recut`: other cuts are tried."""
    replays = change.replays or Replays(change.profile, tied=change.tied)
    plan = spread(made.plan, change.plan, change.racks, live=change.live)
    plan = plan.with_rates(change.rates)
    if plan.rates or change.base.rates:
        plan = reshared(plan, change.profile)
    if change.schedule_named:
        plan = keep_schedule(plan, change.profile)
    elif recut:
        plan = _best_of_equals(plan, change, replays)
    if change.shadows:
        # State that moves for shadows must not delay the next step.
        plan = with_shadows(
            plan,
            change.profile,
            fault_tolerance=change.tolerated,
            held=change.plan.shards,
            moving=False,
        )
    plan = settled(plan, change.profile)
    return answer(
        "templates",
        replace(made, plan=plan, idle=idle(change, plan)),
        replays.estimates([plan], [plan.schedule])[0][plan.schedule].step_s,
        change,
        then=shadows_behind(plan, change),
    )


def _best_of_equals(plan: Plan, change: Change, replays: Replays) -> Plan:
    """Return the plan under its best schedule, with the best cuts.

    Cuts of equal T leave unlike room for what a schedule keeps, and have unlike gradient sums. So
    the other cuts are tried for each size of the new pipelines.
    """
    (estimates,) = replays.estimates([plan], SCHEDULES)
    choice = choose_among(estimates, change.profile, None)
    first = plan.having(schedule=choice.schedule)
    sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
    known = change.costs or {}
    if plan.rates or not known.keys() >= {*sizes}:
        return first
    kept = frozenset(change.base.pipelines)
    new = {n for n, pipeline in zip(sizes, plan.pipelines, strict=True) if pipeline not in kept}
    cuts = [
        _Recut(
            size=size,
            template=costed.template,
            shares=share_batch([{**known, size: costed.cost}[n] for n in sizes], plan.microbatches),
        )
        for size in sorted(new)
        for costed in change.equals.get(size, ())
    ]
    counted = replays.counted([cut.counted(plan) for cut in cuts], SCHEDULES)
    most_s = choice.step_s * splitting_weight(first) * (1 - _LEAST_RECUT)
    best: tuple[float, _Recut, Schedule] | None = None
    for cut, estimates in zip(cuts, counted, strict=True):
        choice = choose_among(estimates, change.profile, None)
        taken_s = choice.step_s * splitting_weight(first.having(schedule=choice.schedule))
        if taken_s < most_s and (best is None or taken_s < best[0]):
            best = taken_s, cut, choice.schedule
    return first if best is None else best[1].plan(plan, best[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recut:
    """Other cut of a plan's pipelines of one size, with the shares of the batch that follow."""

    size: int
    template: PipelineTemplate
    shares: Sequence[int]

    def plan(self, plan: Plan, schedule: Schedule) -> Plan:
        recut = map(self._recut, plan.pipelines, self.shares)
        return Plan.of_pipelines(recut, generation=plan.generation, schedule=schedule)

    def counted(self, plan: Plan) -> Mapping[Pipeline, int]:
        """Return one pipeline of each kind, with the number of such pipelines: making a whole plan
        of a thousand nodes takes milliseconds."""
        before = {number: cut for (_, cut), own in pipeline_kinds(plan).items() for number in own}
        template = tuple(
            Place(one.first_layer, one.last_layer, one.gpus, one.node)
            for one in self.template.stages
        )
        kinds: dict[tuple[int, tuple[Place, ...]], Pipeline] = {}
        counts: Counter[Pipeline] = Counter()
        for number, (pipeline, share) in enumerate(zip(plan.pipelines, self.shares, strict=True)):
            kind = share, template if len(pipeline.nodes) == self.size else before[number]
            if kind not in kinds:
                kinds[kind] = self._recut(pipeline, share)
            counts[kinds[kind]] += 1
        return counts

    def _recut(self, pipeline: Pipeline, share: int) -> Pipeline:
        if len(pipeline.nodes) == self.size:
            return place(self.template, pipeline.nodes, microbatches=share)
        return replace(pipeline, microbatches=share)


def _base_for_rates(change: Change) -> tuple[Plan, str]:
    """Return the base, in which pipelines whose slow workers have recovered have their template's
    cut again, and a clause about that for the reason."""
    base = change.base
    slow = [one.worker for one in base.rates if one.worker.node in change.live]
    well = [str(worker) for worker in slow if worker not in change.rates]
    if not well:
        return base, ""
    pipelines = [
        place(change.templates[len(each.nodes)], each.nodes, microbatches=each.microbatches)
        if len(each.nodes) in change.templates
        else each
        for each in base.pipelines
    ]
    plan = Plan.of_pipelines(pipelines, generation=base.generation, schedule=base.schedule)
    if plan.routes == base.routes:
        return base, ""
    recovered = f"{comma_separated(well)} {'is' if len(well) == 1 else 'are'}"
    return plan, f"; cut as templates are, since {recovered} slow no more"


def by_reroute(change: Change) -> Answer:
    """Answer with the running plan re-routed around lost workers. Raises PlanInfeasible."""
    alive = frozenset(change.live)
    gone = sorted(set(change.plan.nodes) - alive)
    if not gone:
        raise PlanInfeasible("no node is lost whose micro-batches could go elsewhere")
    routed, step_s = _best_around(change)
    if listed_routes(routed):
        prove(routed)
    made = Reconfiguration(
        plan=routed,
        rule="reroute",
        reason=f"{comma_separated(gone)} lost: others that hold the same layers take the "
        "micro-batches",
        # Nodes that hold no layers stay idle: only templates give them some.
        idle=idle(change, change.plan),
    )
    return answer("reroute", made, step_s, change, then=shadows_behind(routed, change))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """Plan around lost nodes, not scheduled yet."""

    plan: Plan
    #: Lower bound of the compute's seconds.
    least_s: float

    @property
    def listed(self) -> bool:
        return bool(listed_routes(self.plan))

    def becomes(self, made: Plan) -> bool:
        """Return whether `made` has this plan's routes and schedule, so that scheduling it again
        gives the same."""
        return (self.plan.schedule, self.plan.routes) == (made.schedule, made.routes)

    @property
    def weighed_s(self) -> float:
        """The bound, with the cost of splitting backwards."""
        return self.least_s * splitting_weight(self.plan)


def _best_around(change: Change) -> tuple[Plan, float]:
    """Return the plan of the least step around lost nodes, and that step. Raises PlanInfeasible."""
    if visits(change.plan) > _LARGE_VISITS:
        # Re-routes with helpers take most of the time, and seldom promise enough.
        with suppress(PlanInfeasible):
            whole = _around(change, _WHOLE)
            whole_s = min((way.weighed_s for way in whole if not way.listed), default=math.inf)
            if _least_helped_s(change) > (1 - _LEAST_LISTED) * whole_s:
                return _best_of(whole, change)
    return _best_of(_around(change, _helpers(change.plan)), change)


def _best_of(ways: Sequence[_Around], change: Change) -> tuple[Plan, float]:
    """Schedule the ways, and return the plan of the least step, and that step. Raises
    PlanInfeasible."""
    best: tuple[float, Plan, float] | None = None
    why: PlanInfeasible | None = None
    most_s = math.inf
    if visits(change.plan) > _LARGE_VISITS:
        whole_s = min((way.weighed_s for way in ways if not way.listed), default=math.inf)
        most_s = (1 - _LEAST_LISTED) * whole_s

    def is_late(way: _Around) -> bool:
        return way.listed and way.weighed_s > most_s

    for around in sorted(ways, key=lambda way: (is_late(way), way.weighed_s)):
        if best is not None and (is_late(around) or around.weighed_s >= best[0]):
            break
        if best is not None and around.becomes(best[1]):
            continue
        try:
            plan = around.plan.with_rates(change.rates)
            made, step_s = scheduled(plan, situation(change))
        except PlanInfeasible as infeasible:
            why = infeasible
            continue
        weighed_s = step_s * splitting_weight(made)
        if best is None or weighed_s < best[0]:
            best = weighed_s, made, step_s
    if best is None:
        assert why is not None, "each plan is made or refused"
        raise why
    return best[1:]


def _least_helped_s(change: Change) -> float:
    """Return about the least seconds of a list-scheduled step, with the cost of its split
    backwards: other routes keep their work. 0 where helpers may be workers without any work, for
    which nothing is list-scheduled."""
    alive = frozenset(change.live)
    unhit, hit = list[Route](), list[Route]()
    for route in change.plan.routes:
        lives = all(hop.workers[0].node in alive for hop in route.hops)
        (unhit if lives else hit).append(route)
    computing = {worker for route in change.plan.routes for h in route.hops for worker in h.workers}
    if len(hit) > 1 or not computing.issuperset(change.plan.workers):
        return 0.0
    return _least_s(_loads(unhit, _ticks(change)), split=True) * (1 + SPLITTING_TIE)


def _around(change: Change, numbers: Sequence[tuple[int | None, int]]) -> list[_Around]:
    """Return plans around lost nodes; `numbers`: those of helpers, as `_helpers` has them. Raises
    PlanInfeasible where there is none."""
    plan, alive = change.plan, frozenset(change.live)
    lost = {worker for worker in plan.workers if worker.node not in alive}
    ticks = _ticks(change)
    ways: dict[tuple[Schedule, frozenset[Route]], _Around] = {}
    why: PlanInfeasible | None = None
    for helpers, waits in numbers:
        try:
            routed = reroute(
                plan,
                lost,
                generation=change.generation,
                ticks=ticks,
                helpers=helpers,
                waits=waits,
            )
        except PlanInfeasible as infeasible:
            why = why or infeasible
            continue
        loads = _loads(routed.routes, ticks)
        found = [routed]
        if not listed_routes(routed) and not change.schedule_named:
            # Listed routes have their backwards split where that is faster.
            found.append(routed.having(schedule="zb-h1"))
        for each in found:
            least_s = _least_s(loads, split=splitting_weight(each) > 1)
            around = _Around(plan=each, least_s=least_s)
            ways.setdefault((each.schedule, frozenset(each.routes)), around)
    if not ways:
        assert why is not None, "each plan is made or refused"
        raise why
    return list(ways.values())


def _ticks(change: Change) -> Callable[[Hop], int]:
    return hop_ticks(change.profile, change.plan.with_rates(change.rates))


def _loads(routes: Iterable[Route], ticks: Callable[[Hop], int]) -> set[tuple[int, int]]:
    """Return the different pairs of a worker's ticks of all its work, and the least ticks of the
    hops before it."""
    load, least = dict[WorkerId, int](), dict[WorkerId, int]()
    for route in routes:
        before = 0
        for hop in route.hops:
            own = ticks(hop)
            for worker in hop.workers:
                load[worker] = load.get(worker, 0) + route.microbatches * own
                least[worker] = min(least.get(worker, before), before)
            before += own
    return {(load[worker], least[worker]) for worker in load}


def _least_s(loads: Iterable[tuple[int, int]], *, split: bool) -> float:
    """Return a lower bound of the seconds of compute, if a forward is a quarter of a micro-batch's
    time at least.

    A worker does all its work. Before that, the hops before compute a forward; after it, backwards
    that are not `split` remain on them.
    """
    part = 4 if split else 1
    return max((load + before // part for load, before in loads), default=0) / 1e9


#: Without helpers other routes take all micro-batches whole. They wait for all three parts of one,
#: or for one part where backwards are split.
_WHOLE = ((0, 3), (0, 1))
#: Most visits of plans for which further numbers of helpers are tried.
_SMALL_VISITS = 300
#: Visits of large plans, such as 4,000 micro-batches on pipelines of five or more stages.
_LARGE_VISITS = 20_000
#: Least share of a step by which list-scheduled routes of large plans have to promise more than
#: whole ones: with a thousand nodes they were 4 to 8 % above their bound, and whole ones 1 %.
_LEAST_LISTED = 0.02


def visits(plan: Plan) -> int:
    """Count the hops that all micro-batches visit."""
    return sum(route.microbatches * len(route.hops) for route in plan.routes)


def _helpers(plan: Plan) -> list[tuple[int | None, int]]:
    """Return numbers of helpers to try around a loss, with parts of a micro-batch for which other
    routes wait: as many as the workers can schedule soon, and none. Small plans try some more."""
    most = MOST_VISITS // max(route.microbatches * len(route.hops) for route in plan.routes)
    if most < len(plan.routes):
        return [(most - 1, 1), (0, 3)] if most > 1 else [(0, 3)]
    if visits(plan) > _SMALL_VISITS:
        return [(len(plan.routes), 1), (0, 3)]
    few = [(helpers, waits) for helpers in (1, 2, len(plan.routes)) for waits in (1, 3)]
    return [(None, 3), *few, (0, 3)]
