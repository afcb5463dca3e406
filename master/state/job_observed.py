"""Observations of one job by this master process: the transition into its newest generation, its
steps, exits and reports of its processes.

A restarted master begins with none of it, and gets the reports again. Only
`oobleck.master.state.reducer.apply` and its callees change it. Must not know the decisions based on
it.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from oobleck.core.ids import Generation, Incarnation, NodeName, WorkerId
from oobleck.core.messages import (
    CheckpointSaved,
    EvaluationRecord,
    LinkMeasured,
    Measured,
    PeerLost,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.core.profile import Scope
from oobleck.master.events.jobs import Evidence, Phase, ReconfigurationStats
from oobleck.master.state.pace import PaceSeen, StandByTimes
from oobleck.proto.types import Hung, WorkerExited

#: Workers' reports on checkpoints.
SaveReport = CheckpointSaved | SaveFailed | Restored
#: Step records that rates are computed from.
RECENT_RECORDS = 10


_NO_GENERATION = Generation(0)


@dataclass(slots=True, kw_only=True)
class RecoveryTimeline:
    """Recovery into the newest generation: when each phase ended, and its result."""

    evidence_at: float
    declared_at: float
    pushed_at: float
    #: Seconds before in which no plan was possible for lack of nodes.
    waited_s: float = 0.0
    aborted_at: float | None = None
    joined_at: float | None = None
    transferred_at: float | None = None
    first_step_at: float | None = None
    committed_step: int | None = None
    redo: bool = False
    rolled_forward: bool = False
    received_bytes: int = 0
    fed_bytes: int = 0
    salvaged_microbatches: int = 0
    #: Workers that have left the previous generation, that have joined the rendezvous (with the
    #: agreed committed step), and that hold its layers.
    answered: set[WorkerId] = field(default_factory=set)
    joined: dict[WorkerId, int] = field(default_factory=dict)
    entered: set[WorkerId] = field(default_factory=set)

    def stats(self, end: float, unanswered: tuple[WorkerId, ...] = ()) -> ReconfigurationStats:
        """Return the phases up to `end`; unreported ones took no time, except the one under way."""
        waited_from = self.pushed_at - self.waited_s
        began_at = min(self.evidence_at, waited_from)
        end = max(end, began_at)
        marks: dict[Phase, float | None] = {
            "detect": min(self.declared_at, waited_from),
            "plan": waited_from,
            "waiting": self.pushed_at,
            "abort": self.aborted_at,
            "rendezvous": self.joined_at,
            "transfer": self.transferred_at,
            "first_step": end,
        }
        if self.first_step_at is None:
            marks[self._under_way()] = end
        phases: dict[str, float] = {}
        before = began_at
        for phase, at in marks.items():
            # Reports of different nodes may arrive out of order, and none counts after the end.
            at = before if at is None else min(max(at, before), end)
            phases[phase] = at - before
            before = at
        redo_step = None
        if self.redo and self.committed_step is not None:
            redo_step = self.committed_step + 1
        return ReconfigurationStats(
            phases=phases,
            total_s=end - began_at,
            redo_step=redo_step,
            rolled_forward=self.rolled_forward,
            received_bytes=self.received_bytes,
            fed_bytes=self.fed_bytes,
            salvaged_microbatches=self.salvaged_microbatches,
            unanswered=unanswered,
            master_restarted=False,
        )

    def _under_way(self) -> Phase:
        if self.transferred_at is not None:
            return "first_step"
        if self.joined_at is not None:
            return "transfer"
        return "abort" if self.aborted_at is None else "rendezvous"


@dataclass(frozen=True, slots=True)
class LossSeen:
    """Times of the losses that no plan has answered yet."""

    #: First evidence and last declaration.
    evidence_at: float
    declared_at: float


@dataclass(slots=True, kw_only=True)
class StepsSeen:
    """Progress of training, from step records and statuses."""

    #: Newest step with a confirmed record. Its line may wait for those of earlier steps.
    committed_step: int = 0
    #: Newest line of metrics.jsonl.
    recorded_step: int = 0
    #: Last records, of consecutive steps, the newest of them that of `committed_step`.
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_RECORDS))
    #: Last record of a generation before the newest one's; None: not known.
    last_before: StepRecord | None = None
    #: Arrival of the last record, and of the news of `furthest_step`.
    recorded_at: float | None = None
    advanced_at: float | None = None
    #: Later records have arrived and wait for those of earlier steps.
    records_wait: bool = False
    #: Newest evaluation.
    evaluation: EvaluationRecord | None = None
    #: Last committed step by a record, or by two nodes' statuses (one in a plan with one node).
    furthest_step: int = 0
    #: Newest generation in which one of these was committed, by the same reports. Its records may
    #: arrive long after it, so `CurrentPlan.stepped` may lag.
    furthest_in: Generation = _NO_GENERATION
    #: By node, a later step that its status reports, and the newest generation in which its worker
    #: has committed one.
    claimed: dict[NodeName, tuple[int, Generation]] = field(default_factory=dict)
    #: Steps that are done again: their generation, and the first and last committed one in a
    #: status.
    redone: tuple[Generation, int, int] | None = None


@dataclass(slots=True, kw_only=True)
class SinceStep:
    """Obstacles since the last step; forgotten with the next step's record."""

    #: Number of generations given up for lack of progress.
    stalls: int = 0
    #: Plans without a loss of a node, and when the first of them was made.
    regroups: int = 0
    fruitless_since: float | None = None
    #: Exits of the processes of each worker of the plan.
    deaths: dict[WorkerId, list[WorkerExited]] = field(default_factory=dict)
    #: Each worker's report that the fault is not the job's.
    complaints: dict[WorkerId, str] = field(default_factory=dict)
    #: Nodes that have trained, and why they were given up.
    given_up: dict[NodeName, str] = field(default_factory=dict)
    #: By the host of their rendezvous: pairs of nodes, in the order of their names. One of each
    #: pair has reported that it does not reach the other.
    no_way: dict[NodeName, set[tuple[NodeName, NodeName]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    generation: Generation
    layers: frozenset[int]


@dataclass(slots=True, kw_only=True)
class ProcessesSeen:
    #: Their exits; and those that their agents have given up on, since they hang.
    exits: dict[Incarnation, WorkerExited] = field(default_factory=dict)
    hung: dict[Incarnation, Hung] = field(default_factory=dict)
    #: Generations that each has entered, of those whose plans are kept (`Lineage.plans`).
    entered: dict[Incarnation, frozenset[Generation]] = field(default_factory=dict)
    #: Layers that each has received on the way into the newest such generation.
    received: dict[Incarnation, Received] = field(default_factory=dict)
    #: Generation in which each has finished.
    finished: dict[Incarnation, Generation] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ProfilingSeen:
    """Results of the newest attempt at measuring."""

    #: Start of the attempt.
    measuring_since: float | None = None
    measured: dict[Incarnation, Measured] = field(default_factory=dict)
    links_measured: dict[Scope, LinkMeasured] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FaultsSeen:
    """Workers' reports on the fault: the job's or nodes'."""

    #: Newest reports that the job is at fault, by the workers' node, and their times.
    accused: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Reports that a node is at fault, from workers that count, and their times; kept when the node
    #: is left out.
    ailing: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Nodes of processes that have had no part in a step while others have. First why they cannot
    #: have one, then the ends of those that a plan counted on.
    unfit: dict[NodeName, str] = field(default_factory=dict)
    stillborn: dict[NodeName, list[WorkerExited]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class JobSeen:
    """Observations of a job in this master's life."""

    #: Start of this master's life, or of the job; and the Unix time of the former.
    since: float = 0.0
    since_unix: float = 0.0
    #: Unix time less this process's clock.
    clock: float = 0.0
    #: This master found the job in its journal and has made no plan of it. Agents may have a newer
    #: one than the journal.
    inherited: bool = False
    #: Reason why ready nodes have no part in the plan; empty: there are none, or they will have a
    #: part.
    why_idle: str = ""
    #: When it began to wait for nodes, if it waits.
    waiting_since: float | None = None
    #: Times of all workers in `Job.stand_bys`, and of some that were there.
    stand_by_times: dict[WorkerId, StandByTimes] = field(default_factory=dict)
    #: When the newest plan's processes began to have time to start.
    planned_at: float | None = None
    #: When the newest generation last made progress, on its way, in its steps or to its end.
    progressed_at: float | None = None
    #: None: no plan of this master's life is on its way to its first step.
    timeline: RecoveryTimeline | None = None
    #: None: all losses are answered, except those of a job that was put back.
    loss: LossSeen | None = None
    #: First report of a lost peer by each worker since the last plan that was not at a boundary.
    peers_lost: dict[WorkerId, tuple[float, PeerLost]] = field(default_factory=dict)
    #: Number of reports of lost peers by a node's workers that later steps refuted.
    untrue: Counter[NodeName] = field(default_factory=Counter)
    #: Workers' reports on checkpoints that no event was made of yet.
    save_reports: tuple[SaveReport, ...] = ()
    #: Evidence of failures, and its time, that no event has carried yet.
    evidence: list[tuple[float, Evidence]] = field(default_factory=list)
    steps: StepsSeen = field(default_factory=StepsSeen)
    since_step: SinceStep = field(default_factory=SinceStep)
    processes: ProcessesSeen = field(default_factory=ProcessesSeen)
    profiling: ProfilingSeen = field(default_factory=ProfilingSeen)
    faults: FaultsSeen = field(default_factory=FaultsSeen)
    pace: PaceSeen = field(default_factory=PaceSeen)

    def unix(self, now: float) -> float:
        """Return the Unix time at `now` by this process's clock."""
        return self.clock + now

    @property
    def waits_since(self) -> float:
        """Time at which the job began to wait for nodes, in this master's life."""
        return self.since if self.waiting_since is None else self.waiting_since

    def is_gone(self, process: Incarnation) -> bool:
        """Return whether the process has ended, or hangs and is about to be ended."""
        return process in self.processes.exits or process in self.processes.hung
