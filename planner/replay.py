"""The step time of plans by replay of 1F1B, many pipelines at once: the judge of close calls.

The same schedule, messages and sums as in a dry run of all programs (`oobleck.planner.simulate`),
without the programs: pipelines of equal template and share are replayed once, all of them side by
side in arrays. Must not know how candidates come about.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from oobleck.planner.cost import boundary_s
from oobleck.planner.profile import Profile
from oobleck.planner.stagetable import Floats, Integers
from oobleck.planner.stepcost import extrapolated, replayed_microbatches
from oobleck.planner.stepend import ComputedKind, ComputedStage, step_end_s
from oobleck.planner.template import PipelineTemplate, StageTemplate

#: Numbers in the arrays of one replay.
_MOST_NUMBERS = 4_000_000


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Timelines:
    """Pipelines side by side, [pipeline, stage], stages counted from the last one.

    Shorter pipelines are filled up with stages that take no time: 1F1B has a stage take in a
    micro-batch only once an earlier one has come back, which such a stage knows no earlier than
    the one after it.
    """

    forward_s: Floats
    backward_s: Floats
    #: Of the message between a stage and the one before it, either way.
    message_s: Floats
    microbatches: Integers

    @classmethod
    def of(
        cls, pipelines: Sequence[tuple[Sequence[StageTemplate], int]], profile: Profile
    ) -> "Timelines":
        """From the stages and the micro-batches of each pipeline."""
        most = max(len(stages) for stages, _ in pipelines)
        forward, backward, message = (np.zeros((len(pipelines), most)) for _ in range(3))
        for row, (stages, _) in enumerate(pipelines):
            count = len(stages)
            forward[row, :count] = [stage.forward_s for stage in reversed(stages)]
            backward[row, :count] = [stage.backward_s for stage in reversed(stages)]
            passed = [
                boundary_s(
                    profile.layers[before.last_layer].output_bytes,
                    before=before.gpus,
                    after=after.gpus,
                    same_node=before.node == after.node,
                    links=profile.links,
                )
                for before, after in pairwise(stages)
            ]
            message[row, : count - 1] = passed[::-1]
        return cls(
            forward_s=forward,
            backward_s=backward,
            message_s=message,
            microbatches=np.array([share for _, share in pipelines], dtype=np.int64),
        )

    @classmethod
    def finish_of(
        cls, pipelines: Sequence[tuple[Sequence[StageTemplate], int]], profile: Profile
    ) -> list[list[float]]:
        """When each stage's last backward is over, first stage first, a list per pipeline.

        For many micro-batches it is extrapolated from the steady state.
        """
        counts = [
            replayed_microbatches(microbatches, stages=len(stages))
            for stages, microbatches in pipelines
        ]
        lines = {
            (id(stages), count): (stages, count)
            for (stages, _), own in zip(pipelines, counts, strict=True)
            for count in own
        }
        found: dict[tuple[int, int], list[float]] = {}
        for some in _side_by_side(list(lines.values())):
            finish = cls.of(some, profile).finish_s()
            for row, (stages, count) in zip(finish, some, strict=True):
                found[id(stages), count] = row[: len(stages)][::-1].tolist()
        return [
            list(extrapolated(own, [found[id(stages), count] for count in own], microbatches))
            for (stages, microbatches), own in zip(pipelines, counts, strict=True)
        ]

    def finish_s(self) -> Floats:
        """When each stage's last backward is over.

        Goes through slots in which a stage has one forward or one backward at most. With r stages
        after it, a stage has forward m in slot m - r - 1 while it fills (m < r) and in slot
        2 m - r - 1 later, and backward m in slot 2 m + r; what an instruction needs is in an
        earlier slot.
        """
        count, stages = self.forward_s.shape
        most = int(self.microbatches.max())
        clock = np.zeros((count, stages))
        forward = np.zeros((count, stages + 1, most))
        backward = np.zeros((count, stages, most))
        every = np.arange(stages)
        for slot in range(-stages, 2 * (most - 1) + stages):
            if slot < -1:
                after = every[-slot - 1 :]
                batch = slot + after + 1
            else:
                after = every[(slot + 1) % 2 : slot + 2 : 2]
                batch = (slot + after + 1) // 2
            inside = batch < most
            if inside.any():
                self._run(clock, forward, 1, self.forward_s, after[inside], batch[inside])
            after = every[slot % 2 : slot + 1 : 2] if slot >= 0 else every[:0]
            inside = (slot - after) // 2 < most
            if inside.any():
                self._run(
                    clock,
                    backward,
                    -1,
                    self.backward_s,
                    after[inside],
                    (slot - after[inside]) // 2,
                )
        return clock

    def _run(
        self,
        clock: Floats,
        done: Floats,
        step: int,
        taken_s: Floats,
        after: Integers,
        batch: Integers,
    ) -> None:
        """One instruction on each stage of `after`; its input is `step` stages away."""
        begin = clock[:, after]
        if step == 1:
            arrived = done[:, after + 1, batch] + self.message_s[:, after]
        else:
            source = np.maximum(after - 1, 0)
            arrived = done[:, source, batch] + self.message_s[:, source]
            arrived[:, after == 0] = 0.0
        end = np.maximum(begin, arrived) + taken_s[:, after]
        real = batch < self.microbatches[:, None]
        clock[:, after] = np.where(real, end, begin)
        done[:, after, batch] = end


def _side_by_side(
    pipelines: Sequence[tuple[Sequence[StageTemplate], int]],
) -> Iterator[Sequence[tuple[Sequence[StageTemplate], int]]]:
    """Neighbours, as many at a time as memory allows."""
    first = most = 0
    for at, (stages, microbatches) in enumerate(pipelines):
        most = max(most, 2 * (len(stages) + 1) * microbatches)
        if at > first and (at + 1 - first) * most > _MOST_NUMBERS:
            yield pipelines[first:at]
            first, most = at, 2 * (len(stages) + 1) * microbatches
    if pipelines:
        yield pipelines[first:]


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
        pipelines = [(self._templates[nodes].stages, share) for nodes, share in kinds]
        found = Timelines.finish_of(pipelines, self._profile)
        for kind, (stages, _), finish in zip(kinds, pipelines, found, strict=True):
            self._computed[kind] = [
                ComputedStage(
                    first_layer=stage.first_layer,
                    last_layer=stage.last_layer,
                    gpus=stage.gpus,
                    node=stage.node,
                    computed_s=computed_s,
                    update_s=self._update_s(stage),
                )
                for stage, computed_s in zip(stages, finish, strict=True)
            ]

    def _update_s(self, stage: StageTemplate) -> float:
        layers = self._profile.layers[stage.first_layer : stage.last_layer + 1]
        return sum(layer.update_s.get(stage.gpus, 0.0) for layer in layers)
