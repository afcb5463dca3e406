"""Traces at random: nodes that fail on their own, and racks that fail as a whole.

Times between failures are exponential. Owns the generator, so that a seed gives the same trace
everywhere.
"""

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from oobleck.core.profile import MOST_NODES
from oobleck.core.units import parse_seconds
from oobleck.planner.simulate.trace import Row

_DAY_S = 86_400.0
_MOST_EVENTS = 2_000_000
#: Most seconds, days, and the like.
_MOST = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Make:
    """Cluster whose failures a trace has. Raises ValueError."""

    nodes: int
    #: Mean time between failures of a node, and of what all nodes of a rack share; 0: none.
    mtbf_s: float
    rack_mtbf_s: float = 0.0
    #: Until a lost node is replaced; exactly so long.
    repair_s: float
    #: Nodes of a rack.
    rack: int = 1
    days: float
    seed: int = 0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least = 1 if one.name in ("nodes", "rack") else 0
            name, unit = one.name.removesuffix("_s"), " s" if one.name.endswith("_s") else ""
            if not (math.isfinite(value) and least <= value <= _MOST):
                raise ValueError(f"{name}: {value}{unit}; give {least} to {_MOST:,}{unit}")
        if not (self.mtbf_s or self.rack_mtbf_s):
            raise ValueError("mtbf: nothing would ever fail; give an mtbf above 0")
        if self.rack_mtbf_s and self.rack == 1:
            raise ValueError("rack_mtbf: no racks; give also the nodes of a rack, as rack=16")
        if not self.days:
            raise ValueError("days: a trace of no time; give a number above 0")
        if self.nodes > MOST_NODES:
            raise ValueError(f"nodes: {self.nodes}; give at most {MOST_NODES}")
        racks = math.ceil(self.nodes / self.rack)
        span_s = self.days * _DAY_S
        lost = self.nodes * span_s / self.mtbf_s if self.mtbf_s else 0.0
        lost += racks * self.rack * span_s / self.rack_mtbf_s if self.rack_mtbf_s else 0.0
        if lost > _MOST_EVENTS:
            raise ValueError(
                f"mtbf: about {lost:.3g} losses; give fewer nodes or days, or a longer mtbf"
            )


_TIMES = {"mtbf": "mtbf_s", "repair": "repair_s", "rack_mtbf": "rack_mtbf_s"}
_COUNTS = {"nodes": int, "rack": int, "days": float, "seed": int}


def parse_make(text: str) -> Make:
    """Parse `mtbf=30d,repair=20h,nodes=1000,days=365` with `rack`, `rack_mtbf` and `seed`. Raises
    ValueError."""
    values: dict[str, float] = {}
    for part in text.split(","):
        name, sign, value = (piece.strip() for piece in part.partition("="))
        if not sign or name not in {**_TIMES, **_COUNTS}:
            raise ValueError(
                f"{part.strip()!r}: give {', '.join([*_TIMES, *_COUNTS])} as NAME=VALUE"
            )
        field = _TIMES.get(name, name)
        if field in values:
            raise ValueError(f"{name}: given twice")
        try:
            values[field] = _time_s(value) if name in _TIMES else _COUNTS[name](value)
        except ValueError as error:
            raise ValueError(f"{name}: {value!r} is no {_form(name)}") from error
    missing = [
        name for name in ("nodes", "mtbf", "repair", "days") if _TIMES.get(name, name) not in values
    ]
    if missing:
        raise ValueError(f"{missing[0]}: missing; a trace needs nodes, mtbf, repair and days")
    return Make(**values)  # type: ignore[arg-type]  # numbers of the fields' types


def _form(name: str) -> str:
    if name in _TIMES:
        return "time; give one like 20h or 30d"
    return "number" if _COUNTS[name] is float else "whole number"


def _time_s(text: str) -> float:
    if text.endswith("y"):
        return 365 * parse_seconds(f"{text.removesuffix('y')}d")
    return parse_seconds(text)


def make_rows(make: Make) -> Iterator[Row]:
    """Yield the rows of a trace. A node that fails is replaced by another one, of a new name."""
    draw, end_s = _uniform(make.seed), make.days * _DAY_S

    def wait_s(mean_s: float) -> float:
        return -mean_s * math.log(next(draw))

    names = [f"n{number}" for number in range(1, make.nodes + 1)]
    ages = [1] * make.nodes
    for name in names:
        yield Row(0.0, "add", name)
    present = [True] * make.nodes
    #: Time, kind, number of a node or rack, and a node's age: an older failure is void.
    queue: list[tuple[float, str, int, int]] = []
    if make.mtbf_s:
        queue += [(wait_s(make.mtbf_s), "fail", k, 1) for k in range(make.nodes)]
    if make.rack_mtbf_s:
        racks = range(math.ceil(make.nodes / make.rack))
        queue += [(wait_s(make.rack_mtbf_s), "rack", k, 0) for k in racks]
    heapq.heapify(queue)
    while queue and queue[0][0] < end_s:
        at, kind, number, age = heapq.heappop(queue)
        at = round(at, 3)
        if kind == "back":
            present[number], ages[number] = True, ages[number] + 1
            names[number] = f"n{number + 1}.{ages[number]}"
            yield Row(at, "add", names[number])
            if make.mtbf_s:
                fails = at + wait_s(make.mtbf_s)
                heapq.heappush(queue, (fails, "fail", number, ages[number]))
            continue
        hit = [number]
        if kind == "rack":
            hit = list(range(number * make.rack, min((number + 1) * make.rack, make.nodes)))
            heapq.heappush(queue, (at + wait_s(make.rack_mtbf_s), "rack", number, 0))
        for node in hit:
            if present[node] and (kind == "rack" or ages[node] == age):
                present[node] = False
                yield Row(at, "remove", names[node])
                heapq.heappush(queue, (at + make.repair_s, "back", node, 0))


def _uniform(seed: int) -> Iterator[float]:
    """Yield numbers in (0, 1), by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mask, state = (1 << 64) - 1, seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & mask
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
        yield (((mixed ^ (mixed >> 31)) >> 11) + 0.5) / (1 << 53)
