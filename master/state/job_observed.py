"""Observations of one job by this master process: the transition into its newest generation, its
steps, exits and reports of its processes.

A restarted master begins with none of it and is told again. Only
`oobleck.master.state.reducer.apply` and what it calls change it. Must not know what is decided by
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
from oobleck.master.events.jobs import Phase, ReconfigurationStats
from oobleck.master.events.nodes import Evidence
from oobleck.master.state.pace import PaceSeen, StandByTimes
from oobleck.proto.types import Hung, WorkerExited

#: What workers say of checkpoints.
SaveReport = CheckpointSaved | SaveFailed | Restored
#: Step records that rates are taken from.
RECENT_RECORDS = 10


_NO_GENERATION = Generation(0)


@dataclass(slots=True, kw_only=True)
class RecoveryTimeline:
    """Observed on the way into the newest generation: when each phase ended, and how."""

    evidence_at: float
    declared_at: float
    pushed_at: float
    #: So long before no plan was possible for want of nodes.
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
    #: Who has left the generation before, met the others (and on which committed step they have
    #: agreed), and come to hold its layers.
    answered: set[WorkerId] = field(default_factory=set)
    joined: dict[WorkerId, int] = field(default_factory=dict)
    entered: set[WorkerId] = field(default_factory=set)

    def stats(self, end: float, unanswered: tuple[WorkerId, ...] = ()) -> ReconfigurationStats:
        """The phases up to `end`; one that was not reported took no time of its own. A way that has
        not come to its first step has stayed in the phase after the last one that was reported."""
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
            # Reports of different nodes overtake each other, and none counts after the end.
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

    #: The newest recorded step.
    committed_step: int = 0
    #: The last records, the newest of them that of `committed_step`.
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_RECORDS))
    #: The last record of a generation before the newest one's; None: not known.
    last_before: StepRecord | None = None
    #: When the last record came.
    recorded_at: float | None = None
    #: Others have come and wait for those of steps before.
    records_wait: bool = False
    #: The newest evaluation.
    evaluation: EvaluationRecord | None = None
    #: The last committed step that a record has told of, or two nodes' statuses have (of a plan
    #: with one node, that one's).
    furthest_step: int = 0
    #: The newest generation in which one of these was committed, by the same word. Its records may
    #: come long after it, so `CurrentPlan.stepped` may not tell.
    furthest_in: Generation = _NO_GENERATION
    #: By node, a later one that its status has told of, and the newest generation that its worker
    #: has committed one in.
    claimed: dict[NodeName, tuple[int, Generation]] = field(default_factory=dict)
    #: Of steps that are done again: their generation, the first and the last committed one that a
    #: status told of.
    redone: tuple[Generation, int, int] | None = None


@dataclass(slots=True, kw_only=True)
class SinceStep:
    """Obstacles since the last step; forgotten with the next step's record."""

    #: How often a generation was given up on because it did not get on.
    stalls: int = 0
    #: Plans without a loss of a node, and when the first of them was made.
    regroups: int = 0
    fruitless_since: float | None = None
    #: How processes of each worker of the plan ended.
    deaths: dict[WorkerId, list[WorkerExited]] = field(default_factory=dict)
    #: Each worker's word that something else than the job is at fault.
    complaints: dict[WorkerId, str] = field(default_factory=dict)
    #: Nodes that have trained, and why they were given up.
    given_up: dict[NodeName, str] = field(default_factory=dict)
    #: By the node that they met at: pairs of nodes, in the order of their names, of which
    #: one has reported that there is no way to the other.
    no_way: dict[NodeName, set[tuple[NodeName, NodeName]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Received:
    generation: Generation
    layers: frozenset[int]


@dataclass(slots=True, kw_only=True)
class ProcessesSeen:
    #: How they ended; and those that their agents have given up on, since they hang.
    exits: dict[Incarnation, WorkerExited] = field(default_factory=dict)
    hung: dict[Incarnation, Hung] = field(default_factory=dict)
    #: Generations that each has entered, of those whose plans are kept (`Lineage.plans`).
    entered: dict[Incarnation, frozenset[Generation]] = field(default_factory=dict)
    #: Layers that each has received on the way into the newest such generation.
    received: dict[Incarnation, Received] = field(default_factory=dict)
    #: Generation that each has finished in.
    finished: dict[Incarnation, Generation] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class ProfilingSeen:
    """Results of the newest attempt at measuring."""

    #: Since when it is under way.
    measuring_since: float | None = None
    measured: dict[Incarnation, Measured] = field(default_factory=dict)
    links_measured: dict[Scope, LinkMeasured] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class FaultsSeen:
    """Reports by workers of what is at fault: the job or nodes."""

    #: The job itself, by the newest word of workers on these nodes, and when that was told.
    accused: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Nodes of workers that count, and when that was told; kept when the node is left out.
    ailing: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Nodes of processes that have had no part in a step while others have: why they cannot have
    #: one, and the ends of those that a plan counted on.
    unfit: dict[NodeName, str] = field(default_factory=dict)
    stillborn: dict[NodeName, list[WorkerExited]] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class JobSeen:
    """Observed of a job in this master's life."""

    #: When that began, or the job; and the Unix time of the former.
    since: float = 0.0
    since_unix: float = 0.0
    #: This master found the job in its journal and has made no plan of it: agents may have a newer
    #: one than the journal.
    inherited: bool = False
    #: Since when it waits for nodes, where it does.
    waiting_since: float | None = None
    #: Of all workers in `Job.stand_bys`, and of some that were.
    stand_by_times: dict[WorkerId, StandByTimes] = field(default_factory=dict)
    #: Since when the newest plan's processes have had the time to get up.
    planned_at: float | None = None
    #: When the newest generation last came any further on its way, in its steps or to its end.
    progressed_at: float | None = None
    #: None: no plan of this master's life is on its way to its first step.
    timeline: RecoveryTimeline | None = None
    #: None: all losses but those of a job that was put back are answered.
    loss: LossSeen | None = None
    #: First report of a lost peer by each worker since the last plan that was not at a boundary.
    peers_lost: dict[WorkerId, tuple[float, PeerLost]] = field(default_factory=dict)
    #: How often a node's workers have told of lost peers, and steps have shown that none was.
    untrue: Counter[NodeName] = field(default_factory=Counter)
    #: What workers said of checkpoints and no event was made of yet.
    save_reports: tuple[SaveReport, ...] = ()
    #: What was seen of failures, and when, that no event has carried yet.
    evidence: list[tuple[float, Evidence]] = field(default_factory=list)
    steps: StepsSeen = field(default_factory=StepsSeen)
    since_step: SinceStep = field(default_factory=SinceStep)
    processes: ProcessesSeen = field(default_factory=ProcessesSeen)
    profiling: ProfilingSeen = field(default_factory=ProfilingSeen)
    faults: FaultsSeen = field(default_factory=FaultsSeen)
    pace: PaceSeen = field(default_factory=PaceSeen)

    @property
    def waits_since(self) -> float:
        """Time since when the job waits for nodes, in this master's life."""
        return self.since if self.waiting_since is None else self.waiting_since

    def is_gone(self, process: Incarnation) -> bool:
        """Return whether the process has ended, or hangs and is about to be ended."""
        return process in self.processes.exits or process in self.processes.hung
