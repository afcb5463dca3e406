"""The truth about a state directory: which events its journal has, and which of them another one
has too. Must not know what the master makes of them.
"""

from dataclasses import dataclass, field

from oobleck.core.ids import Generation, JobId, NodeName
from oobleck.master.events.unions import Journaled


@dataclass(slots=True, kw_only=True, eq=False)
class Book:
    name: str
    #: The directory that this one is a copy of, and how many events that had then.
    parent: "Book | None" = None
    copied: int = 0
    #: A copy that was put where its original had been, so that its head begins no term by itself.
    put_back: bool = False
    starts: int = 0
    #: How many events all masters have journaled here.
    sequence: int = 0
    #: The newest generation of each job, and all of them.
    newest: dict[JobId, int] = field(default_factory=dict)
    plans: set[tuple[JobId, Generation]] = field(default_factory=set)
    #: Jobs that were submitted or adopted, and those that have committed a step.
    jobs: set[JobId] = field(default_factory=set)
    trained: set[JobId] = field(default_factory=set)
    ends: dict[JobId, Journaled] = field(default_factory=dict)
    #: Jobs that go back to a checkpoint or begin anew, until their next step.
    anew: set[JobId] = field(default_factory=set)
    #: Of what its nodes are to do.
    versions: dict[NodeName, int] = field(default_factory=dict)
    #: Jobs that it did not know, on nodes where an operator has had them end.
    ended: set[tuple[JobId, NodeName]] = field(default_factory=set)

    def copy(self, name: str, *, put_back: bool = False) -> "Book":
        """Return that of a copy of the directory as it is now."""
        return Book(
            name=name,
            parent=self,
            copied=self.sequence,
            put_back=put_back,
            sequence=self.sequence,
            newest=dict(self.newest),
            plans=set(self.plans),
            jobs=set(self.jobs),
            trained=set(self.trained),
            ends=dict(self.ends),
            anew=set(self.anew),
            versions=dict(self.versions),
            ended=set(self.ended),
        )

    def shared(self, other: "Book") -> int:
        """Return how many events both have."""
        own = self._shares()
        both = (min(own[book], n) for book, n in other._shares().items() if book in own)
        return max(both, default=0)

    def _shares(self) -> "dict[Book, int]":
        """Return how many events it has of each directory that it descends from, and of itself."""
        found, book, shares = {}, self, self.sequence
        while True:
            found[book] = shares
            if book.parent is None:
                return found
            shares, book = min(shares, book.copied), book.parent
