"""The templates of one model on one kind of machine, at hand for every plan of a job.

Making templates takes seconds for large models, and what follows from them (costs, replayed step
times) is asked for again and again, so both are kept. Memory is no part of what a catalogue is
for: when the weakest node leaves or joins, templates that fit the memory there is now stay in use,
even if with more memory there may be better ones: a plan right after a loss comes first.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from oobleck.planner.cost import PipelineCost, StageCosts, pipeline_cost
from oobleck.planner.instantiate import Judge
from oobleck.planner.profile import Profile
from oobleck.planner.replay import StepReplay
from oobleck.planner.template import PipelineTemplate
from oobleck.planner.templates import generate_templates


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Templates by their numbers of nodes, what they cost, and a judge of plans made of them."""

    templates: Mapping[int, PipelineTemplate]
    costs: Mapping[int, PipelineCost]
    judge: Judge


class Catalogue:
    """Grows with the sizes that are asked for. `tied`: the head shares layer 0's embedding."""

    def __init__(self, *, tied: bool) -> None:
        self._tied = tied
        self._templates: dict[int, PipelineTemplate] = {}
        self._costs: dict[int, PipelineCost] = {}
        self._offers: dict[tuple[range, int], Offer] = {}

    def offer(self, profile: Profile, sizes: range) -> Offer:
        """The templates of these sizes. Between calls, profiles may differ in their memory alone.

        Raises PlanInfeasible.
        """
        key = sizes, profile.gpu_memory_bytes
        if key not in self._offers:
            self._make(profile, sizes)
            templates = {size: self._templates[size] for size in sizes}
            self._offers[key] = Offer(
                templates=templates,
                costs={size: self._costs[size] for size in sizes},
                judge=StepReplay(list(templates.values()), profile, tied=self._tied).judge,
            )
        return self._offers[key]

    def _make(self, profile: Profile, sizes: range) -> None:
        """What is missing or does not fit, run of sizes by run."""
        stages = StageCosts(profile)
        missing = [
            size
            for size in sizes
            if size not in self._templates or not _fits(self._templates[size], stages)
        ]
        while missing:
            run = range(missing[0], missing[0] + 1)
            while run.stop in missing:
                run = range(run.start, run.stop + 1)
            for size, template in generate_templates(profile, run).items():
                self._templates[size] = template
                self._costs[size] = pipeline_cost(template, profile)
            missing = [size for size in missing if size >= run.stop]


def _fits(template: PipelineTemplate, costs: StageCosts) -> bool:
    count = len(template.stages)
    return all(
        costs.allowed(stage.first_layer, stage.last_layer + 1, stage.gpus, count - number)
        for number, stage in enumerate(template.stages)
    )
