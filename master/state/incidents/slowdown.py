"""Slowdowns: incidents of the kind `slow worker`, which last as long as any worker computes more
slowly than the others.

Plain data that follows from journaled events (`oobleck.master.state.incidents.slowdowns` makes it,
`oobleck.master.storage.records.slowdown_line` tells it). Nothing fails in it and nothing waits for
its end, so failures come and go meanwhile as incidents of their own.
"""

import msgspec

from oobleck.core.ids import Generation, WorkerId
from oobleck.master.events.jobs import RateChanged
from oobleck.master.state.incidents.incident import Attempt, Setback

#: One slow worker may keep a slowdown open for weeks: so many of the workers that are slow no more
#: are kept, and so many of the plans, the newest ones.
MOST_KEPT = 64


class SlowWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Slow worker of a slowdown. A worker that is slow again before the slowdown ends keeps its
    entry."""

    worker: WorkerId
    #: In the plan in which it was found slow.
    ranks: tuple[int, ...] = ()
    #: What was told of it when it was slowest.
    slowest: RateChanged
    #: Unix times of the first step that took long, and of the word on it.
    since: float
    told_at: float
    #: Unix time since when it is slow no more; 0: it still is.
    until: float = 0.0
    #: Whether it was well then. If not, its process was gone, or the job over.
    well: bool = False

    @property
    def setback(self) -> Setback:
        return Setback(
            kind="slow worker",
            node=self.worker.node,
            worker=self.worker,
            ranks=self.ranks,
            reason=f"{self.slowest.rate:.2f} of the others' pace",
            evidence_at=self.since,
            declared_at=self.told_at,
        )


class Answer(Attempt, frozen=True, kw_only=True):
    """A plan that gave slow workers less to do, or something back, and what was expected of it."""

    policy: str
    reason: str


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    #: Among all incidents of the job, from 1.
    number: int
    from_generation: Generation
    #: In the order in which they were found slow.
    workers: tuple[SlowWorker, ...] = ()
    answers: tuple[Answer, ...] = ()

    @property
    def opened_at(self) -> float:
        return min(one.since for one in self.workers)

    @property
    def is_over(self) -> bool:
        return all(one.until for one in self.workers)
