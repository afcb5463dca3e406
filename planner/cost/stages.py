"""The closed-form costs that searches compare: times of stages, pipelines and gradient sums.

`oobleck.planner.cost.replay` gives exact times for the few candidates that are worth it. Times are
integers here (ticks of a femtosecond): sums are exact, equal stages compare equal, and rounding
never decides which stage is the slowest.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import PipelineTemplate
from oobleck.core.profile import Links, Profile, all_reduce_s, message_s, working_bytes
from oobleck.core.routes import Hold
from oobleck.core.sharing import exchange_bytes, running_exchange_bytes

TICKS_PER_S = 10**15


def ticks(seconds: float) -> int:
    """Convert seconds to whole ticks."""
    return round(seconds * TICKS_PER_S)


def seconds(count: int) -> float:
    return count / TICKS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCost:
    """Cost of a template as a pipeline, apart from its share of the batch (in ticks)."""

    #: Ticks of one micro-batch all the way forward and back.
    first: int
    #: Ticks of each further micro-batch.
    period: int
    #: Gradient bytes per GPU of the stage that has most.
    gradient_bytes: int

    def time(self, microbatches: int) -> int:
        return self.first + (microbatches - 1) * self.period

    def capacity(self, time: int, most: int) -> int:
        """Return how many micro-batches, up to `most`, are done within `time`."""
        if time < self.first:
            return 0
        return most if self.period == 0 else min(most, 1 + (time - self.first) // self.period)

    def next_end(self, time: int) -> int:
        """Return the first tick after `time` at which a further micro-batch ends. With period 0 all
        end at `first`, and `time` must be before it."""
        if self.period == 0:
            return self.first
        return self.first + max(1, (time - self.first) // self.period + 1) * self.period


def pipeline_cost(template: PipelineTemplate, profile: Profile) -> PipelineCost:
    """Return the closed-form cost of a template under 1F1B.

    A micro-batch passes all stages and the messages between them. In the steady state, any run of
    neighbouring stages s..k takes in one micro-batch per round trip through it. It may hold k - s +
    1 of them. The slowest such run sets the period.

    The formula is within a few per cent of a replay. For few micro-batches on very uneven stages it
    is up to a quarter too long: short stages make up for part of the first round trip.
    """
    stages = template.stages
    times = [ticks(stage.forward_s) + ticks(stage.backward_s) for stage in stages]
    round_trips = [
        2
        * ticks(
            message_s(
                profile.layers[before.last_layer].output_bytes,
                same_node=before.node == after.node,
                links=profile.links,
            )
        )
        for before, after in pairwise(stages)
    ]
    period = 0
    for start in range(len(stages)):
        inside = 0
        for end in range(start, len(stages)):
            inside += times[end] + (round_trips[end - 1] if end > start else 0)
            if inside > period * (end - start + 1):
                period = inside // (end - start + 1)
    gradient_bytes = max(
        sum(profile.layers[layer].summed_bytes for layer in stage.layers) // stage.gpus
        for stage in stages
    )
    return PipelineCost(
        first=sum(times) + sum(round_trips), period=period, gradient_bytes=gradient_bytes
    )


def sync_ticks(gradient_bytes: int, *, pipelines: int, links: Links) -> int:
    """Return the ticks of a stage's gradient sum over that many pipelines."""
    return ticks(all_reduce_s(gradient_bytes, workers=pipelines, same_node=False, links=links))


# ---- Cost of a stage for each of its workers: compute, the update, and memory.
#
# Owns the terms of the replay (`oobleck.planner.cost.replay`) and of memory checks.


#: Share of the backward that makes the input's gradient, where the profile has no times for it.
#: Measured on transformer blocks: gradients of inputs and of weights take 1.3 to 1.
INPUT_SHARE = 1.3 / 2.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Cost of a stage for each of its workers; times are for one micro-batch, `update_s` is once
    per step."""

    gpus: int
    forward_s: float
    backward_s: float
    #: The two parts of `backward_s`.
    backward_input_s: float
    backward_weight_s: float
    update_s: float
    #: Bytes of the whole stage, as all bytes here; its workers share them evenly.
    state_bytes: int
    #: Gradient sums over all workers that hold a layer, where several do.
    sum_bytes: int
    #: The part of `sum_bytes` that is needed even with one replica: the sum of a weight that two
    #: layers share, on one worker or on two.
    tied_bytes: int
    #: Kept per micro-batch from its forward to the end of its backward.
    #:  Nothing is counted as freed between the gradient of the input and those of the weights. The
    #: latter still need each linear layer's input and its output's gradient. They are 16 hidden
    #: widths per token of a transformer block, as many as the block keeps before.
    activation_bytes: int
    #: Extra bytes while a layer is computed, for the layer that needs most.
    working_bytes: int
    #: Extra bytes of each worker for exchanges while it computes.
    exchange_bytes: int

    def worker_bytes(self, kept: int, *, replicas: int) -> int:
        """Return the bytes of each worker that keeps the activations of `kept` micro-batches, in a
        plan with `replicas` replicas of the model (`oobleck.planner.cost.kinds.replicas`).

        The sum is rounded up only once, so that it never exceeds what a template's memory allows.
        """
        shared = self.state_bytes + kept * self.activation_bytes + self.working_bytes
        shared += self.sum_bytes if replicas > 1 else self.tied_bytes
        return -(-shared // self.gpus) + self.exchange_bytes

    def at(self, rate: float) -> "StageCost":
        """Return the cost when the slowest of the workers has that rate."""
        if rate == 1:
            return self
        return replace(
            self,
            forward_s=self.forward_s / rate,
            backward_s=self.backward_s / rate,
            backward_input_s=self.backward_input_s / rate,
            backward_weight_s=self.backward_weight_s / rate,
            update_s=self.update_s / rate,
        )


def idle_bytes(profile: Profile, layers: Iterable[int], gpus: int) -> int:
    """Return the bytes of each of `gpus` workers that hold layers without computing them: the state
    and the gradient sums."""
    own = [profile.layers[layer] for layer in layers]
    return -(-sum(layer.state_bytes + layer.sum_bytes for layer in own) // gpus)


def stage_cost(
    profile: Profile, first_layer: int, last_layer: int, gpus: int, *, resident: bool = False
) -> StageCost:
    """Return the cost of layers first_layer .. last_layer on `gpus` GPUs of a node.

    `resident` is the flag of that name in `oobleck.core.routes.Hold`. Raises
    PlanInfeasible where the profile has no time of a layer for so many GPUs.
    """
    layers = profile.layers[first_layer : last_layer + 1]
    for layer in layers:
        if gpus not in layer.forward_s:
            raise PlanInfeasible(
                f"layer {layer.name}: forward_s has no time for {gpus} GPUs; give one, or plan "
                f"stages of {', '.join(map(str, sorted(layer.forward_s)))} GPUs"
            )
    backward_s = sum(layer.backward_s[gpus] for layer in layers)
    input_s = sum(
        layer.backward_input_s.get(gpus, layer.backward_s[gpus] * INPUT_SHARE) for layer in layers
    )
    tied_bytes = max(layer.tied_bytes for layer in layers)
    return StageCost(
        gpus=gpus,
        forward_s=sum(layer.forward_s[gpus] for layer in layers),
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=backward_s - input_s,
        update_s=sum(layer.update_s.get(gpus, 0.0) for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        # A shared weight has one sum for all its places.
        sum_bytes=sum(layer.sum_bytes - layer.tied_bytes for layer in layers) + tied_bytes,
        tied_bytes=tied_bytes,
        working_bytes=working_bytes(layers),
        exchange_bytes=exchange_bytes(layers, gpus, resident=resident),
    )


def cost_of(stage: Hold, profile: Profile, rate: float = 1.0) -> StageCost:
    """Return the cost of a stage whose slowest worker has that rate. Raises ValueError, as
    `stage_cost`."""
    cost = stage_cost(
        profile,
        stage.first_layer,
        stage.last_layer,
        len(stage.workers),
        resident=stage.resident,
    )
    return cost.at(rate)


# ---- Table of all possible stages, with their times and free memory, for all runs of layers at
# once.
#
# Searches compare whole numbers in float64: sums are exact, and an impossible stage is infinite.
# Times of chosen stages are in ticks.


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
