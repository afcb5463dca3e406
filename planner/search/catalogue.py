"""The templates of one model on one kind of machine, at hand for every plan of a job.

Making templates takes seconds for large models, and what follows from them (costs, replayed step
times) is asked for again and again, so both are kept. Memory is no part of what a catalogue is
for: when the weakest node leaves or joins, templates that fit the memory there is now stay in use,
even if with more memory there may be better ones: a plan right after a loss comes first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from oobleck.planner.cost.estimate import Replays
from oobleck.planner.cost.formula import PipelineCost, StageCosts, pipeline_cost
from oobleck.planner.cost.kinds import template_kind
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.template import PipelineTemplate
from oobleck.planner.search.instantiate import Instantiation, Judge, by_formula
from oobleck.planner.search.shortlist import Shortlist
from oobleck.planner.search.templates import shortlisted_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Templates by their numbers of nodes, what they cost, and a judge of plans made of them."""

    templates: Mapping[int, PipelineTemplate]
    costs: Mapping[int, PipelineCost]
    judge: Judge
    #: By number of nodes: these, and others that are as good by T1 + T2 + T3 and fit as well.
    equals: Mapping[int, tuple[PipelineTemplate, ...]]
    #: Those that the search for least T has come upon first.
    found: Mapping[int, PipelineTemplate]


class Catalogue:
    """Grows with the sizes that are asked for. `tied`: the head shares layer 0's embedding."""

    def __init__(self, *, tied: bool) -> None:
        self._tied = tied
        self._templates: dict[int, Shortlist] = {}
        self._costs: dict[PipelineTemplate, PipelineCost] = {}
        self._replays: Replays | None = None
        self._offers: dict[tuple[range, int], Offer] = {}
        self._changed: dict[tuple[range, int, tuple[PipelineTemplate, ...]], Offer] = {}

    def offer(self, profile: Profile, sizes: range, plan: Plan | None = None) -> Offer:
        """The templates of these sizes; with a `plan`, as it has them, where they are as good.

        Between calls, profiles may differ in their memory alone. Raises PlanInfeasible.
        """
        key = sizes, profile.gpu_memory_bytes
        if key not in self._offers:
            self._offers[key] = self._make(profile, sizes)
        offer = self._offers[key]
        swaps = () if plan is None else _swaps(offer, plan)
        if not swaps:
            return offer
        if (*key, swaps) not in self._changed:
            self._changed[*key, swaps] = self.swapped(offer, swaps, profile)
        return self._changed[*key, swaps]

    def replays(self, profile: Profile) -> Replays:
        """What steps take, on any memory."""
        if self._replays is None:
            self._replays = Replays(profile, tied=self._tied)
        return self._replays

    def swapped(
        self, offer: Offer, templates: Iterable[PipelineTemplate], profile: Profile
    ) -> Offer:
        """`offer` with these templates in place of the ones of their sizes."""
        table = {**offer.templates, **{template.nodes: template for template in templates}}
        for template in table.values():
            if template not in self._costs:
                self._costs[template] = pipeline_cost(template, profile)
        return replace(
            offer,
            templates=table,
            costs={size: self._costs[template] for size, template in table.items()},
            judge=replay_judge(table, self.replays(profile)),
        )

    def _make(self, profile: Profile, sizes: range) -> Offer:
        """Of what there is, and what is missing or does not fit, run of sizes by run."""
        stages = StageCosts(profile)
        missing = [
            size
            for size in sizes
            if size not in self._templates or not _fits(self._templates[size].quickest, stages)
        ]
        while missing:
            run = range(missing[0], missing[0] + 1)
            while run.stop in missing:
                run = range(run.start, run.stop + 1)
            self._templates.update(shortlisted_templates(profile, run))
            missing = [size for size in missing if size >= run.stop]
        few = {size: self._templates[size] for size in sizes}
        bare = Offer(
            templates={},
            costs={},
            judge=by_formula,
            equals={
                size: tuple(t for t in each.all if _fits(t, stages)) for size, each in few.items()
            },
            found={
                size: each.found if _fits(each.found, stages) else each.quickest
                for size, each in few.items()
            },
        )
        return self.swapped(bare, (each.quickest for each in few.values()), profile)


def replay_judge(templates: Mapping[int, PipelineTemplate], replays: Replays) -> Judge:
    """The judge that replays plans of these templates under 1F1B."""
    one = {size: template_kind(each, 1, replays.profile) for size, each in templates.items()}

    def judge(candidates: Sequence[Instantiation]) -> Sequence[float]:
        return replays.step_s(
            [
                {
                    one[size]._replace(microbatches=share): number
                    for (size, share), number in Counter(
                        zip(candidate.sizes, candidate.shares, strict=True)
                    ).items()
                }
                for candidate in candidates
            ]
        )

    return judge


def _swaps(offer: Offer, plan: Plan) -> tuple[PipelineTemplate, ...]:
    """What the plan has of the offer's templates of equal T in place of the first."""
    pipelines = {len(pipeline.nodes): pipeline for pipeline in reversed(plan.pipelines)}
    swaps: list[PipelineTemplate] = []
    for size, pipeline in sorted(pipelines.items()):
        cut = [(stage.first_layer, len(stage.workers)) for stage in pipeline.stages]
        swaps += [
            template
            for template in offer.equals.get(size, ())[1:]
            if cut == [(stage.first_layer, stage.gpus) for stage in template.stages]
        ]
    return tuple(swaps)


def _fits(template: PipelineTemplate, costs: StageCosts) -> bool:
    count = len(template.stages)
    return all(
        costs.allowed(stage.first_layer, stage.last_layer + 1, stage.gpus, count - number)
        for number, stage in enumerate(template.stages)
    )
