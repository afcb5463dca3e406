"""Starts and terms of the heads that wrote this journal, and the events that another head shares.

A history is one journal and all that is copied from it. Each start of a head has a random id, and
writes a stretch of the journal alone. So two journals share the stretches of the starts that both
know, and of the last of these as much as the shorter one has. Each head that goes on from a copy
begins a term, so that agents know whom to follow. Part of the journaled state. Pure.
"""

from dataclasses import dataclass, field

import msgspec

from oobleck.proto.heads import MOST_TERM
from oobleck.proto.types import Head

#: Of random ids.
ID_BYTES = 16
#: Generations of a job that one term has room for. Those of different terms never meet, since an
#: agent passes over a plan whose generation is not above that of the last.
GENERATIONS_PER_TERM = 100_000
#: Starts that are remembered; one that an agent heard longer ago counts as unknown.
_KNOWN_STARTS = 256
#: A term so far above this head's own is not believed. Else one lie would use up all of them.
_MOST_AHEAD = 1000


class Term(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    #: Random id of the head that began it, and where its state directory was.
    begun_by: str
    place: str
    #: Number of the first event of the start that began it.
    since: int
    #: Why it began, for operators.
    reason: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    #: Number of its first event.
    since: int


@dataclass(slots=True, kw_only=True)
class History:
    #: Both empty until the first term begins.
    id: str = ""
    cluster: str = ""
    #: The newest is the last one, here and below.
    terms: list[Term] = field(default_factory=list)
    #: Of heads, as far as they are remembered.
    starts: list[Start] = field(default_factory=list)

    @property
    def term(self) -> Term | None:
        """The term that this head speaks in; None: none has begun."""
        return self.terms[-1] if self.terms else None

    @property
    def first_generation(self) -> int:
        """The least generation that plans of this term may have."""
        return GENERATIONS_PER_TERM * (self.terms[-1].number - 1) if self.terms else 0

    def head(self, sequence: int) -> Head | None:
        """Return this head, whose journal goes up to that event; None: no term has begun."""
        if (term := self.term) is None or not self.starts:
            return None
        return Head(
            cluster=self.cluster,
            history=self.id,
            term=term.number,
            begun_by=term.begun_by,
            start=self.starts[-1].id,
            sequence=sequence,
        )

    def start(self, start: str, sequence: int) -> None:
        """Note that a head has started with that event. An empty id is of a release before."""
        if start:
            self.starts = [*self.starts, Start(id=start, since=sequence)][-_KNOWN_STARTS:]

    def shared(self, other: Head, sequence: int) -> int:
        """Return the number of the last event that both journals have, of this one up to
        `sequence`; -1: they are of different histories. If the other head's start is not in this
        journal, that is the most that there may be."""
        if other.history != self.id:
            return -1
        for index, start in enumerate(self.starts):
            if start.id == other.start:
                following = self.starts[index + 1 : index + 2]
                end = following[0].since - 1 if following else sequence
                return min(other.sequence, end)
        # What this start has written is its own, and so are terms that are not the other's.
        theirs = other.term, other.begun_by
        own = (
            term.since
            for term in self.terms
            if term.number >= other.term and (term.number, term.begun_by) != theirs
        )
        return min(next(own, sequence + 1), self.starts[-1].since) - 1

    def lacks(self, other: Head, sequence: int) -> int:
        """Return how many events, at least, the other head had written that this journal, which
        goes up to `sequence`, does not have. Its start may be one of them."""
        known = any(start.id == other.start for start in self.starts)
        return max(other.sequence - self.shared(other, sequence), 0 if known else 1)

    def next_number(self, above: int = 0) -> int:
        """Return the number of a term to begin: higher than all of this history, and than `above`
        if that can be the term of another head."""
        newest = self.terms[-1].number if self.terms else 0
        if above > newest + _MOST_AHEAD:
            above = newest
        return min(max(newest, above) + 1, MOST_TERM)
