"""Search for the settings of a job that are best on a trace, and how flat the best is.

Moves along one setting at a time until none of its neighbours is better. Owns the settings' values
and the moves. Must not know how a setting is replayed.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

#: Value of settings without a plan, or without a sample.
NOTHING = float("-inf")
#: Checkpoint intervals in seconds; the given one is among them, too.
_INTERVALS_S = (60, 300, 900, 1800, 3600, 7200, 14400, 43200)
#: Most rounds over all settings; each must be better than the one before.
_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Settings of a job."""

    fault_tolerance: int
    #: Live nodes that stay outside the job until one of its own is lost.
    spares: int
    #: Fewest nodes of a pipeline.
    min_nodes: int
    #: 0: there are no checkpoints.
    checkpoint_every_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """Settings and the result of a replay with them: the greater the value, the better."""

    point: Point
    value: float
    #: Figures of the replay; empty where there is no plan.
    figures: Mapping[str, Any]
    #: Why there is no plan.
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Best settings, and all others that were tried, best first."""

    tried: tuple[Tried, ...]
    neighbours: tuple[Tried, ...]

    @property
    def best(self) -> Tried:
        return self.tried[0]

    def data(self, objective: str) -> Mapping[str, Any]:
        """Return it as plain data, for JSON."""
        second = next((one for one in self.tried[1:] if one.figures), None)
        return {
            "objective": objective,
            "tried": len(self.tried),
            "best": _data(self.best, self.best),
            "second": None if second is None else _data(second, self.best),
            "neighbours": [_data(one, self.best) for one in self.neighbours],
        }


def _data(tried: Tried, best: Tried) -> Mapping[str, Any]:
    figures: dict[str, Any] = {**asdict(tried.point), **tried.figures}
    if tried.figures:
        # Values are samples per second, or costs below 0.
        figures["worse_by"] = abs(best.value - tried.value) / abs(best.value) if best.value else 0.0
    else:
        figures["refused"] = tried.refused
    return figures


def search(start: Point, nodes: int, attempt: Callable[[Point], Tried]) -> Found:
    """Return the best settings from `start` on. `nodes`: those of the full cluster."""
    known: dict[Point, Tried] = {}

    def tried(point: Point) -> Tried:
        if point not in known:
            known[point] = attempt(point)
        return known[point]

    best = tried(start)
    for _ in range(_ROUNDS):
        before = best
        for name in asdict(start):
            while True:
                near = [tried(one) for one in _along(best.point, name, start, nodes)]
                better = max(near, key=lambda one: one.value, default=best)
                if better.value <= best.value:
                    break
                best = better
        if best is before:
            break
    near = [tried(one) for name in asdict(start) for one in _along(best.point, name, start, nodes)]
    # Sorting is stable: among equals the first that was tried is the best.
    order = sorted(known.values(), key=lambda one: (one is not best, -one.value))
    return Found(tried=tuple(order), neighbours=tuple(near))


def _along(point: Point, name: str, start: Point, nodes: int) -> list[Point]:
    """Return the neighbours of a point in one setting."""
    if name == "checkpoint_every_s":
        if not start.checkpoint_every_s:
            return []
        steps = sorted({*_INTERVALS_S, start.checkpoint_every_s})
        at = steps.index(point.checkpoint_every_s)
        near = [*steps[max(0, at - 1) : at], *steps[at + 1 : at + 2]]
        return [replace(point, checkpoint_every_s=value) for value in near]
    own: int = getattr(point, name)
    least = 1 if name == "min_nodes" else 0
    changes: list[dict[str, Any]] = [
        {name: value} for value in (own - 1, own + 1) if least <= value < nodes
    ]
    return [replace(point, **change) for change in changes]
