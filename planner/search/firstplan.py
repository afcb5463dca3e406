"""The first plan of a job: sizes, cuts and schedule, chosen for what a step of them all takes.

The formula finds a few instantiations near the best (`oobleck.planner.search.instantiate`), with
the templates of best replay and with those that the search for least T has found. A replay under
1F1B tells which are worth the estimate under the schedule that each would run under, which has the
last word; then other cuts of the same T are tried in the winner. There is time for that before a
job's first step, and only then. Must not know schedules or costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Plan, place
from oobleck.planner.schedules import SCHEDULES, Schedule
from oobleck.planner.search.catalogue import Catalogue, Offer
from oobleck.planner.search.choose import ScheduleChoice, choose_schedule, with_residents
from oobleck.planner.search.instantiate import Instantiation, instantiate
from oobleck.planner.search.shares import share_batch

#: Instantiations that are estimated under their schedules, for each set of templates.
_MOST_ESTIMATED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstPlan:
    """A plan under the schedule that was chosen for it, and the templates to change it with."""

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
    tied: bool,
    wanted: Schedule | None = None,
) -> FirstPlan:
    """The plan of least step time for `nodes`, of templates of `sizes`.

    `tied`: the head shares layer 0's token embedding. `wanted`: the schedule; None: the best.
    Raises PlanInfeasible.
    """
    maker = _Maker(catalogue=catalogue, profile=profile, tied=tied, wanted=wanted)
    offer = catalogue.offer(profile, sizes)
    offers = [offer]
    if offer.found != offer.templates:
        offers.append(catalogue.swapped(offer, offer.found.values(), profile))
    plans = []
    for each in offers:
        plan = instantiate(
            each.templates,
            nodes,
            profile=profile,
            microbatches=microbatches,
            min_pipelines=min_pipelines,
            generation=generation,
            judge=partial(maker.judge, each),
            costs=each.costs,
        )
        plans.append((each, plan))
    plan = maker.recut(*min(plans, key=lambda made: maker.step_s(made[1])))
    choice = maker.choice(plan)
    return FirstPlan(
        plan=with_residents(replace(plan, schedule=choice.schedule), profile),
        choice=choice,
        offer=catalogue.offer(profile, sizes, plan),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Maker:
    catalogue: Catalogue
    profile: Profile
    tied: bool
    wanted: Schedule | None

    def judge(self, offer: Offer, candidates: Sequence[Instantiation]) -> list[float]:
        """Seconds of a step; infinite for those that are not worth the estimate."""
        quick = offer.judge(candidates)
        # The first one is the best by the formula, which the result must not be worse than.
        order = sorted(range(len(candidates)), key=lambda at: (at > 0, quick[at]))
        times = [float("inf")] * len(candidates)
        plans = {at: _sketch(offer, candidates[at]) for at in order[:_MOST_ESTIMATED]}
        self.catalogue.replays(self.profile).prepare(list(plans.values()), SCHEDULES)
        for at, plan in plans.items():
            times[at] = self.step_s(plan)
        return times

    def choice(self, plan: Plan) -> ScheduleChoice:
        replays = self.catalogue.replays(self.profile)
        return choose_schedule(plan, self.profile, wanted=self.wanted, replays=replays)

    def step_s(self, plan: Plan) -> float:
        """Under the schedule that it would run under; infinite where the wanted one does not fit:
        should none of the plans fit, the last choice says so."""
        try:
            return self.choice(plan).step_s
        except PlanInfeasible:
            return float("inf")

    def recut(self, offer: Offer, plan: Plan) -> Plan:
        """With other cuts of the same T, size by size, where the step is shorter so."""
        best_s = self.step_s(plan)
        sizes = [len(pipeline.nodes) for pipeline in plan.pipelines]
        for size in sorted(set(sizes)):
            for template in offer.equals[size]:
                if template == offer.templates[size]:
                    continue
                swapped = self.catalogue.swapped(offer, [template], self.profile)
                shares = share_batch([swapped.costs[each] for each in sizes], plan.microbatches)
                recut = _put(swapped, [p.nodes for p in plan.pipelines], shares, plan.generation)
                if (step_s := self.step_s(recut)) < best_s:
                    offer, plan, best_s = swapped, recut, step_s
        return plan


def _sketch(offer: Offer, candidate: Instantiation) -> Plan:
    """The candidate on any nodes."""
    names = (NodeName(f"n{number}") for number in count())
    nodes = [tuple(islice(names, size)) for size in candidate.sizes]
    return _put(offer, nodes, candidate.shares, Generation(1))


def _put(
    offer: Offer,
    nodes: Sequence[tuple[NodeName, ...]],
    shares: Sequence[int],
    generation: Generation,
) -> Plan:
    pipelines = []
    first = 0
    for names, share in zip(nodes, shares, strict=True):
        template = offer.templates[len(names)]
        pipelines.append(place(template, names, first_microbatch=first, microbatches=share))
        first += share
    return Plan(generation=generation, pipelines=tuple(pipelines))
