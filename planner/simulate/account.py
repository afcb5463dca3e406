"""Account of a replay: each moment of the wall time is useful, redone, stalled, or waiting.

Times are whole numbers of ticks, so that sums are exact. A tick is a power of two of a second, so
that sums of the told seconds are exact as well. Must not know plans.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

#: Parts of a second. Numbers of ticks of many years fit into a float.
TICKS = 1 << 24

#: - detect to first_step: phases of a transition that something forced.
#: - switch: the change of plan at a step boundary.
#: - save, load: checkpoints.
#: - redone_step: work of broken steps that was done again.
#: - redone_checkpoint: work since a checkpoint that was done again.
#: - waiting: no plan was possible.
Cause = Literal[
    "detect",
    "plan",
    "abort",
    "process",
    "meeting",
    "transfer",
    "first_step",
    "switch",
    "save",
    "load",
    "redone_step",
    "redone_checkpoint",
    "waiting",
]
_REDONE: frozenset[Cause] = frozenset({"redone_step", "redone_checkpoint"})


def ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def seconds(ticks: int) -> float:
    return ticks / TICKS


@dataclass(slots=True, kw_only=True)
class Account:
    """Sums of a replay up to now."""

    #: Samples of each step.
    batch: int
    useful: int = 0
    badput: Counter[Cause] = field(default_factory=Counter)
    #: Committed steps that no return has undone.
    steps: int = 0
    #: The same, and useful ticks, since the newest checkpoint.
    fresh_steps: int = 0
    fresh: int = 0
    idle_nodes: int = 0
    unguarded: int = 0
    events: int = 0
    returns: int = 0
    redone_samples: float = 0.0
    moved_bytes: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def wall(self) -> int:
        return self.useful + self.badput.total()

    def commit(self, steps: int, spent: int) -> None:
        """Count steps, and the useful ticks spent in them, which are counted as useful already."""
        self.steps += steps
        self.fresh_steps += steps
        self.fresh += spent

    def waste(self, spent: int, samples: float, cause: Cause) -> None:
        """Count useful ticks as redone."""
        self.useful -= spent
        self.badput[cause] += spent
        self.redone_samples += samples

    def saved(self) -> None:
        self.fresh = self.fresh_steps = 0

    def rolled_back(self) -> None:
        """Undo the steps since the newest checkpoint."""
        self.waste(self.fresh, self.fresh_steps * self.batch, "redone_checkpoint")
        self.steps -= self.fresh_steps
        self.saved()


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Account of a whole replay."""

    account: Account
    #: Part of a step in progress at the end.
    share: float
    #: Time in seconds since which nothing could go on until the end, and why.
    failed_at: float | None
    reason: str
    #: Samples per second of the first plan on all nodes.
    full: float

    @property
    def samples(self) -> float:
        """Samples of committed steps, and of the share of a step in progress at the end."""
        return (self.account.steps + self.share) * self.account.batch

    @property
    def samples_per_s(self) -> float:
        wall = self.account.wall
        return self.samples / seconds(wall) if wall else 0.0

    def data(self, price: float | None = None, node_s: float = 0.0) -> Mapping[str, Any]:
        """Return it as plain data, for JSON. `price`: that of a node for an hour."""
        own, wall = self.account, self.account.wall
        redone = sum(own.badput[cause] for cause in _REDONE)
        waiting = own.badput["waiting"]
        goodput = own.useful / wall if wall else 0.0
        told = {
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "samples_per_s_of_full": self.samples_per_s / self.full,
            "steps": own.steps,
            "goodput": goodput,
            "ettr": goodput,
            "wall_s": seconds(wall),
            "seconds": {
                "useful": seconds(own.useful),
                "redone": seconds(redone),
                "stalled": seconds(own.badput.total() - redone - waiting),
                "waiting": seconds(waiting),
            },
            "badput": {
                cause: seconds(spent) for cause, spent in sorted(own.badput.items()) if spent
            },
            "idle_node_s": seconds(own.idle_nodes),
            "events": own.events,
            "counts": _nested(own.counts),
            "redone_samples": own.redone_samples,
            "moved_bytes": own.moved_bytes,
            "returns": own.returns,
            "lost_guarantee_s": seconds(own.unguarded),
            "failed_at": self.failed_at,
            "reason": self.reason,
        }
        if price is not None:
            cost = price * node_s / 3600
            told["cost"] = cost
            told["cost_per_million_samples"] = cost / self.samples * 1e6 if self.samples else None
        return told


def _nested(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for (policy, rule), number in sorted(counts.items()):
        found.setdefault(policy, {})[rule] = number
    return found
