"""When the stages of pipelines have computed their last, many pipelines at once, in arrays.

The order of compute is that of `oobleck.planner.programs.schedule`; a message is on its way for a
while and keeps nobody from computing. Must not know plans, templates or profiles, nor how times
come about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oobleck.planner.cost.stagetable import Floats, Integers
from oobleck.planner.cost.stepcost import extrapolated, replayed_microbatches

#: Pipelines side by side: enough for a slot's arithmetic to take longer than its calls.
_MOST_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A pipeline's compute in one step. Seconds, by stage, first stage first.

    1F1B, or with `weight_s` ZB-H1, of which it is the case that nothing is left for later; with
    `all_forward_first` GPipe, for which nothing can be left.
    """

    microbatches: int
    forward_s: tuple[float, ...]
    #: Up to the gradient that the stage before waits for.
    backward_s: tuple[float, ...]
    #: Of what is left of the backward then, for as many micro-batches as stages are before.
    weight_s: tuple[float, ...] = ()
    #: Of the message between a stage and the next one, either way.
    message_s: tuple[float, ...]
    all_forward_first: bool = False

    @property
    def stages(self) -> int:
        return len(self.forward_s)


def finish_s(runs: Sequence[Run]) -> list[tuple[float, ...]]:
    """When each stage has computed its last; for many micro-batches extrapolated from the steady
    state, to within a fraction of a per cent."""
    counts = [replayed_microbatches(run.microbatches, stages=run.stages) for run in runs]
    short = dict.fromkeys(
        replace(run, microbatches=count)
        for run, own in zip(runs, counts, strict=True)
        for count in own
    )
    # Alike in length, so that few go on alone.
    ordered = sorted(short, key=lambda run: (run.all_forward_first, _slots(run)))
    found: dict[Run, tuple[float, ...]] = {}
    while ordered:
        some = [
            r for r in ordered[:_MOST_ROWS] if r.all_forward_first == ordered[0].all_forward_first
        ]
        ordered = ordered[len(some) :]
        found.update(zip(some, _SideBySide(some).finish_s(), strict=True))
    return [
        extrapolated(
            own, [found[replace(run, microbatches=count)] for count in own], run.microbatches
        )
        for run, own in zip(runs, counts, strict=True)
    ]


def _slots(run: Run) -> int:
    return 2 * (run.microbatches + run.stages)


class _SideBySide:
    """Pipelines as the columns of arrays, and stages as rows, counted from the last one.

    Shorter pipelines are filled up with stages before the first that take no time: those have a
    micro-batch no later than the first stage can take it in.

    Goes through slots in which a stage has one forward or one backward at most, and each takes in
    what came out of the neighbour last: `forward` and `backward` are when that was.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        depth = max(run.stages for run in runs)
        shape = depth + 1, len(runs)
        self._runs, self._depth = runs, depth
        self._microbatches: Integers = np.array([run.microbatches for run in runs])
        self._fewest, self._most = min(self._microbatches), int(max(self._microbatches))
        self._forward_s, self._backward_s, self._weight_s = (np.zeros(shape) for _ in range(3))
        #: Of the message between a stage and the one after it.
        self._message_s = np.zeros(shape)
        #: Stages before it.
        self._before = np.zeros(shape, dtype=np.int64)
        for column, run in enumerate(runs):
            count = run.stages
            self._forward_s[:count, column] = run.forward_s[::-1]
            self._backward_s[:count, column] = run.backward_s[::-1]
            self._weight_s[:count, column] = run.weight_s[::-1] or 0.0
            self._message_s[1:count, column] = run.message_s[::-1]
            self._before[:count, column] = range(count - 1, -1, -1)
        self._splits = bool(self._weight_s.any())
        self._clock = np.zeros(shape)
        #: Of a stage, and of the one after it.
        self._forward, self._backward = np.zeros(shape), np.zeros(shape)
        self._every: Integers = np.arange(depth)

    def finish_s(self) -> list[tuple[float, ...]]:
        if self._runs[0].all_forward_first:
            self._all_forward_first()
        else:
            self._one_forward_one_backward()
        self._clock += np.minimum(self._before, self._microbatches) * self._weight_s
        return [
            tuple(self._clock[: run.stages, column][::-1].tolist())
            for column, run in enumerate(self._runs)
        ]

    def _one_forward_one_backward(self) -> None:
        """With r stages after it, a stage has forward m in slot m - r - 1 while it fills (m < r)
        and in slot 2 m - r - 1 later, and backward m in slot 2 m + r."""
        depth = self._depth
        for slot in range(-depth, 2 * (self._most - 1) + depth):
            if slot < -1:
                after = slice(-slot - 1, depth)
                self._do_forwards(after, slot + 1 + self._every[after])
            else:
                after = slice((slot + 1) % 2, min(slot + 2, depth), 2)
                self._do_forwards(after, (slot + 1 + self._every[after]) // 2)
            if slot >= 0:
                after = slice(slot % 2, min(slot + 1, depth), 2)
                self._do_backwards(after, (slot - self._every[after]) // 2)

    def _all_forward_first(self) -> None:
        """The stage with r after it has forward m in slot m - r of all forwards, from the slot of
        the first stage's first one, and backward m in slot m + r of all backwards."""
        depth, most = self._depth, self._most
        for slot in range(1 - depth, most):
            after = slice(max(0, -slot), min(depth, most - slot))
            self._do_forwards(after, slot + self._every[after])
        for slot in range(most + depth - 1):
            after = slice(max(0, slot - most + 1), min(depth, slot + 1))
            self._do_backwards(after, slot - self._every[after])

    def _do_forwards(self, after: slice, batch: Integers) -> None:
        before = slice(after.start + 1, after.stop + 1, after.step)
        arrived = self._forward[before] + self._message_s[before]
        self._forward[after] = self._done(after, batch, arrived, self._forward_s)

    def _do_backwards(self, after: slice, batch: Integers) -> None:
        arrived = self._backward[after] + self._message_s[after]
        before = slice(after.start + 1, after.stop + 1, after.step)
        self._backward[before] = self._done(after, batch, arrived, self._backward_s)
        if self._splits:
            due = batch[:, None] >= self._before[after]
            due &= batch[:, None] < self._microbatches
            self._clock[after] += np.where(due, self._weight_s[after], 0.0)

    def _done(self, after: slice, batch: Integers, arrived: Floats, taken_s: Floats) -> Floats:
        """When these stages have computed what has arrived; those without that micro-batch have
        computed nothing."""
        clock = self._clock[after]
        end = np.maximum(clock, arrived) + taken_s[after]
        if len(batch) and max(batch[0], batch[-1]) >= self._fewest:
            end = np.where(batch[:, None] < self._microbatches, end, clock)
        self._clock[after] = end
        return end
