"""Pace of workers as observed: counts from heartbeats, sampled in rounds, and stand-by records.

A round has the readings of all workers at one moment, and between two rounds each has trained a
step or more. So the cost does not grow with the number of heartbeats. Readings are kept for one
generation. A `StandBy` follows from journaled events, so that a restarted master knows it, and is
forgotten with its process. Must not know what is slow (`oobleck.master.rules.pace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from oobleck.core.ids import Generation, Incarnation, WorkerId

#: Seconds between two rounds: long beside the tenths of a second in which CPU quotas are granted.
ROUND_S = 1.0
_NO_GENERATION = Generation(0)
#: Most rounds kept: as many as the longest window has steps, and a few more.
MOST_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Reading:
    """Whole steps of a process in one generation, and the seconds it computed in them."""

    process: Incarnation
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Readings of all workers at one moment. A missing worker has reported none."""

    at: float
    readings: Mapping[WorkerId, Reading]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Alone:
    """Measurement by a process that stands by: seconds of a micro-batch in a layer of each kind.
    With it are the other workers' first round then, and their last one so far."""

    process: Incarnation
    attempt: int
    seconds: tuple[float, ...]
    first: Round
    last: Round


@dataclass(slots=True, kw_only=True)
class PaceSeen:
    """Observed pace of the workers of one generation."""

    generation: Generation = _NO_GENERATION
    #: Newest reading of each worker.
    newest: dict[WorkerId, Reading] = field(default_factory=dict)
    #: Workers with more steps than in the last round.
    further: set[WorkerId] = field(default_factory=set)
    #: Oldest first; at most MOST_ROUNDS.
    rounds: tuple[Round, ...] = ()
    #: Time of the last round, or of the first reading.
    since: float = 0.0
    #: Newest measurement of each worker that stands by.
    alone: dict[WorkerId, Alone] = field(default_factory=dict)

    def enter(self, generation: Generation) -> None:
        """Enter a generation, dropping the readings of any other."""
        if generation != self.generation:
            self.generation, self.rounds = generation, ()
            self.newest.clear()
            self.further.clear()
            self.alone.clear()

    def take_alone(
        self,
        worker: WorkerId,
        process: Incarnation,
        attempt: int,
        seconds: tuple[float, ...],
    ) -> bool:
        """Take a stand-by worker's measurement, and return whether it is new and useful."""
        known = self.alone.get(worker)
        if len(self.rounds) < 2 or (
            known is not None and (known.process, known.attempt) == (process, attempt)
        ):
            return False
        self.alone[worker] = Alone(process, attempt, seconds, self.rounds[0], self.rounds[-1])
        return True

    def take(self, worker: WorkerId, reading: Reading, workers: int, now: float) -> bool:
        """Take a reading, which needs a step; return whether it completes a round of `workers`."""
        if not reading.steps:
            self.newest.pop(worker, None)
            self.further.discard(worker)
            return False
        if not self.newest:
            self.since = now
        before = self.rounds[-1].readings.get(worker) if self.rounds else None
        self.newest[worker] = reading
        if before is None or reading.steps > before.steps:
            self.further.add(worker)
        everyone = not self.rounds and len(self.newest) == workers
        if len(self.further) < len(self.newest):
            return False
        if not everyone and now < self.since + ROUND_S:
            return False
        self.rounds = (*self.rounds, Round(now, dict(self.newest)))[-MOST_ROUNDS:]
        self.further.clear()
        self.since = now
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class StandBy:
    """Record of the last plan that made the process stand by."""

    process: Incarnation
    #: Length and end (Unix time) of the period in which its rate is not raised, even if it measures
    #: better.
    seconds: float
    until: float
    #: Unix time at which its rate was raised, or it joined a plan for that reason; 0: neither.
    better_at: float = 0.0

    def better(self, unix: float) -> "StandBy":
        return self if self.better_at else replace(self, better_at=unix)


@dataclass(frozen=True, slots=True)
class StandByTimes:
    """Times of a `StandBy`, by this master's clock."""

    until: float
    #: None: its rate was not raised.
    better_at: float | None

    @classmethod
    def of(cls, one: StandBy, now: float, unix: float) -> "StandByTimes":
        left_s = min(one.seconds, max(0.0, one.until - unix))
        better_at = now - max(0.0, unix - one.better_at) if one.better_at else None
        return cls(now + left_s, better_at)
