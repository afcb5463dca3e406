"""Readings of how long workers compute, from heartbeats: growing counts, sampled for all workers at
a time.

A round is what all had told at one moment, and between two rounds each has trained a step or more.
So what comes of them costs the same however often a node is heard of. Observed, and kept for one
generation. Must not know what is slow (`oobleck.master.rules.stragglers.pace`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.core.ids import Generation, Incarnation, WorkerId

#: Between two rounds: shares of a processor's time are given out in tenths of a second.
ROUND_S = 1.0
_NO_GENERATION = Generation(0)
#: As many as the longest wait for a verdict has steps, and some.
MOST_ROUNDS = 24


@dataclass(frozen=True, slots=True)
class Reading:
    """Reading of one process in one generation: whole steps, and the seconds it computed in
    them."""

    process: Incarnation
    steps: int
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Readings of all workers at one moment. A worker that is missing has reported none."""

    at: float
    readings: Mapping[WorkerId, Reading]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Alone:
    """Measurement by a process that stands by: seconds of a micro-batch in a layer of each kind. It
    includes the others' first round, and their last one by then."""

    process: Incarnation
    attempt: int
    seconds: tuple[float, ...]
    first: Round
    last: Round


@dataclass(slots=True, kw_only=True)
class PaceSeen:
    """Observed pace of the workers of one generation."""

    generation: Generation = _NO_GENERATION
    #: The newest word of each worker.
    newest: dict[WorkerId, Reading] = field(default_factory=dict)
    #: Those with a step more than in the last round.
    further: set[WorkerId] = field(default_factory=set)
    #: Oldest first; at most MOST_ROUNDS.
    rounds: tuple[Round, ...] = ()
    #: When the last round was, or the first word came.
    since: float = 0.0
    #: The newest measurement of each worker that stands by.
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
        """Take what a worker that stands by has measured, once. Returns whether it says anything:
        it does so beside the pace of others alone."""
        known = self.alone.get(worker)
        if len(self.rounds) < 2 or (
            known is not None and (known.process, known.attempt) == (process, attempt)
        ):
            return False
        self.alone[worker] = Alone(process, attempt, seconds, self.rounds[0], self.rounds[-1])
        return True

    def take(self, worker: WorkerId, reading: Reading, workers: int, now: float) -> bool:
        """Take the word of one of so many workers; without a step it is none. Returns whether it
        completes a round."""
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
