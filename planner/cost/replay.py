"""The step time of plans by replay of 1F1B, many pipelines at once: the judge of close calls.

The same schedule, messages and sums as in a dry run of all programs
(`oobleck.planner.cost.simulate`), without the programs: pipelines of equal template and share are
replayed once, all of them side by side (`oobleck.planner.cost.finish`). Must not know how
candidates come about.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from oobleck.planner.cost.finish import Run, finish_s
from oobleck.planner.cost.formula import boundary_s
from oobleck.planner.cost.stepend import ComputedKind, ComputedStage, step_end_s
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.template import PipelineTemplate, StageTemplate


def template_run(template: PipelineTemplate, microbatches: int, profile: Profile) -> Run:
    """What a pipeline of the template computes under 1F1B."""
    return Run(
        microbatches=microbatches,
        forward_s=tuple(stage.forward_s for stage in template.stages),
        backward_s=tuple(stage.backward_s for stage in template.stages),
        message_s=tuple(
            boundary_s(
                profile.layers[before.last_layer].output_bytes,
                before=before.gpus,
                after=after.gpus,
                same_node=before.node == after.node,
                links=profile.links,
            )
            for before, after in pairwise(template.stages)
        ),
    )


class Sized(Protocol):
    """Nodes and micro-batches of each pipeline of a plan."""

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def shares(self) -> tuple[int, ...]: ...


class StepReplay:
    """Step times of plans made of `templates`; remembers the pipelines that it has seen.

    `tied`: the head shares layer 0's token embedding.
    """

    def __init__(
        self, templates: Sequence[PipelineTemplate], profile: Profile, *, tied: bool
    ) -> None:
        self._templates = {template.nodes: template for template in templates}
        self._profile, self._tied = profile, tied
        #: By nodes and micro-batches: the stages of such a pipeline, once computed.
        self._computed: dict[tuple[int, int], list[ComputedStage]] = {}

    def step_s(self, plans: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Of each (template nodes per pipeline, micro-batches per pipeline)."""
        kinds = [Counter(zip(sizes, shares, strict=True)) for sizes, shares in plans]
        self._prepare(sorted({kind for plan in kinds for kind in plan} - self._computed.keys()))
        return [
            step_end_s(
                [
                    ComputedKind(count=count, stages=self._computed[kind])
                    for kind, count in plan.items()
                ],
                self._profile,
                tied=self._tied,
            )
            for plan in kinds
        ]

    def judge(self, candidates: Sequence[Sized]) -> list[float]:
        """Step times of instantiations."""
        return self.step_s([(one.sizes, one.shares) for one in candidates])

    def _prepare(self, kinds: Sequence[tuple[int, int]]) -> None:
        found = finish_s(
            [template_run(self._templates[nodes], share, self._profile) for nodes, share in kinds]
        )
        for kind, finish in zip(kinds, found, strict=True):
            self._computed[kind] = [
                ComputedStage(
                    first_layer=stage.first_layer,
                    last_layer=stage.last_layer,
                    gpus=stage.gpus,
                    node=stage.node,
                    computed_s=computed_s,
                    update_s=self._update_s(stage),
                )
                for stage, computed_s in zip(self._templates[kind[0]].stages, finish, strict=True)
            ]

    def _update_s(self, stage: StageTemplate) -> float:
        layers = self._profile.layers[stage.first_layer : stage.last_layer + 1]
        return sum(layer.update_s.get(stage.gpus, 0.0) for layer in layers)
