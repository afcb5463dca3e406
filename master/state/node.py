"""State of one node: its facts, its desired state, and whether it may get work.

Everything under `seen` is observed and lives as long as this master process; all else follows from
journaled events. Only `oobleck.master.state.reducer.apply` and its callees change it. Must not know
of jobs other than by name.
"""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId
from oobleck.core.job.spec import JobSpec
from oobleck.host.versions import series
from oobleck.planner.profile.machine import why_no_float8
from oobleck.proto.types import Assignment, NodeFacts, NodeStatus


class Build(NamedTuple):
    """Versions that workers of one job must share; an empty one may be any."""

    #: Series of torch.
    torch: str = ""
    engine: str = ""

    def has(self, wanted: "Build") -> bool:
        return wanted.torch in ("", self.torch) and wanted.engine in ("", self.engine)


@dataclass(slots=True, kw_only=True)
class NodeSeen:
    """Observations of a node in this master's life."""

    #: Last sign of life, or the start of this master; postponed while the master is late.
    last_heard: float
    #: Last actual sign of life; None: none in this master's life.
    heard_at: float | None = None
    #: True if not heard since this master's start or pause, so that its lease is longer.
    awaited: bool = False
    #: End of the last pause of this master in which agents may have ended their streams.
    resumed_at: float | None = None
    #: None: no stream.
    session: int | None = None
    #: Another agent that wants the node's name, and since when.
    rival: tuple[Incarnation, float] | None = None
    #: End of its last stream; None: one is open, or there was none.
    closed_at: float | None = None
    #: Start of its newest stream, and end of the last ended one; None: never.
    opened_at: float | None = None
    cut_at: float | None = None
    #: Last sign of life before its newest stream began.
    heard_before: float | None = None
    status: NodeStatus = field(default_factory=NodeStatus)
    #: When its newest process was up, and the seconds of its start. For processes that were up
    #: before this master saw them: time 0, and the slowest start. Zeros: no process.
    started: tuple[float, float] = (0.0, 0.0)
    #: When it could begin to start workers for the active job, and when these were ready.
    assigned_at: float | None = None
    ready_at: float | None = None
    #: End of its quarantine, by this master's clock.
    release_at: float | None = None
    #: Time of its loss, by this master's clock.
    lost_at: float | None = None
    #: Plan that its agent named at the start of its newest session, if the journal may lack it
    #: (`ClusterState.lacks`). Nodes that name the same plan share one `Assign`.
    running: Assignment | None = None

    def hear(self, now: float) -> None:
        self.last_heard = self.heard_at = max(self.last_heard, now)
        self.awaited = False


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of a node, as references to job and generation; `version` grows with every
    change."""

    version: int = 0
    job_id: JobId | None = None
    #: None: get workers ready and wait.
    generation: Generation | None = None
    #: Without a generation: number of the attempt at measuring to make; 0: none.
    attempt: int = 0
    #: True if its workers stand by and measure themselves regularly.
    alone: bool = False
    #: Number of the newest request for a checkpoint.
    save: int = 0
    #: True if it is drained, so that its agent may end.
    drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Order to move the work off a node."""

    #: Who ordered it. An order by the agent, or for a sick GPU, ends with the agent.
    by: Literal["operator", "agent", "sickness", "quarantine"]
    reason: str
    force: bool
    #: Why a job cannot continue without the node; empty: it can, as far as is known.
    kept: str = ""
    #: Number of the request for a checkpoint that a forced drain waits for; 0: none.
    save: int = 0
    #: True if no work is left on it.
    done: bool = False
    #: End of a quarantine: at this Unix time, or when the node starts workers again.
    until: float = 0.0
    until_ready: bool = False


#: Failures within this time of each other count together.
WINDOW_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Failures of one node, over all starts of its agent."""

    #: Unix times of the last failures that were close together.
    times: tuple[float, ...] = ()
    last: str = ""
    #: Number of consecutive quarantines, and the end of the newest (Unix time).
    quarantines: int = 0
    quarantined_until: float = 0.0

    def recent(self, unix: float) -> int:
        """Count the failures less than WINDOW_S ago."""
        return sum(at > unix - WINDOW_S for at in self.times)


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """Job that a node trains and this master does not know, or has in its queue."""

    job_id: JobId
    since: float
    queued: bool = False


@dataclass(slots=True, kw_only=True)
class Node:
    """State of one node."""

    facts: NodeFacts
    #: False: lost.
    registered: bool = True
    #: True if it was lost on purpose: its agent was ordered to end, or an operator had drained it.
    left: bool = False
    #: Why and since when it is lost, and when it was last heard before (Unix times).
    reason: str = ""
    lost_at: float = 0.0
    heard_at: float = 0.0
    #: True if workers from before its loss must end before it gets work.
    stale_workers: bool = False
    #: Job that it trains and this master does not know, and since when (Unix time).
    held: Held | None = None
    #: None: it may get work.
    drain: Drain | None = None
    failures: Failures = Failures()
    #: Troubles of its GPUs that an operator accepts, until its agent ends.
    excused: frozenset[str] = frozenset()
    desired: Desired = field(default_factory=Desired)
    seen: NodeSeen

    @property
    def build(self) -> Build:
        """Engine and torch series of the node; the latter is empty if its agent reports none."""
        versions = self.facts.versions
        return Build(torch=series(versions.torch), engine=versions.engine)

    def refuses(self, job: JobSpec) -> str:
        """Return why the node does not run the job's code, or lacks the job's precision (float8);
        empty: it runs it, as far as is known."""
        policy = self.facts.code
        why = policy.why_not(job.functions, brought=bool(job.code)) if policy else ""
        wants = job.training.precision == "fp8"
        return why or (why_no_float8(self.facts.device_kind) if wants else "")

    def why_not_in(self, job: JobSpec, wanted: Build) -> str:
        """Return why the node cannot take part in the job together with nodes of that build; empty:
        it can."""
        return self._why_not_beside(wanted) or self.refuses(job)

    def _why_not_beside(self, wanted: Build) -> str:
        """Return why the node cannot work together with nodes of that build; empty: it can. Another
        engine does not understand their plan and links, and another torch may compute other
        numbers."""
        own = self.build
        if wanted.engine not in ("", own.engine):
            return (
                f"engine {own.engine}, where the job's other nodes have {wanted.engine}: install "
                "the same release of Oobleck"
            )
        if not wanted.torch or own.torch in ("", wanted.torch):
            return ""
        return (
            f"torch {own.torch}, where the job's other nodes have {wanted.torch}: install the "
            "same, or give the job allow_mixed_versions: true"
        )

    @property
    def is_clear(self) -> bool:
        """True if this master ordered all workers on the node, or there are none."""
        return not self.stale_workers and self.held is None

    @property
    def is_quarantined(self) -> bool:
        return self.drain is not None and self.drain.by == "quarantine"

    @property
    def is_out_as_sick(self) -> bool:
        return self.drain is not None and self.drain.by == "sickness"

    @property
    def troubles(self) -> tuple[str, ...]:
        """Troubles of the connected node's GPUs that are not excused."""
        reported = self.seen.status.troubles if self.connected else ()
        return tuple(trouble for trouble in reported if trouble not in self.excused)

    @property
    def moves_off(self) -> bool:
        """True if the node is to leave, and stays in the plan until its work has moved off it."""
        drain = self.drain
        return drain is not None and not drain.done and self.registered and self.is_clear

    @property
    def connected(self) -> bool:
        return self.registered and self.seen.session is not None
