"""Observations of one job by this master process: the transition into its newest generation, its
steps, exits and reports of its processes.

A restarted master starts with nothing, and gets the reports again. Only
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
    """Transition into the newest generation: when each phase ended, and its result."""

    evidence_at: float
    declared_at: float
    pushed_at: float
    #: Seconds before it without enough nodes for a plan.
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
    #: Workers that have left the previous generation; those that have joined the rendezvous, with
    #: the agreed committed step; and those that hold its layers.
    answered: set[WorkerId] = field(default_factory=set)
    joined: dict[WorkerId, int] = field(default_factory=dict)
    entered: set[WorkerId] = field(default_factory=set)

    def stats(self, end: float, unanswered: tuple[WorkerId, ...] = ()) -> ReconfigurationStats:
        """Return the phases up to `end`. Phases without a report count as 0 s, except the one under
        way."""
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
            # Reports of different nodes may arrive out of order, or after the end.
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

    #: Times of the first evidence and of the last declaration.
    evidence_at: float
    declared_at: float


@dataclass(slots=True, kw_only=True)
class StepsSeen:
    """Progress of training, from step records and statuses."""

    #: Newest step with a confirmed record, whose line may wait for earlier ones.
    committed_step: int = 0
    #: Newest line of metrics.jsonl.
    recorded_step: int = 0
    #: Last records of consecutive steps, up to `committed_step`.
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_RECORDS))
    #: Last record of the previous generations; None: not known.
    last_before: StepRecord | None = None
    #: Arrival of the last record, and of the last change of `furthest_step`.
    recorded_at: float | None = None
    advanced_at: float | None = None
    #: Later records have arrived and wait for those of earlier steps.
    records_wait: bool = False
    #: Newest evaluation.
    evaluation: EvaluationRecord | None = None
    #: Newest committed step by a record, or by the statuses of two nodes (of one in a plan of one
    #: node).
    furthest_step: int = 0
    #: Newest generation with a committed step, by the same reports. Records may arrive much later,
    #: so `CurrentPlan.stepped` may lag behind it.
    furthest_in: Generation = _NO_GENERATION
    #: By node: a step beyond `furthest_step` that its status alone reports, and the newest
    #: generation in which its worker has committed a step.
    claimed: dict[NodeName, tuple[int, Generation]] = field(default_factory=dict)
    #: Repeated steps: their generation, and the first and last step committed in it by statuses.
    redone: tuple[Generation, int, int] | None = None


@dataclass(slots=True, kw_only=True)
class SinceStep:
    """Failures since the last step; cleared by the next step's record."""

    #: Number of generations given up for lack of progress.
    stalls: int = 0
    #: Number of plans that answered no loss of a node, and when the first of them was made.
    regroups: int = 0
    fruitless_since: float | None = None
    #: Exits of the processes of each worker of the plan.
    deaths: dict[WorkerId, list[WorkerExited]] = field(default_factory=dict)
    #: Reports of workers that blame something else than the job.
    complaints: dict[WorkerId, str] = field(default_factory=dict)
    #: Nodes that had trained and were given up, with the reason.
    given_up: dict[NodeName, str] = field(default_factory=dict)
    #: Pairs of nodes (sorted), one of which has reported that it does not reach the other, by the
    #: host of their rendezvous.
    no_way: dict[NodeName, set[tuple[NodeName, NodeName]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    """Layers that a process has received on the way into a generation."""

    generation: Generation
    layers: frozenset[int]


@dataclass(slots=True, kw_only=True)
class ProcessesSeen:
    """Observations of the job's processes."""

    #: Exits; and processes that their agents are about to kill, since they hang.
    exits: dict[Incarnation, WorkerExited] = field(default_factory=dict)
    hung: dict[Incarnation, Hung] = field(default_factory=dict)
    #: Generations that each has entered, among those in `Lineage.plans`.
    entered: dict[Incarnation, frozenset[Generation]] = field(default_factory=dict)
    #: Layers that each has received for the newest such generation.
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
    """Workers' reports on what is at fault: the job or a node."""

    #: Times and texts of the newest reports that blame the job, by the workers' node.
    accused: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Times and texts of reports that blame a node, from workers of a plan; kept when the node is
    #: left out.
    ailing: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Nodes whose processes took part in no step while others did: the reason why they cannot, and
    #: the ends of processes that were in a plan.
    unfit: dict[NodeName, str] = field(default_factory=dict)
    stillborn: dict[NodeName, list[WorkerExited]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class JobSeen:
    """Observations of a job in this master's life."""

    #: Start of this master process, or of the job if that is later; and the Unix time of the
    #: former.
    since: float = 0.0
    since_unix: float = 0.0
    #: Unix time minus this process's clock.
    clock: float = 0.0
    #: True if this master found the job in its journal and has made no plan for it: agents may have
    #: a newer plan than the journal.
    inherited: bool = False
    #: Reason why ready nodes are not in the plan; empty: there are none, or they will be in it.
    why_idle: str = ""
    #: When it began to wait for nodes; None: it does not wait.
    waiting_since: float | None = None
    #: Times of all workers in `Job.stand_bys`, and of some that were in it.
    stand_by_times: dict[WorkerId, StandByTimes] = field(default_factory=dict)
    #: Time from which the newest plan's processes have time to start.
    planned_at: float | None = None
    #: When the newest generation last made progress: in the transition, in steps or towards its
    #: end.
    progressed_at: float | None = None
    #: None: no plan that this master process made is in transition.
    timeline: RecoveryTimeline | None = None
    #: None: no loss waits for a plan, except in a job that was put back.
    loss: LossSeen | None = None
    #: First report of a lost peer by each worker, since the last plan that was not for a step
    #: boundary.
    peers_lost: dict[WorkerId, tuple[float, PeerLost]] = field(default_factory=dict)
    #: Number of reports of lost peers, by the reporting node, that later steps refuted.
    untrue: Counter[NodeName] = field(default_factory=Counter)
    #: Workers' reports on checkpoints that await their event.
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
        """Time at which the job began to wait for nodes, by this master's clock."""
        return self.since if self.waiting_since is None else self.waiting_since

    def is_gone(self, process: Incarnation) -> bool:
        """Return whether the process has ended, or hangs and is about to be ended."""
        return process in self.processes.exits or process in self.processes.hung
