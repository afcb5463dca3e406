"""Comparison of what the planner expected of its answers with what happened. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from oobleck.cli.output.table import Column, listing

#: Least expected seconds that something is compared with: a ratio to less says nothing.
_LEAST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Medians in seconds of an expectation and of what happened, and of the ratio of the two."""

    expected_s: float | None
    happened_s: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Answers of one rule of a policy."""

    policy: str
    rule: str
    n: int
    stall: Held
    step: Held

    def data(self) -> dict[str, object]:
        """Return it as plain data, for JSON."""
        found: dict[str, object] = {"policy": self.policy, "rule": self.rule, "n": self.n}
        for name, held in (("stall_s", self.stall), ("step_s", self.step)):
            found[name] = {
                "expected": held.expected_s,
                "happened": held.happened_s,
                "ratio": held.ratio,
            }
        return found


def predicted(
    events: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]]
) -> list[Predicted]:
    """Compare the `reconfigured` ones of a job's events with its records of steps."""
    taken_s: dict[int, list[float]] = defaultdict(list)
    for record in steps:
        taken_s[record["generation"]].append(record["step_seconds"])
    by_rule: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["event"] == "reconfigured":
            by_rule[event["policy"], event["rule"]].append(event)
    return [
        Predicted(
            policy=policy,
            rule=rule,
            n=len(found),
            stall=_held([(_expected(one, "stall_s"), one.get("stall_s")) for one in found]),
            step=_held(
                [
                    (_expected(one, "step_s"), _usual_s(taken_s[one["to_generation"]]))
                    for one in found
                ]
            ),
        )
        for (policy, rule), found in sorted(by_rule.items())
    ]


def _expected(event: Mapping[str, Any], name: str) -> float | None:
    expected = event.get("expected")
    return None if expected is None else expected[name]


def _usual_s(seconds: Sequence[float]) -> float | None:
    """Return the median step; None: there is none beside the first, which a recovery lengthens."""
    return median(seconds[1:]) if len(seconds) > 1 else None


def _held(pairs: Sequence[tuple[float | None, float | None]]) -> Held:
    expected = [one for one, _ in pairs if one is not None]
    happened = [one for _, one in pairs if one is not None]
    ratios = [b / a for a, b in pairs if a is not None and b is not None and a >= _LEAST_S]
    return Held(
        expected_s=median(expected) if expected else None,
        happened_s=median(happened) if happened else None,
        ratio=median(ratios) if ratios else None,
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


_COLUMNS = (
    Column("POLICY", lambda one: one.policy),
    Column("RULE", lambda one: one.rule),
    Column("N", lambda one: one.n),
    Column("STALL EXPECTED", lambda one: _seconds(one.stall.expected_s)),
    Column("HAPPENED", lambda one: _seconds(one.stall.happened_s)),
    Column("RATIO", lambda one: _seconds(one.stall.ratio)),
    Column("STEP EXPECTED", lambda one: _seconds(one.step.expected_s)),
    Column("HAPPENED", lambda one: _seconds(one.step.happened_s)),
    Column("RATIO", lambda one: _seconds(one.step.ratio)),
)


def predicted_table(found: Sequence[Predicted], *, width: int | None, wide: bool) -> str:
    """Format a line for each; seconds are medians."""
    return listing(_COLUMNS, found, width=width, wide=wide)
