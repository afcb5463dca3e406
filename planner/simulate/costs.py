"""Costs of interruptions as constants: a simulation replays no network and no process.

Owns their names, defaults and limits.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches

from oobleck.planner.recovery.course import SETTLE_S
from oobleck.planner.recovery.outlook import SALVAGE, SWITCH_S

#: Least and most of costs that are no seconds.
_LIMITS: Mapping[str, tuple[float, float]] = {"salvage": (0, 1), "step_ratio": (0.001, 1000)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of the phases of a transition, and further constants. Raises ValueError where one is
    out of range."""

    #: From a loss to its declaration.
    detect_s: float = 0.5
    plan_s: float = 0.1
    #: Until the workers have left the interrupted step.
    abort_s: float = 0.1
    #: Until the workers have met in the new generation.
    meeting_s: float = 0.3
    #: By which the first step of a plan takes longer than the next ones.
    first_step_s: float = 0.0
    #: Switch to another plan at a step boundary, beside what is sent ahead and comes late.
    switch_s: float = SWITCH_S
    #: Start of a worker's process in place of a dead one.
    process_s: float = 1.5
    #: From a node's `add` until it can take part.
    join_s: float = 0.0
    #: Nodes that become ready within this time of each other join together.
    settle_s: float = SETTLE_S
    #: From a change of a node's rate until it is noticed.
    slow_s: float = 4.0
    #: Bytes per second of a node that receives or sends state; 0: the profile's links.
    bytes_per_s: float = 0.0
    #: Seconds of a step for each second that its plan expects.
    step_ratio: float = 1.0
    #: Share of a broken step's work that the next plan need not do again.
    salvage: float = SALVAGE
    #: Seconds between two checkpoints; 0: there are none.
    checkpoint_every_s: float = 3600.0
    #: Standstill of a save and of a return.
    save_s: float = 0.0
    load_s: float = 30.0

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            least, most = _LIMITS.get(one.name, (0, 1e15))
            if not (math.isfinite(value) and least <= value <= most):
                raise ValueError(
                    f"{one.name} is {value!r}; give at least {least} and at most {most:g}"
                )


def parse_costs(text: str) -> Costs:
    """Parse costs: a JSON object of some of their names. Raises ValueError with the line and the
    fix."""
    try:
        costs = json.loads(text, parse_int=float)
    except (json.JSONDecodeError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"line {line}: not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(costs, dict):
        raise ValueError('line 1: give one JSON object, as {"detect_s": 0.5}')
    for name, value in costs.items():
        if len(lines := _lines(text, name)) > 1:
            raise ValueError(f"line {lines[1]}: {name} is given twice; keep one")
        try:
            Costs(**{_known(name): _cost(name, value)})
        except ValueError as error:
            raise ValueError(f"line {next(iter(lines), 1)}: {error}") from error
    return Costs(**costs)


def _known(name: str) -> str:
    names = [one.name for one in fields(Costs)]
    if name not in names:
        near = get_close_matches(name, names, 1)
        fix = f"did you mean {near[0]}?" if near else f"give one of {', '.join(names)}"
        raise ValueError(f"unknown cost {name!r}; {fix}")
    return name


def _cost(name: str, value: object) -> float:
    if not isinstance(value, float):
        raise ValueError(f"{name} is {json.dumps(value)}; give a number")
    return value


def _lines(text: str, name: str) -> list[int]:
    """Return the line of each occurrence of a key."""
    key = re.escape(json.dumps(name, ensure_ascii=False))
    found = re.finditer(rf"{key}\s*:", text)
    return [text.count("\n", 0, one.start()) + 1 for one in found]


def data(costs: Costs) -> Mapping[str, float]:
    """Return the costs as plain data, for JSON."""
    return {one.name: getattr(costs, one.name) for one in fields(costs)}
