"""Account of a job, replayed or real: each moment of the wall time is useful, redone, stalled, or
waiting.

Times are whole numbers of ticks, so that sums are exact. A tick is a power of two of a second, so
that sums of seconds are exact as well. Must not know plans.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Literal, TypeVar

Value = TypeVar("Value")

#: Parts of a second. Numbers of ticks of many years fit into a float.
TICKS = 1 << 24

#: - detect to first_step: phases of a transition that something forced.
#: - switch: the change of plan at a step boundary.
#: - save, load: checkpoints.
#: - redone_step: work of broken steps that was done again.
#: - redone_checkpoint: work since a checkpoint that was done again.
#: - waiting: no plan was possible.
#:
#: Only of a real job:
#: - queued: before its first turn, and while another job had the turn.
#: - startup: from the turn, or the first plan, until the first step begins.
#: - evaluation: on held-out data.
#: - other: pauses between steps, and what no record explains.
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
    "queued",
    "startup",
    "evaluation",
    "other",
]
_REDONE: frozenset[Cause] = frozenset({"redone_step", "redone_checkpoint"})
_WAITING: frozenset[Cause] = frozenset({"waiting", "queued"})
#: Names of ml-goodput-measurement's BadputType.
_TYPES: Mapping[Cause, str] = {
    "startup": "PROGRAM_STARTUP",
    "first_step": "PROGRAM_STARTUP",
    "save": "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME",
    "load": "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME",
    "redone_step": "WASTED_PROGRESS_FROM_DISRUPTION",
    "redone_checkpoint": "WASTED_PROGRESS_FROM_DISRUPTION",
    "evaluation": "CUSTOM_BADPUT_EVENTS",
    "queued": "OTHER",
    "other": "OTHER",
}
_TYPE = "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"


def ticks(seconds: float) -> int:
    return round(seconds * TICKS)


def seconds(ticks: int) -> float:
    return ticks / TICKS


def spent_data(useful: int, badput: Mapping[Cause, int], stepped: float) -> dict[str, Any]:
    """Return where the wall time went, as plain data, for JSON.

    `stepped`: mean share of the nodes that took part in useful time.
    """
    total = sum(badput.values())
    wall = useful + total
    redone = sum(badput.get(cause, 0) for cause in _REDONE)
    waiting = sum(badput.get(cause, 0) for cause in _WAITING)
    types: Counter[str] = Counter()
    for cause, spent in badput.items():
        types[_TYPES.get(cause, _TYPE)] += spent
    turn = wall - badput.get("queued", 0)
    goodput, ettr = (useful / span if span else 0.0 for span in (turn, wall))
    return {
        "goodput": goodput,
        "ettr": ettr,
        "node_goodput": goodput * stepped,
        "node_ettr": ettr * stepped,
        "wall_s": seconds(wall),
        "seconds": {
            "useful": seconds(useful),
            "redone": seconds(redone),
            "stalled": seconds(total - redone - waiting),
            "waiting": seconds(waiting),
        },
        "badput": {cause: seconds(spent) for cause, spent in sorted(badput.items()) if spent},
        "badput_types": {name: seconds(spent) for name, spent in sorted(types.items()) if spent},
    }


@dataclass(slots=True, kw_only=True)
class Account:
    """Sums of a replay up to now."""

    #: Samples of each step.
    batch: int
    useful: int = 0
    #: Ticks in which training went on, whether or not they were redone later, and the sum of these
    #: over the nodes of the plan.
    worked: int = 0
    worked_nodes: int = 0
    badput: Counter[Cause] = field(default_factory=Counter)
    #: Committed steps that no return has undone.
    steps: int = 0
    #: The same, and useful ticks, since the newest checkpoint.
    fresh_steps: int = 0
    fresh: int = 0
    #: True if there is a checkpoint.
    has_saved: bool = False
    idle_nodes: int = 0
    unguarded: int = 0
    events: int = 0
    returns: int = 0
    redone_samples: float = 0.0
    moved_bytes: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Standstill before each plan, by policy and rule.
    stalls: defaultdict[tuple[str, str], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )

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
        self.has_saved = True

    def rolled_back(self) -> None:
        """Undo the steps since the newest checkpoint."""
        self.waste(self.fresh, self.fresh_steps * self.batch, "redone_checkpoint")
        self.steps -= self.fresh_steps
        self.fresh = self.fresh_steps = 0


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
    #: Nodes of the full cluster.
    nodes: int
    #: Samples so far at times in seconds.
    curve: tuple[tuple[float, float], ...] = ()

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
        own = self.account
        stepped = own.worked_nodes / own.worked / self.nodes if own.worked else 0.0
        figures = {
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "samples_per_s_of_full": self.samples_per_s / self.full,
            "steps": own.steps,
            **spent_data(own.useful, own.badput, stepped),
            "idle_node_s": seconds(own.idle_nodes),
            "events": own.events,
            "counts": nested(own.counts),
            "stall_s": nested({kind: seconds(median_low(own.stalls[kind])) for kind in own.stalls}),
            "redone_samples": own.redone_samples,
            "moved_bytes": own.moved_bytes,
            "returns": own.returns,
            "lost_guarantee_s": seconds(own.unguarded),
            "failed_at": self.failed_at,
            "reason": self.reason,
        }
        if price is not None:
            cost = price * node_s / 3600
            figures["cost"] = cost
            figures["cost_per_million_samples"] = (
                cost / self.samples * 1e6 if self.samples else None
            )
        return figures


def nested(values: Mapping[tuple[str, str], Value]) -> dict[str, dict[str, Value]]:
    """Return the values by policy, then by rule."""
    by_policy: dict[str, dict[str, Value]] = {}
    for policy, rule in sorted(values):
        by_policy.setdefault(policy, {})[rule] = values[policy, rule]
    return by_policy
