"""Templates of one model on one kind of machine, kept for all plans of a job.

Templates take seconds to make for large models. Their costs and replayed step times are needed
repeatedly, so both are kept. A catalogue serves any memory size. When the weakest node leaves or
joins, templates that still fit stay in use, even if more memory would allow better ones. A quick
plan after a loss comes first.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, place
from oobleck.core.profile import Profile
from oobleck.core.schedules import SCHEDULES, Schedule
from oobleck.core.ties import Ties
from oobleck.planner.cost.estimate import SPLITTING_TIE, Replays
from oobleck.planner.cost.kinds import Kind
from oobleck.planner.cost.replay import least_computed_s
from oobleck.planner.cost.stages import PipelineCost, StageTable
from oobleck.planner.search.choose import choose_among
from oobleck.planner.search.demand import Costed, Instantiation
from oobleck.planner.search.templates import Shortlist, shortlisted_templates

#: Instantiations that are estimated under their schedules at a time, for each set of templates.
_ESTIMATED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Templates by their numbers of nodes, their costs, and a judge of plans made of them."""

    costed: Mapping[int, Costed]
    #: By number of nodes: the `costed` template and alternatives, with the same T1 + T2 + T3 or
    #: with fewer gradients on the worker that has most.
    equals: Mapping[int, tuple[Costed, ...]]
    #: Templates that the search for least T found first.
    first_found: Mapping[int, Costed]
    replays: Replays
    #: With the memory that plans may use.
    profile: Profile
    #: The only schedule for plans; None: the best.
    wanted: Schedule | None = None

    @property
    def templates(self) -> dict[int, PipelineTemplate]:
        return {size: each.template for size, each in self.costed.items()}

    @property
    def costs(self) -> dict[int, PipelineCost]:
        return {size: each.cost for size, each in self.costed.items()}

    def judge_quickly(self, candidates: Sequence[Instantiation]) -> list[float]:
        """Return the seconds of a step of each, by a replay under 1F1B."""
        return self.replays.step_s(
            [
                Counter(
                    Kind(share, self.costed[size].cut)
                    for size, share in zip(candidate.sizes, candidate.shares, strict=True)
                )
                for candidate in candidates
            ]
        )

    def judge(
        self, candidates: Sequence[Instantiation], *, falls_back: bool = False
    ) -> list[float]:
        """Return the seconds of a step of each under its best schedule, or the `wanted` one.

        Where the wanted one does not fit, it is infinite, or with `falls_back` that of 1F1B: a
        first plan is refused then, and later ones run under 1F1B. Beyond some candidates, those
        that cannot be the fastest are left out: their seconds are infinite too.
        """
        order, least_s = list(range(len(candidates))), [0.0] * len(candidates)
        plans = [self._sketch(candidate) for candidate in candidates]
        if len(order) > _ESTIMATED:
            quick = self.judge_quickly(candidates)
            # The first one is the best by the formula.
            order.sort(key=lambda at: (at > 0, quick[at]))
            least_s = [self._least_s(*one) for one in zip(plans, quick, strict=True)]
        times = [float("inf")] * len(candidates)
        for first in range(0, len(order), _ESTIMATED):
            best_s = min(times)
            some = [at for at in order[first : first + _ESTIMATED] if least_s[at] < best_s]
            counted = self.replays.counted([plans[at] for at in some], SCHEDULES)
            for at, estimates in zip(some, counted, strict=True):
                try:
                    times[at] = choose_among(estimates, self.profile, self.wanted).step_s
                except PlanInfeasible:
                    if falls_back:
                        times[at] = estimates["1f1b"].step_s
        return times

    def _least_s(self, plan: Mapping[Pipeline, int], quick_s: float) -> float:
        """Return a lower bound of the seconds of a step under its best schedule. `quick_s`: those
        under 1F1B."""
        kinds, copies = self.replays.counted_kinds(plan), sum(plan.values())
        least_s = max(least_computed_s(one.kind) for one in kinds)
        if self.wanted is not None:
            return min(quick_s, least_s)
        room = self.profile.gpu_memory_bytes
        fits = any(
            all(
                max(one.costs.peak_bytes(schedule, one.kind.microbatches, copies)) <= room
                for one in kinds
            )
            for schedule in SCHEDULES
            if schedule != "1f1b"
        )
        # Another schedule counts only if it is faster by more than the tie.
        return least_s if fits and least_s < quick_s * (1 - SPLITTING_TIE) else quick_s

    def _sketch(self, candidate: Instantiation) -> Mapping[Pipeline, int]:
        """Return one pipeline of each kind in the candidate, on any nodes, with the number of such
        pipelines: making a whole plan of a thousand nodes takes tens of milliseconds."""
        kinds = Counter(zip(candidate.sizes, candidate.shares, strict=True))
        return {
            self.costed[size].pipeline(share): number for (size, share), number in kinds.items()
        }

    def put(
        self,
        nodes: Sequence[tuple[NodeName, ...]],
        shares: Sequence[int],
        generation: Generation,
    ) -> Plan:
        """Put a pipeline of its size on each group of nodes."""
        return Plan.of_pipelines(
            [
                place(self.costed[len(names)].template, names, microbatches=share)
                for names, share in zip(nodes, shares, strict=True)
            ],
            generation=generation,
        )

    def using(self, others: Iterable[Costed]) -> "Offer":
        """Return the offer with these templates in place of those of the same sizes."""
        named = {each.template.nodes: each for each in others}
        return replace(self, costed={**self.costed, **named})


#: First plans that are remembered; one of a thousand nodes takes 0.75 MB.
_MOST_FIRST_PLANS = 64


class Catalogue:
    """Templates by size; grows with the sizes that are asked for. `tied`: groups of layers that
    share parameters.
    """

    def __init__(self, *, tied: Ties) -> None:
        self.tied = tied
        self._shortlists: dict[int, Shortlist] = {}
        self._replays: Replays | None = None
        self._offers: dict[tuple[range, int], Offer] = {}
        self._first_plans: dict[Hashable, Plan] = {}

    def offer(
        self,
        profile: Profile,
        sizes: range,
        plan: Plan | None = None,
        wanted: Schedule | None = None,
    ) -> Offer:
        """Return the templates of these sizes; with a `plan`, prefer its templates where they are
        as good. `wanted`: the only schedule for plans; None: the best.

        Profiles of different calls may differ only in their memory. Raises PlanInfeasible.
        """
        key = sizes, profile.gpu_memory_bytes
        if key not in self._offers:
            self._offers[key] = self._make(profile, sizes)
        offer = self._offers[key]
        if wanted is not None:
            offer = replace(offer, wanted=wanted)
        return offer if plan is None else offer.using(_of_plan(offer, plan))

    def first_plan(self, key: Hashable, make: Callable[[], Plan]) -> Plan:
        """Return the remembered first plan for `key`, or make it. `key` must have all that the plan
        depends on, except the profile's layers and the names of nodes."""
        if key not in self._first_plans:
            while len(self._first_plans) >= _MOST_FIRST_PLANS:
                del self._first_plans[next(iter(self._first_plans))]
            self._first_plans[key] = make()
        return self._first_plans[key]

    def replays(self, profile: Profile) -> Replays:
        """Return the replays, which estimate steps for any memory."""
        if self._replays is None:
            self._replays = Replays(profile, tied=self.tied)
        return self._replays

    def _make(self, profile: Profile, sizes: range) -> Offer:
        """Make the offer for `sizes`. First make templates that are missing or do not fit, by runs
        of adjacent sizes."""
        table = StageTable(profile)
        missing = [
            size
            for size in sizes
            if size not in self._shortlists or not _fits(self._shortlists[size].quickest, table)
        ]
        while missing:
            run = range(missing[0], missing[0] + 1)
            while run.stop in missing:
                run = range(run.start, run.stop + 1)
            self._shortlists.update(shortlisted_templates(profile, run))
            missing = [size for size in missing if size >= run.stop]
        few = {size: self._shortlists[size] for size in sizes}
        return Offer(
            costed={size: each.quickest for size, each in few.items()},
            equals={
                size: tuple(t for t in each.all if _fits(t, table)) for size, each in few.items()
            },
            first_found={
                size: each.first_found if _fits(each.first_found, table) else each.quickest
                for size, each in few.items()
            },
            replays=self.replays(profile),
            profile=profile,
        )


def _of_plan(offer: Offer, plan: Plan) -> list[Costed]:
    """Return the alternatives in the offer that the plan uses."""
    pipelines = {len(pipeline.nodes): pipeline for pipeline in reversed(plan.pipelines)}
    used: list[Costed] = []
    for size, pipeline in sorted(pipelines.items()):
        cut = [(stage.first_layer, len(stage.workers)) for stage in pipeline.stages]
        used += [
            each
            for each in offer.equals.get(size, ())[1:]
            if cut == [(stage.first_layer, stage.gpus) for stage in each.template.stages]
        ]
    return used


def _fits(costed: Costed, table: StageTable) -> bool:
    stages = costed.template.stages
    return table.fits(tuple((s.first_layer, s.last_layer + 1, s.gpus) for s in stages))
