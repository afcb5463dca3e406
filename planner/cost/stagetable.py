"""Table of all possible stages, with their times and free memory, for all runs of layers at once.

Searches compare whole numbers in float64: sums are exact, and an impossible stage is infinite.
Times of chosen stages are in ticks. Must not know what a cut costs; that belongs to
`oobleck.planner.search.partition`.
"""

import math
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from oobleck.core.profile import Profile
from oobleck.planner.cost.formula import ticks
from oobleck.planner.profile.sharing import running_exchange_bytes

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Limit of a time T in units, so that all sums of whole units are exact in float64.
_MOST_UNITS = 2**52
#: Larger than any number of micro-batches in flight or of stages.
UNBOUNDED = 2**31
#: (first layer, stop, GPUs) of each stage.
Stages = tuple[tuple[int, int, int], ...]


class StageTable:
    """Time and room of every possible stage.

    `time[k, i, j]` is the time of layers i .. j-1 on `choices[k]` GPUs, in units of 1 / `per_s`
    seconds; infinite where the layers cannot be shared so. `room[k, i, j]` is the number of
    micro-batches that fit there in flight.
    """

    def __init__(self, profile: Profile) -> None:
        layers, per_node = profile.layers, profile.gpus_per_node
        self.layers = len(layers)
        self.per_node = per_node
        self.choices = tuple(sorted({d for la in layers for d in la.forward_s if d <= per_node}))
        seconds = [
            [la.forward_s[d] + la.backward_s[d] if d in la.forward_s else np.inf for la in layers]
            for d in self.choices
        ]
        whole_s = max((sum(t for t in row if t != np.inf) for row in seconds), default=0.0)
        # No stage takes longer than the model, and T counts 4 times the stages and a few more. A
        # decimal unit keeps times equal that are equal on paper: 0.1 + 0.2 and 0.3.
        most_s = (whole_s or 1.0) * (4 * self.layers + 4)
        self.per_s = 10.0 ** min(15, math.floor(math.log10(_MOST_UNITS / most_s)))
        shape = (len(self.choices), self.layers, self.layers + 1)
        self.time = np.full(shape, np.inf)
        self.room = np.zeros(shape, dtype=np.int64)
        #: By number of GPUs: forward and backward ticks of all layers before each one.
        self._ticks = {
            d: tuple(
                _ticks(times.get(d, 0.0) for times in every)
                for every in ([la.forward_s for la in layers], [la.backward_s for la in layers])
            )
            for d in self.choices
        }
        state = _running([la.state_bytes + la.sum_bytes for la in layers])
        kept = _running([la.activation_bytes for la in layers])
        working = np.array([la.working_bytes for la in layers], dtype=np.int64)
        mapped = np.array([la.mapped_bytes for la in layers], dtype=np.int64)
        #: For each first layer: the bytes as further layers join it in a stage of several workers.
        exchange = [
            np.array(running_exchange_bytes(layers[i:]), dtype=np.int64)
            for i in range(self.layers if self.choices[-1:] > (1,) else 0)
        ]
        for k, gpus in enumerate(self.choices):
            units = np.array([round(t * self.per_s) if t != np.inf else t for t in seconds[k]])
            memory = min(profile.gpu_memory_bytes * gpus, 2**62)
            for i in range(self.layers):
                self.time[k, i, i + 1 :] = np.cumsum(units[i:])
                left = memory - (state[i + 1 :] - state[i])
                left -= np.maximum.accumulate(working[i:]) + np.maximum.accumulate(mapped[i:])
                if gpus > 1:
                    left -= gpus * exchange[i]
                each = kept[i + 1 :] - kept[i]
                room = np.where(each > 0, left // np.maximum(each, 1), UNBOUNDED)
                self.room[k, i, i + 1 :] = np.where(left >= 0, np.minimum(room, UNBOUNDED), 0)
        self.room[np.isinf(self.time)] = 0
        self.time[self.room == 0] = np.inf

    def fewest_stages(self, nodes: int) -> Integers:
        """Return by [layer, node, GPUs] the fewest stages for the layers from there on, or
        `UNBOUNDED` where no cut fits. A cut of fewest stages leaves the most memory to the stages
        before it."""
        fewest = np.full((self.layers + 1, nodes, self.per_node + 1), UNBOUNDED)
        fewest[self.layers, 0, 0] = 0
        for i in range(self.layers - 1, -1, -1):
            top = min(nodes, self.layers - i)
            for k, gpus in enumerate(self.choices):
                stop = i + 1 + int(np.count_nonzero(self.room[k, i, i + 1 :]))
                before = fewest[i + 1 : stop, :top, : self.per_node - gpus + 1] + 1
                room = self.room[k, i, i + 1 : stop, None, None]
                least = np.where(before <= room, before, UNBOUNDED).min(0, initial=UNBOUNDED)
                into = fewest[i, :top, gpus:]
                np.minimum(into, least, out=into)
            fewest[i, 1:, 0] = fewest[i, :-1, self.per_node]
        return fewest

    def stage_time(self, first: int, stop: int, gpus: int) -> float:
        return float(self.time[self.choices.index(gpus), first, stop])

    def stage_ticks(self, first: int, stop: int, gpus: int) -> tuple[int, int]:
        """Return the forward and backward ticks of one micro-batch."""
        forward, backward = self._ticks[gpus]
        return forward[stop] - forward[first], backward[stop] - backward[first]

    def fits(self, cut: Stages) -> bool:
        """Return whether each stage's memory holds the micro-batches that it has in flight under
        1F1B."""
        return all(
            self.room[self.choices.index(gpus), first, stop] >= len(cut) - number
            for number, (first, stop, gpus) in enumerate(cut)
        )


def _ticks(times: Iterable[float]) -> list[int]:
    return list(accumulate(map(ticks, times), initial=0))


def _running(values: list[int]) -> Integers:
    return np.cumsum([0, *values], dtype=np.int64)
