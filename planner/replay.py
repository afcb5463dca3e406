"""The step time of plans by replay of 1F1B, many pipelines at once: the judge of close calls.

The same schedule, messages and sums as in a dry run of all programs (`oobleck.planner.simulate`),
without the programs: pipelines of equal template and share are replayed once, all of them side by
side in arrays. Must not know how candidates come about.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np

from oobleck.planner.cost import all_reduce_s, in_turn, message_s
from oobleck.planner.profile import Profile
from oobleck.planner.simulate import VOTE_BYTES
from oobleck.planner.stagetable import Floats, Integers
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
            passed = [boundary_s(pair[0], pair[1], profile) for pair in pairwise(stages)]
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
        """When each stage's last backward is over, first stage first, a list per pipeline."""
        found: list[list[float]] = []
        for some in _side_by_side(pipelines):
            finish = cls.of(some, profile).finish_s()
            found += [
                line[: len(stages)][::-1].tolist()
                for line, (stages, _) in zip(finish, some, strict=True)
            ]
        return found

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


def boundary_s(before: StageTemplate, after: StageTemplate, profile: Profile) -> float:
    """A micro-batch's way from stage to stage: each worker sends its rows to who holds them."""
    wide = max(before.gpus, after.gpus)
    rows = profile.layers[before.last_layer].output_bytes
    return message_s(-(-rows // wide), same_node=before.node == after.node, links=profile.links)


class Sized(Protocol):
    """Nodes and micro-batches of each pipeline of a plan."""

    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def shares(self) -> tuple[int, ...]: ...


class StepReplay:
    """Step times of plans made of `templates`; remembers the pipelines that it has seen."""

    def __init__(self, templates: Sequence[PipelineTemplate], profile: Profile) -> None:
        self._templates = {template.nodes: template for template in templates}
        self._profile = profile
        #: By nodes and micro-batches: when each stage's last backward is over, first stage first.
        self._finish: dict[tuple[int, int], list[float]] = {}

    def step_s(self, plans: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[float]:
        """Of each (template nodes per pipeline, micro-batches per pipeline)."""
        kinds = [sorted(set(zip(sizes, shares, strict=True))) for sizes, shares in plans]
        self._prepare(sorted({kind for plan in kinds for kind in plan} - self._finish.keys()))
        return [
            self._with_sums(kind, len(sizes), sum(sizes) * self._profile.gpus_per_node)
            for kind, (sizes, _) in zip(kinds, plans, strict=True)
        ]

    def _prepare(self, kinds: Sequence[tuple[int, int]]) -> None:
        pipelines = [(self._templates[nodes].stages, share) for nodes, share in kinds]
        found = Timelines.finish_of(pipelines, self._profile)
        self._finish.update(zip(kinds, found, strict=True))

    def _with_sums(self, kinds: Sequence[tuple[int, int]], pipelines: int, workers: int) -> float:
        """The end of the step, given the kinds of pipelines, and how many there are, in all.

        Runs of layers that every pipeline has in one stage are summed, in pieces where stages of
        different numbers of workers share the layers. A sum is ready when its last owner is; each
        worker's links pass its sums on one after the other, as they become ready.
        """
        layers, links = self._profile.layers, self._profile.links
        stages = [self._templates[nodes].stages for nodes, _ in kinds]
        finish = [self._finish[kind] for kind in kinds]
        sums: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
        at = [len(held) - 1 for held in stages]
        stop = len(layers)
        while stop:
            for number, held in enumerate(stages):
                while held[at[number]].first_layer >= stop:
                    at[number] -= 1
            first = max(held[here].first_layer for held, here in zip(stages, at, strict=True))
            sizes = [held[here].gpus for held, here in zip(stages, at, strict=True)]
            of = math.lcm(*sizes)
            cuts = sorted({p * of // size for size in sizes for p in range(size)} | {of})
            whole = sum(layer.parameter_bytes for layer in layers[first:stop])
            for start, end in pairwise(cuts):
                owners = [(n, at[n], start * size // of) for n, size in enumerate(sizes)]
                ready = max(finish[n][stage] for n, stage, _ in owners)
                taken = all_reduce_s(
                    whole * (end - start) // of, workers=pipelines, same_node=False, links=links
                )
                for owner in owners:
                    sums[owner].append((ready, taken))
            stop = first
        summed = max(in_turn(own) for own in sums.values())
        voted = summed + all_reduce_s(VOTE_BYTES, workers=workers, same_node=False, links=links)
        return voted + max(self._update_s(stage) for held in stages for stage in held)

    def _update_s(self, stage: StageTemplate) -> float:
        layers = self._profile.layers
        return sum(layers[layer].update_s.get(stage.gpus, 0.0) for layer in stage.layers)


def replay_judge(
    templates: Mapping[int, PipelineTemplate], profile: Profile
) -> Callable[[Sequence[Sized]], list[float]]:
    """The judge of instantiations that replays each of them."""
    replay = StepReplay(tuple(templates.values()), profile)
    return lambda candidates: replay.step_s([(one.sizes, one.shares) for one in candidates])
