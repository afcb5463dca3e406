"""Terms of this master's journal, and which of its events an agent may have heard.

A history is one journal and all that is copied from it. Each head that goes on from a copy begins
a term, so two heads share exactly the events before the later one's term. Part of the journaled
state. Pure.
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
#: A term so far above this head's own is not believed. Else one lie would use up all of them.
_MOST_AHEAD = 1000


class Term(msgspec.Struct, frozen=True, kw_only=True):
    number: int
    #: Random id of the head that began it, and where its state directory was.
    begun_by: str
    place: str
    #: Number of the first event that heads of this journal's earlier terms do not have.
    since: int
    #: And the least that heads of terms may lack which this journal was never in; 0: the same.
    apart: int = 0
    #: Why it began, for operators.
    reason: str = ""


@dataclass(slots=True, kw_only=True)
class History:
    #: Both empty until the first term begins.
    id: str = ""
    cluster: str = ""
    #: The newest is the last one.
    terms: list[Term] = field(default_factory=list)

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
        if (term := self.term) is None:
            return None
        return Head(
            cluster=self.cluster,
            history=self.id,
            term=term.number,
            begun_by=term.begun_by,
            sequence=sequence,
        )

    def shared(self, other: Head, sequence: int) -> int:
        """Return the number of the last event that both journals have, of this one up to
        `sequence`; -1: they are of different histories."""
        if other.history != self.id:
            return -1
        for index, term in enumerate(self.terms):
            if (term.number, term.begun_by) == (other.term, other.begun_by):
                following = self.terms[index + 1 : index + 2]
                end = following[0].since - 1 if following else sequence
                return min(other.sequence, end)
        # A head of a term that this one never was in: they part before it, at the latest.
        earlier = [term for term in self.terms if term.number >= other.term]
        return (earlier[0].apart or earlier[0].since) - 1 if earlier else sequence

    def next_number(self, above: int = 0) -> int:
        """Return the number of a term to begin: higher than all of this history, and than `above`
        if that can be the term of another head."""
        newest = self.terms[-1].number if self.terms else 0
        if above > newest + _MOST_AHEAD:
            above = newest
        return min(max(newest, above) + 1, MOST_TERM)
