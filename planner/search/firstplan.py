"""The first plan of a job: sizes, cuts and schedule, by the estimated step of all together.

The formula finds a few instantiations near the best (`oobleck.planner.search.instantiate`), with
the templates of best replay and with those that the search for least T found. A replay under 1F1B
selects those worth an estimate under their own schedule, which decides. Then other cuts of the same
T are tried in the winner. Only before a job's first step is there time for that. Must not know
schedules or costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count as numbers
from itertools import islice

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan, place
from oobleck.core.profile import Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.units import are, count
from oobleck.planner.cost.estimate import Replays
from oobleck.planner.search.catalogue import Catalogue, Offer
from oobleck.planner.search.choose import ScheduleChoice, choose_among, settled
from oobleck.planner.search.instantiate import Instantiation, instantiate
from oobleck.planner.search.shadows import with_shadows
from oobleck.planner.search.shares import share_batch

#: Most instantiations that are estimated under their schedules, for each set of templates.
_MOST_ESTIMATED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """Plan under its chosen schedule, and the templates for changing it."""

    plan: Plan
    choice: ScheduleChoice
    offer: Offer


def make_first_plan(
    catalogue: Catalogue,
    sizes: range,
    nodes: Sequence[NodeName],
    *,
    profile: Profile,
    microbatches: int,
    min_pipelines: int,
    generation: Generation,
    wanted: Schedule | None = None,
    shadows: bool = False,
) -> FirstPlan:
    """Return the plan of least step time for `nodes`, of templates of `sizes`.

    `wanted`: the schedule; None: the best. With `shadows`, if there are too few nodes for so many
    pipelines, make as many as possible and give nodes further layers instead. No state has to move
    for them before the first step. Raises PlanInfeasible.
    """
    pipelines = min(min_pipelines, len(nodes) // sizes.start) if shadows else min_pipelines
    maker = _Maker(replays=catalogue.replays(profile), profile=profile, wanted=wanted)
    offer = catalogue.offer(profile, sizes)
    offers = [offer]
    if offer.found != offer.costed:
        offers.append(offer.using(offer.found.values()))
    made = []
    for each in offers:
        plan = instantiate(
            each.templates,
            nodes,
            profile=profile,
            microbatches=microbatches,
            min_pipelines=pipelines,
            generation=generation,
            judge=partial(maker.judge, each),
            costs=each.costs,
        )
        made.append((maker.step_s([plan])[0], each, plan))
    plan = maker.recut(*min(made, key=lambda one: one[0]))
    choice = maker.choice(plan)
    plan = replace(plan, schedule=choice.schedule)
    if shadows:
        plan = with_shadows(plan, profile, fault_tolerance=min_pipelines - 1)
        if plan.shadows:
            (estimates,) = maker.replays.estimates([plan], SCHEDULES)
            choice = replace(choice, estimates=estimates)
        _check_safe(plan, min_pipelines, sizes.start)
    return FirstPlan(
        plan=settled(plan, profile),
        choice=choice,
        offer=catalogue.offer(profile, sizes, plan),
    )


def _check_safe(plan: Plan, least_nodes: int, smallest: int) -> None:
    """Raise PlanInfeasible where fewer than `least_nodes` nodes hold some layer."""
    fewest = min(map(len, plan.layer_nodes()))
    if fewest < least_nodes:
        missing = least_nodes * smallest - len(plan.nodes)
        raise PlanInfeasible(
            f"needs {count(least_nodes * smallest, 'node')}: fault_tolerance {least_nodes - 1} and "
            f"pipelines of at least {count(smallest, 'node')}; {are(len(plan.nodes))} live, "
            f"without the memory to hold each layer {count(least_nodes, 'time')} as shadows; add "
            f"{count(missing, 'node')} or lower fault_tolerance to {fewest - 1}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    replays: Replays
    profile: Profile
    wanted: Schedule | None

    def judge(self, offer: Offer, candidates: Sequence[Instantiation]) -> list[float]:
        """Return the seconds of a step; infinite for candidates not worth the estimate."""
        quick = offer.judge(candidates)
        # The first one is the best by the formula; the result must not be worse.
        order = sorted(range(len(candidates)), key=lambda at: (at > 0, quick[at]))[:_MOST_ESTIMATED]
        times = [float("inf")] * len(candidates)
        plans = [_sketch(offer, candidates[at]) for at in order]
        for at, step_s in zip(order, self.step_s(plans), strict=True):
            times[at] = step_s
        return times

    def choice(self, plan: Plan) -> ScheduleChoice:
        """Choose the schedule; raises PlanInfeasible where the wanted one does not fit."""
        (estimates,) = self.replays.estimates([plan], SCHEDULES)
        return choose_among(estimates, self.profile, self.wanted)

    def step_s(self, plans: Sequence[Plan]) -> list[float]:
        """Return step times, each under the plan's own schedule. It is infinite where the wanted
        one does not fit; if none fits, the final choice raises the error."""
        times = []
        for estimates in self.replays.estimates(plans, SCHEDULES):
            try:
                times.append(choose_among(estimates, self.profile, self.wanted).step_s)
            except PlanInfeasible:
                times.append(float("inf"))
        return times

    def recut(self, best_s: float, offer: Offer, plan: Plan) -> Plan:
        """Recut the plan, size by size, where other cuts of the same T make the step shorter."""
        sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
        for size in sorted(set(sizes)):
            for costed in offer.equals[size]:
                if costed is offer.costed[size]:
                    continue
                swapped = offer.using([costed])
                costs = swapped.costs
                shares = share_batch([costs[each] for each in sizes], plan.microbatches)
                recut = _put(swapped, [p.nodes for p in plan.pipelines], shares, plan.generation)
                (step_s,) = self.step_s([recut])
                if step_s < best_s:
                    offer, plan, best_s = swapped, recut, step_s
        return plan


def _sketch(offer: Offer, candidate: Instantiation) -> Plan:
    """Put the candidate on any nodes."""
    names = (NodeName(f"n{number}") for number in numbers())
    nodes = [tuple(islice(names, size)) for size in candidate.sizes]
    return _put(offer, nodes, candidate.shares, Generation(1))


def _put(
    offer: Offer,
    nodes: Sequence[tuple[NodeName, ...]],
    shares: Sequence[int],
    generation: Generation,
) -> Plan:
    return Plan.of_pipelines(
        [
            place(offer.costed[len(names)].template, names, microbatches=share)
            for names, share in zip(nodes, shares, strict=True)
        ],
        generation=generation,
    )
