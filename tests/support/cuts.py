"""Every way to cut a model into stages, judged one by one: the oracle of the template search.

Shares no code with the planner: stages, memory and T1 + T2 + T3 are written down again.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from oobleck.core.profile import Profile

Cut = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Shape:
    layers: int
    nodes: int
    gpus_per_node: int


@cache
def splits(gpus: int) -> tuple[tuple[int, ...], ...]:
    """All ways to share the GPUs of a node among stages, in order."""
    if gpus == 0:
        return ((),)
    return tuple((d, *rest) for d in range(1, gpus + 1) for rest in splits(gpus - d))


def all_cuts(shape: Shape) -> Iterator[Cut]:
    for nodes in itertools.product(splits(shape.gpus_per_node), repeat=shape.nodes):
        gpus = [d for node in nodes for d in node]
        if len(gpus) > shape.layers:
            continue
        for inner in itertools.combinations(range(1, shape.layers), len(gpus) - 1):
            ends = (0, *inner, shape.layers)
            yield tuple((ends[s], ends[s + 1], d) for s, d in enumerate(gpus))


@cache
def cuts_by_stages(shape: Shape) -> dict[int, np.ndarray]:
    """All cuts as arrays [cut, stage, (first, stop, gpus)], by number of stages."""
    cuts: dict[int, list[Cut]] = {}
    for cut in all_cuts(shape):
        cuts.setdefault(len(cut), []).append(cut)
    return {stages: np.array(found) for stages, found in cuts.items()}


def least_iteration_s(profile: Profile, shape: Shape) -> float | None:
    """The least T of all cuts that fit, None where none does."""
    best = [
        float(times.min())
        for cuts in cuts_by_stages(shape).values()
        if len(times := iteration_times(profile, cuts))
    ]
    return min(best, default=None)


def iteration_times(profile: Profile, cuts: np.ndarray) -> np.ndarray:
    """T of those of `cuts` (all of one number of stages) that fit."""
    layers, stages = profile.layers, cuts.shape[1]
    first, stop, gpus = cuts[..., 0], cuts[..., 1], cuts[..., 2]
    most = profile.gpus_per_node
    time = np.zeros((most + 1, len(layers) + 1))
    missing = np.zeros((most + 1, len(layers) + 1), dtype=int)
    for d in range(1, most + 1):
        for at, layer in enumerate(layers):
            both = layer.forward_s.get(d, 0.0) + layer.backward_s.get(d, 0.0)
            time[d, at + 1] = time[d, at] + both
            missing[d, at + 1] = missing[d, at] + (d not in layer.forward_s)
    state = np.cumsum([0, *(layer.state_bytes for layer in layers)])
    kept = np.cumsum([0, *(layer.activation_bytes for layer in layers)])
    in_flight = stages - np.arange(stages)
    needed = state[stop] - state[first] + in_flight * (kept[stop] - kept[first])
    fits = (needed <= profile.gpu_memory_bytes * gpus) & (
        missing[gpus, stop] == missing[gpus, first]
    )
    # Rounded, so that stages that are equal on paper are equal here too.
    times = np.round(time[gpus, stop] - time[gpus, first], 9)[fits.all(1)]
    if not len(times):
        return np.empty(0)
    slowest = times.max(1)
    last = stages - 1 - (times == slowest[:, None])[:, ::-1].argmax(1)
    t2 = (4 * stages - stages + last - 1) * slowest
    t3 = np.where(np.arange(stages) >= last[:, None], times, 0.0).sum(1)
    return times.sum(1) + t2 + t3
