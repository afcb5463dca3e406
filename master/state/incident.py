"""Incidents and slowdowns as plain data, and descriptions of how a process ended.

An incident is a failure with all its consequences, until training resumes or the job ends. It
follows from journaled events (`oobleck.master.state.incidents` makes it,
`oobleck.master.storage.incident_lines` writes it). One incident has any number of setbacks, since a
second loss may occur while the first is answered; `root_cause` is the one that began it. A peer's
closed connection is never a setback, only evidence: it does not show which end failed. Slow
workers, which have not failed, make a `Slowdown`.
"""

import re
from bisect import bisect_left, bisect_right
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.units import comma_separated, head
from oobleck.host.system.process import signal_name
from oobleck.master.events.jobs import (
    Cause,
    Evidence,
    JobFailed,
    PlanMade,
    RateChanged,
    ReconfigurationStats,
)
from oobleck.proto.types import WorkerExited

Kind = Literal[
    "worker died",
    "node lost",
    "agent restarted",
    "hang",
    "network cut",
    "node unfit",
    "drained by force",
    "peers disconnected",
    "no progress",
    "job error",
    "job failed",
    "head cut off",
    "site away",
    "slow worker",
]
#: Kinds that show a fault but not its cause.
_VAGUE: tuple[Kind, ...] = ("peers disconnected", "no progress", "job failed")
#: Kinds that an error in the job's code cannot cause in another process.
_ELSEWHERE: tuple[Kind, ...] = (
    "node lost",
    "agent restarted",
    "hang",
    "network cut",
    "drained by force",
)
#: Output of a process that ends because another one did.
_CONNECTION = re.compile(
    r"connection (was )?(reset|closed|refused|aborted|lost)|broken ?pipe|closed by peer|"
    r"lost a peer|socket (was )?closed|ConnectionError|ConnectionResetError",
    re.IGNORECASE,
)
#: Seconds within which nodes fall silent together, and the least part of the plan's nodes for that.
_TOGETHER_S = 5.0
_NEARLY_ALL = 0.9
#: Seconds around the loss of a node within which the end of its worker is a consequence.
_SAME_FALL_S = 10.0
#: Most pieces of evidence kept per incident: the first ones.
MOST_EVIDENCE = 64
#: Workers that are no longer slow, and plans, kept per slowdown, the newest ones. One slow worker
#: may keep a slowdown open for weeks.
MOST_KEPT = 64


class Setback(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of one process, of a node, of the network or of the job."""

    kind: Kind
    #: Empty: no particular node.
    node: str = ""
    #: None: no particular worker.
    worker: WorkerId | None = None
    #: Ranks of that worker, or of all workers of the node, in the previous plan.
    ranks: tuple[int, ...] = ()
    pid: int | None = None
    signal: int | None = None
    exit_code: int | None = None
    #: Error that the process reported; empty: none.
    exception: str = ""
    #: Last lines of its output.
    log_tail: tuple[str, ...] = ()
    reason: str
    #: Unix times of the first evidence and of the declaration.
    evidence_at: float
    declared_at: float
    #: How the master itself found it: lease | progress.
    found_by: str = ""
    #: True if the master was away too and has not heard from the node since.
    with_master: bool = False
    #: True if it had reported a lost peer before.
    lost_peer: bool = False
    #: Agent that has returned since on the lost node; empty: none.
    back: Literal["", "same agent", "another agent"] = ""

    @property
    def followed_others(self) -> bool:
        """True if the process may have ended only because it lost a peer."""
        if self.kind != "worker died" or self.signal is not None:
            return False
        words = self.exception or "\n".join(self.log_tail[-3:])
        return self.lost_peer or _CONNECTION.search(words) is not None


class DatedEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """Evidence with its Unix time."""

    at: float
    what: Evidence


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """Attempt at recovery: one generation that answered the incident, and its progress."""

    generation: Generation
    cause: Cause
    rule: str
    #: Its statistics, and the Unix time of its end; None: not known yet.
    transition: ReconfigurationStats | None = None
    ended_at: float = 0.0

    @property
    def began_at(self) -> float:
        return self.ended_at - (self.transition.total_s if self.transition is not None else 0.0)


class Incident(msgspec.Struct, frozen=True, kw_only=True):
    """Failure and all its consequences, until training resumes or the job ends."""

    #: From 1 within the job.
    number: int
    from_generation: Generation
    #: Number of nodes of the plan that it struck.
    members: int = 0
    setbacks: tuple[Setback, ...] = ()
    evidence: tuple[DatedEvidence, ...] = ()
    attempts: tuple[Attempt, ...] = ()
    #: Committed steps that are done again from a checkpoint.
    lost_steps: int = 0
    #: Unix time of the last step before the first generation that answered, if training continued
    #: well after the first evidence. 0: it did not, or that is not known. None: none has answered.
    trained_until: float | None = None

    @property
    def opened_at(self) -> float:
        """Unix time of the first evidence."""
        seen = [dated.at for dated in self.evidence]
        return min([*(setback.evidence_at for setback in self.setbacks), *seen])

    @property
    def stands_since(self) -> float:
        """Unix time at which training stopped: later than the first evidence if silent nodes
        trained on, as when only the head was cut off."""
        return max(self.opened_at, self.trained_until or 0.0)

    @property
    def root_cause(self) -> Setback:
        """Setback that began the incident: the job's own error, else the first setback that is no
        consequence of another. Lack of progress counts only if no other setback is known. A cut-off
        head, or site, has no setback of its own, so one is made for it."""
        first = min(self.setbacks, key=self._order)
        if first in self.silenced and self.head_is_cut_off:
            return self._cut_off()
        return self._site() if first in self.away_with_master else first

    @property
    def silenced(self) -> tuple[Setback, ...]:
        """Losses of nodes that fell silent together, if these are nearly all: they, or the head,
        lost the network."""
        lost = [s for s in self.setbacks if s.kind == "node lost" and s.found_by == "lease"]
        first = min((s.evidence_at for s in lost), default=0.0)
        together = tuple(s for s in lost if s.evidence_at - first <= _TOGETHER_S)
        nodes = {s.node for s in together}
        return together if len(nodes) >= max(2, _NEARLY_ALL * self.members) else ()

    @property
    def head_is_cut_off(self) -> bool | None:
        """True if the head was cut off rather than the nodes that fell silent together: most are
        back, all with the same agents. None: no node is back yet."""
        back = [s.back for s in self.silenced]
        if "another agent" in back:
            return False
        if "same agent" not in back:
            return None if back else False
        return 2 * back.count("same agent") > len(back)

    @property
    def away_with_master(self) -> tuple[Setback, ...]:
        """Losses of nodes that were away together with the master, if these are nearly all."""
        lost = tuple(s for s in self.setbacks if s.with_master)
        nodes = {s.node for s in lost}
        return lost if len(nodes) >= max(2, _NEARLY_ALL * self.members) else ()

    def _cut_off(self) -> Setback:
        nodes = comma_separated({s.node for s in self.silenced})
        reason = f"the head was cut off from {nodes}, whose agents lived on"
        return _of_all("head cut off", reason, self.silenced)

    def _site(self) -> Setback:
        nodes = comma_separated({s.node for s in self.away_with_master})
        reason = f"power or network of the whole site: the master and {nodes} were away together"
        return _of_all("site away", reason, self.away_with_master)

    def _order(self, setback: Setback) -> tuple[int, float]:
        if setback.kind == "job error":
            rank = 0
        elif setback.kind in _VAGUE:
            rank = 3
        else:
            rank = 2 if self.is_consequence(setback) else 1
        return rank, setback.evidence_at

    def split(self, apart: "Incident") -> tuple["Incident", "Incident"] | None:
        """Split off the job's own error (the only setback of `apart`) with its consequences, if
        this incident began before it and in other processes. Return both incidents; None: they are
        one."""
        (error,) = apart.setbacks
        by_error = tuple(s for s in self.setbacks if self._is_by(s, error))
        others = tuple(s for s in self.setbacks if s not in by_error)
        clear = [s for s in others if s.kind not in _VAGUE]
        if not clear or not all(
            setback.kind in _ELSEWHERE
            and (setback.worker or setback.node) not in (error.worker, error.node)
            and setback.evidence_at < error.evidence_at
            for setback in clear
        ):
            return None
        ended = {str(setback.worker) for setback in by_error if setback.worker is not None}
        seen = tuple(
            dated
            for dated in self.evidence
            if dated.what.about in ended or _reports(dated.what, error)
        )
        rest = tuple(dated for dated in self.evidence if dated not in seen)
        return (
            replace(self, setbacks=others, evidence=rest),
            replace(apart, setbacks=(error, *by_error), evidence=seen),
        )

    def _is_by(self, setback: Setback, error: Setback) -> bool:
        """Return whether a process ended, or a node was left out, by that error of the job."""
        if error.kind != "job error" or error is setback:
            return False
        if setback.kind == "node unfit":
            return setback.reason in error.reason
        return setback.kind == "worker died" and any(
            dated.what.about == str(setback.worker) and _reports(dated.what, error)
            for dated in self.evidence
        )

    def is_consequence(self, setback: Setback) -> bool:
        """Return whether another setback explains this one."""
        if setback in self.silenced and self.head_is_cut_off:
            return True
        if setback.with_master and self.away_with_master:
            return True
        others = [other for other in self.setbacks if other is not setback]
        if any(self._is_by(setback, other) for other in others):
            return True
        if setback.kind in _VAGUE:
            return any(other.kind not in _VAGUE for other in others)
        if setback.followed_others:
            return any(other.kind != "worker died" or other.signal is not None for other in others)
        return setback.worker is not None and any(
            other.kind in ("node lost", "agent restarted", "hang", "node unfit")
            and other.node == setback.node
            and abs(other.evidence_at - setback.evidence_at) <= _SAME_FALL_S
            for other in others
        )


def _reports(seen: Evidence, error: Setback) -> bool:
    """Return whether a worker reported the job's own error."""
    return seen.by == "worker" and seen.saw in error.reason


def _of_all(kind: Kind, reason: str, setbacks: tuple[Setback, ...]) -> Setback:
    """Build the one setback that explains these; it has the times of the first."""
    return Setback(
        kind=kind,
        reason=reason,
        evidence_at=min(s.evidence_at for s in setbacks),
        declared_at=min(s.declared_at for s in setbacks),
    )


class LastIncident(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of the newest incident, as `oobleck status` shows it."""

    number: int
    #: Unix time of its end.
    at: float
    summary: str


class SlowWorker(msgspec.Struct, frozen=True, kw_only=True):
    """Slow worker of a slowdown. A worker that is slow again before the slowdown ends keeps its
    entry."""

    worker: WorkerId
    #: In the plan in which it was found slow.
    ranks: tuple[int, ...] = ()
    #: Event of its lowest rate.
    slowest: RateChanged
    #: Unix times of the first slow step, and of the event.
    since: float
    told_at: float
    #: Unix time at which it was no longer slow; 0: it still is.
    until: float = 0.0
    #: True if it was well then, rather than that its process or the job had ended.
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
    """Plan that took work from slow workers, or gave some back, and its expected effect."""

    policy: str
    reason: str


class Slowdown(msgspec.Struct, frozen=True, kw_only=True):
    """Time in which some worker of a job is slow."""

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


def describe_exit(exited: WorkerExited) -> str:
    """Describe how a process ended."""
    if exited.out_of_memory:
        return (
            f"pid {exited.pid} was killed by the kernel, since its host is out of memory: lower "
            "training.microbatch or the agent's --memory-per-worker, or free memory there"
        )
    if exited.signal is not None:
        return f"pid {exited.pid} was killed by {signal_name(exited.signal)}"
    return f"pid {exited.pid} exited with code {exited.exit_code}"


def own_words(event: JobFailed) -> Evidence | None:
    """Return the report of the worker whose error failed the job; None: there is none."""
    return next((s for s in event.evidence if s.by == "worker" and s.saw in event.reason), None)


def last_words(exited: WorkerExited) -> str:
    """Return the last line that a process printed; in a traceback it names the exception."""
    return head(exited.log_tail.strip().rpartition("\n")[2]) or "no output"


A = TypeVar("A", bound=Attempt)


def with_stats(
    attempts: tuple[A, ...],
    newest: Generation,
    stats: ReconfigurationStats | None,
    unix: float,
) -> tuple[A, ...]:
    """Return the attempts, with `stats` added to the one at the `newest` generation, if any."""
    last = attempts[-1] if attempts else None
    if stats is None or last is None or last.generation != newest:
        return attempts
    return (*attempts[:-1], replace(last, transition=stats, ended_at=unix))


def ranks_of(made: PlanMade | None, node: str, worker: WorkerId | None = None) -> tuple[int, ...]:
    """Return the ranks of the node's workers, which are side by side, or of `worker` alone."""
    workers = made.plan.workers if made is not None else ()
    first = bisect_left(workers, node, key=lambda other: other.node)
    end = bisect_right(workers, node, key=lambda other: other.node)
    return tuple(r for r in range(first, end) if worker is None or workers[r] == worker)
