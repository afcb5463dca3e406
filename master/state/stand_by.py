"""Stand-by records of workers that were put aside because they were slow.

Follows from journaled events, so that a restarted master knows it too. It is of one process, and
forgotten with it. Must not know how long anyone must stand by
(`oobleck.master.rules.stragglers.stand_by`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from oobleck.core.ids import Incarnation, WorkerId
from oobleck.master.events.plans import PlanMade


@dataclass(frozen=True, slots=True, kw_only=True)
class StandBy:
    """The last time that a plan put the process to stand by."""

    process: Incarnation
    #: For so long, and until then (Unix time), it is called no better, whatever it measures alone.
    seconds: float
    until: float
    #: Unix time since when its rate is better, or since it has a part in a plan because of that;
    #: 0: it is not.
    better_at: float = 0.0

    def better(self, unix: float) -> "StandBy":
        return self if self.better_at else replace(self, better_at=unix)


@dataclass(frozen=True, slots=True)
class StandByTimes:
    """Times of a `StandBy`, by this master's clock."""

    until: float
    #: None: its rate is no better.
    better_at: float | None

    @classmethod
    def of(cls, one: StandBy, now: float, unix: float) -> "StandByTimes":
        left_s = min(one.seconds, max(0.0, one.until - unix))
        better_at = now - max(0.0, unix - one.better_at) if one.better_at else None
        return cls(now + left_s, better_at)


def after_plan(
    known: Mapping[WorkerId, StandBy],
    event: PlanMade,
    before: Mapping[WorkerId, Incarnation],
    unix: float,
) -> dict[WorkerId, StandBy]:
    """Return the stand-by records after `event`, whose plan follows one with the processes
    `before`. No known record is of a process that the event replaces."""
    workers = frozenset(event.plan.workers)
    found: dict[WorkerId, StandBy] = {}
    for worker, one in known.items():
        joins = worker in workers and worker not in before
        found[worker] = replace(one, better_at=unix) if joins and one.better_at else one
    for each in event.stand_by_for:
        found[each.worker] = StandBy(
            process=each.incarnation, seconds=each.seconds, until=unix + each.seconds
        )
    return found
