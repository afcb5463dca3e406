"""State of one job: its request, plans, losses and checkpoints.

All of it follows from journaled events, except the observations under `seen`
(`oobleck.master.state.job_observed`). Only `oobleck.master.state.reducer.apply` and its callees
change it. Questions that also concern nodes are in `oobleck.master.state.cluster`.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import CheckpointSaved, Restored
from oobleck.core.plan import Plan
from oobleck.master.events.jobs import (
    MeasuringStarted,
    PlanMade,
    ProfileChosen,
    RateChanged,
    RecordsLost,
)
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeReset,
    NodeYielded,
    WorkerLost,
)
from oobleck.master.state.incident import Incident, LastIncident, Slowdown
from oobleck.master.state.job_observed import JobSeen, SaveReport
from oobleck.master.state.pace import StandBy, StandByTimes
from oobleck.planner.recovery.answer import Exposure
from oobleck.planner.recovery.course import evens_out
from oobleck.planner.recovery.outlook import BACK_S, REJOIN_S, SALVAGE, SWITCH_S

#: Most remembered reports on checkpoints, by which a repeated one is recognised.
KNOWN_REPORTS = 64
#: Most remembered processes of earlier plans, by which old reports are recognised.
KNOWN_PROCESSES = 10_000
#: Most remembered ranges of lost records.
KNOWN_LOST = 64
#: Most remembered requests of operators, who repeat one within seconds.
KNOWN_REQUESTS = 64
NO_GENERATION = Generation(0)
#: Highest believed generation: no job reaches it, and there is room above it.
MOST_GENERATION = Generation(1 << 40)

JobState = Literal[
    "queued",
    "starting",
    "profiling",
    "running",
    "reconfiguring",
    "waiting for nodes",
    "succeeded",
    "failed",
    "cancelled",
]
#: Events that take away nodes or workers of the newest plan.
DeclaredLoss = NodeLost | WorkerLost | NodeLeftOut | NodeReset | NodeDrained
Loss = DeclaredLoss | NodeYielded
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")


def nodes_of(losses: Iterable[Loss]) -> frozenset[NodeName]:
    return frozenset(loss.node for loss in losses if not isinstance(loss, WorkerLost))


@dataclass(slots=True, kw_only=True)
class Saves:
    """Checkpoints: operators' requests, and their results."""

    #: Number of the newest request, and of the newest answered one.
    requested: int = 0
    answered: int = 0
    #: Unix time of the newest request; 0: there is none.
    requested_at: float = 0.0
    #: Number of each of the last requests, by its id; none above `requested`.
    numbers: dict[str, int] = field(default_factory=dict)
    #: Newest checkpoint; None: none.
    checkpoint: CheckpointSaved | None = None
    #: Unix time of its report; 0: there is none, or a snapshot lacks the time.
    checkpoint_at: float = 0.0
    #: Why the last save failed; empty as soon as there is a newer checkpoint.
    failure: str = ""
    #: Last reports that led to an event, so that a repeated one is recognised.
    known: tuple[SaveReport, ...] = ()


@dataclass(slots=True, kw_only=True)
class Rollback:
    """Return to a checkpoint, and the steps that are done again after it."""

    #: Checkpoint to which the workers' state returned; without a path: the job began anew.
    restored: Restored | None = None
    #: Step at which the job began: not 0 where `restored` was there before its first step.
    resumed_step: int = 0
    #: Last step committed before the return, until it is committed again; 0: none. Only after a
    #: restore, and above its step.
    redo_until: int = 0


@dataclass(slots=True, kw_only=True)
class Lost:
    """Steps whose records are lost, which metrics.jsonl lacks."""

    #: Number of these steps.
    steps: int = 0
    #: Last ranges of them, in order.
    last: tuple[RecordsLost, ...] = ()


@dataclass(slots=True, kw_only=True)
class Profiling:
    """Profiling of a job: attempts at measuring, and the profile chosen."""

    #: Attempt at measuring; all and only jobs that are `profiling` have one.
    under_way: MeasuringStarted | None = None
    #: Number of attempts, and of the one under way.
    attempts: int = 0
    #: Profile that plans are made by; None: not chosen yet, or the job wants the estimate.
    chosen: ProfileChosen | None = None


@dataclass(slots=True, kw_only=True)
class Lineage:
    """Earlier plans, as far as they still matter."""

    #: Plan of the generation before the newest one.
    before: Plan | None = None
    #: Plans whose layers live workers may hold: the newest with a committed step, and all later
    #: ones up to the newest. Empty once the job has ended.
    plans: dict[Generation, Plan] = field(default_factory=dict)
    #: Nodes whose workers of `plans` have certainly ended: their agent was restarted, or ended as
    #: ordered, or their drain was forced.
    emptied: set[NodeName] = field(default_factory=set)
    #: Processes of earlier plans that are not in the newest one, oldest first; and whether each was
    #: rank 0 of its plan (None: not known).
    replaced: dict[Incarnation, bool | None] = field(default_factory=dict)
    #: For an ended job, the nodes of `before` and `plans`, which are dropped: their agents may
    #: still have records.
    had_part: frozenset[NodeName] = frozenset()
    #: Largest number of nodes of any plan; templates are made for as many.
    most_nodes: int = 0
    #: Number of plans after the first.
    reconfigurations: int = 0
    #: Factor on the expected times of transfers (`oobleck.planner.recovery.outlook.corrected`).
    transfers: float = 1.0
    #: Seconds that returns to a checkpoint take, as far as seen.
    back_s: float = BACK_S
    #: Seconds that changes take beside moving state, forced ones and those at a step boundary, and
    #: the share of a broken step that is kept, as far as seen.
    rejoin_s: float = REJOIN_S
    switch_s: float = SWITCH_S
    salvage: float = SALVAGE
    #: Versions that differ among nodes of any plan, as far as reported.
    mixed: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class CurrentPlan:
    """Newest plan, the plan last trained in, and losses that no plan has answered yet."""

    #: Newest plan and its Unix time; None: none yet.
    made: PlanMade | None = None
    made_at: float = 0.0
    #: Plan of templates, or recut, that it was made from; None: it is one itself, maybe with more
    #: shadows.
    base: Plan | None = None
    #: Seconds without a possible plan before it.
    waited_s: float = 0.0
    #: Newest plan with a committed step: `made`, or one before it.
    trained: PlanMade | None = None
    #: `base` of that plan.
    trained_base: Plan | None = None
    #: Newest generation of a plan that was not for a step boundary.
    abrupt: Generation = NO_GENERATION
    #: Losses of the newest plan's nodes and workers that no plan has answered yet.
    losses: tuple[Loss, ...] = ()
    #: Cache of `processes`, and the plan that it is for: each report needs them.
    _processes: dict[WorkerId, Incarnation] = field(default_factory=dict, repr=False, compare=False)
    _of_processes: PlanMade | None = field(default=None, repr=False, compare=False)
    #: Cache of `members`, which also change with losses.
    _members: dict[NodeName, None] = field(default_factory=dict, repr=False, compare=False)
    _of_members: tuple[PlanMade | None, tuple[Loss, ...]] = field(
        default=(None, ()), repr=False, compare=False
    )

    @property
    def generation(self) -> Generation:
        return self.made.plan.generation if self.made else NO_GENERATION

    @property
    def stepped(self) -> Generation:
        """Newest generation with a committed step; 0: none."""
        return self.trained.plan.generation if self.trained else NO_GENERATION

    @property
    def on_the_way(self) -> bool:
        """True while the newest generation has no committed step."""
        return self.stepped < self.generation

    @property
    def can_lose(self) -> int:
        """Number of nodes, whichever they are, that can be lost now without losing a layer.

        Until a step of the newest plan is committed, only what is left of the plan trained before
        is certainly held, unless a checkpoint is being loaded. A node with a new process counts as
        holding nothing.
        """
        made, before = self.made, self.trained
        if made is None or self.losses:
            return 0
        if before is None or made.restore or not self.on_the_way:
            return made.can_lose
        held = {*made.incarnations, *made.leaving_incarnations}
        processes = zip(before.plan.workers, before.incarnations, strict=True)
        gone = {worker.node for worker, process in processes if process not in held}
        if not gone:
            return before.can_lose
        left = Exposure.of(before.plan, set(before.plan.nodes) - gone)
        return max(0, left.can_lose)

    @property
    def lost_nodes(self) -> frozenset[NodeName]:
        """Nodes that the newest plan has lost: gone, or connected and left out."""
        return nodes_of(self.losses)

    @property
    def members(self) -> tuple[NodeName, ...]:
        """Nodes of the newest plan, without those lost since, sorted."""
        return tuple(self._member_names())

    def has_member(self, node: NodeName) -> bool:
        return node in self._member_names()

    def _member_names(self) -> dict[NodeName, None]:
        if self.made is None:
            return {}
        if self.made is not self._of_members[0] or self.losses is not self._of_members[1]:
            self._of_members = self.made, self.losses
            lost = self.lost_nodes
            here = (node for node in self.made.plan.nodes if node not in lost)
            self._members = dict.fromkeys(here)
        return self._members

    @property
    def leaving(self) -> tuple[NodeName, ...]:
        """Nodes that the newest plan takes out, until it has committed a step."""
        if self.made is None or not self.on_the_way:
            return ()
        nodes = {worker.node for worker in self.made.leaving}
        return tuple(sorted(nodes - self.lost_nodes))

    @property
    def put_back(self) -> bool:
        """True if another job was active since the newest plan was made: none of its workers is
        left."""
        return any(isinstance(loss, NodeYielded) for loss in self.losses)

    @property
    def lost_workers(self) -> frozenset[WorkerId]:
        return frozenset(loss.worker for loss in self.losses if isinstance(loss, WorkerLost))

    def counts_on(self, process: Incarnation) -> bool:
        """Return whether the end of the process counts as a loss to the job: any process before the
        first plan, later only one that has trained. A joining process that ends is left out with
        its node."""
        if self.made is None:
            return True
        trained = self.trained is None or process in self.trained.incarnations
        return trained and process in self.made.incarnations

    def goes_back(self, process: Incarnation) -> bool:
        """Return whether the newest plan has the process restore a checkpoint. All its processes do
        then, so an error may affect them all."""
        made = self.made
        return made is not None and made.restore and process in made.incarnations

    @property
    def newcomers(self) -> tuple[NodeName, ...]:
        """Members that had no part in the last step."""
        if self.trained is None:
            return ()
        before = frozenset(self.trained.plan.nodes)
        return tuple(node for node in self.members if node not in before)

    def processes(self) -> Mapping[WorkerId, Incarnation]:
        """Return the processes that the newest plan counts on, by rank."""
        if self.made is None:
            return {}
        if self.made is not self._of_processes:
            self._of_processes = self.made
            self._processes = dict(zip(self.made.plan.workers, self.made.incarnations, strict=True))
        return self._processes

    def leaving_processes(self) -> dict[WorkerId, Incarnation]:
        """Return the processes that the newest plan takes out, until it has committed a step."""
        if self.made is None or not self.on_the_way:
            return {}
        return dict(zip(self.made.leaving, self.made.leaving_incarnations, strict=True))


@dataclass(slots=True, kw_only=True)
class Job:
    """State of one job: journaled facts in groups, and observations under `seen`."""

    id: JobId
    request_id: str
    spec: JobSpec
    #: It ends as soon as its profile is measured.
    profile_only: bool = False
    state: JobState = "queued"
    #: Why it is in that state, where that is not obvious.
    reason: str = ""
    cancel_requested: bool = False
    #: Number of the event that submitted or adopted it.
    submitted_in: int = 0
    #: Newest generation of another master's job at its adoption; None: it was submitted here.
    adopted_in: Generation | None = None
    #: True if it could not start, and waits until a job after it has ended.
    passed_over: bool = False
    #: Unix times; 0: not yet. All and only ended jobs have the last one.
    submitted_at: float
    started_at: float = 0.0
    finished_at: float = 0.0
    #: Unix time at which it began to wait for nodes; 0: it does not wait.
    waiting_since: float = 0.0
    #: Newest plan and its losses.
    current: CurrentPlan = field(default_factory=CurrentPlan)
    #: Nodes that cannot take part, and why; none is a member unless the job has ended.
    left_out: dict[NodeName, str] = field(default_factory=dict)
    #: Last report of each worker that computes more slowly than the others.
    slow: dict[WorkerId, RateChanged] = field(default_factory=dict)
    #: Last stand-by of workers that are or were slow, unless the newest plan has another process in
    #: their slot.
    stand_bys: dict[WorkerId, StandBy] = field(default_factory=dict)
    #: Open incident; None: none.
    incident: Incident | None = None
    #: Slowdown of all and only `slow` workers, and of some that were; None: no worker is slow.
    slowdown: Slowdown | None = None
    #: Number of incidents and slowdowns together, open ones included.
    incidents: int = 0
    #: The closed incident or slowdown that began last.
    last_incident: LastIncident | None = None
    #: Unix time at which the journal was last found incomplete; 0: never in the job's life.
    journal_cut_at: float = 0.0
    profiling: Profiling = field(default_factory=Profiling)
    lineage: Lineage = field(default_factory=Lineage)
    saves: Saves = field(default_factory=Saves)
    rollback: Rollback = field(default_factory=Rollback)
    lost: Lost = field(default_factory=Lost)
    #: Last changes of `state`, for the report of an invalid one.
    history: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    seen: JobSeen = field(default_factory=JobSeen)

    @property
    def newest_known(self) -> Generation:
        """Newest generation of all plans, also of those that only agents have reported."""
        return max(self.current.generation, *self.lineage.plans, NO_GENERATION)

    @property
    def unentered(self) -> bool:
        """True if the newest plan is for a step boundary and no worker is known to have entered it.
        Workers then hold the layers of the plan in `trained`, which they keep until a step of the
        newest plan is committed, even if some have entered it unreported."""
        current = self.current
        return (
            current.made is not None
            and current.made.boundary
            and current.on_the_way
            and current.abrupt <= current.stepped > NO_GENERATION
            and not current.put_back
            and not any(
                current.generation in generations
                for generations in self.seen.processes.entered.values()
            )
        )

    @property
    def astray(self) -> bool:
        """True if agents reported a newer plan than the job's own."""
        return self.newest_known > self.current.generation

    @property
    def has_checkpoint(self) -> bool:
        """True if a checkpoint is known to which the job can return."""
        begun_with = self.rollback.restored is not None and self.rollback.restored.path != ""
        return self.saves.checkpoint is not None or begun_with

    @property
    def may_have_checkpoint(self) -> bool:
        """True if workers may have saved a checkpoint that nobody reported: this master was away,
        and the workers that saved it may have ended. The next plan then looks for one."""
        made = self.current.made
        looks = made is not None and made.restore and self.current.on_the_way
        return self.spec.checkpoint is not None and (self.seen.inherited or looks)

    def is_replaced(self, worker: WorkerId, process: Incarnation) -> bool:
        """Return whether the newest plan has another process in the worker's place."""
        return process in self.lineage.replaced and worker in self.current.processes()

    @property
    def rates(self) -> Mapping[WorkerId, float]:
        """Rates of slow workers, relative to the others' pace."""
        return {worker: change.rate for worker, change in self.slow.items()}

    @property
    def standing_by(self) -> frozenset[NodeName]:
        """Nodes without a part in the newest plan that have a slow worker."""
        if not evens_out(self.spec.recovery.policy):
            return frozenset()
        return frozenset(w.node for w in self.slow if not self.current.has_member(w.node))

    def set_stand_bys(self, stand_bys: Mapping[WorkerId, StandBy], now: float, unix: float) -> None:
        """Set the stand-by records, and the times of those that are new to this master."""
        before, times = self.stand_bys, self.seen.stand_by_times
        for worker, one in stand_bys.items():
            if worker not in times or before.get(worker) is not one:
                times[worker] = StandByTimes.of(one, now, unix)
        self.stand_bys = dict(stand_bys)

    @property
    def committed_step(self) -> int:
        """Newest step that the workers have committed, with or without its record."""
        if self.state == "succeeded" and not self.profile_only:
            return self.spec.training.steps
        return max(self.seen.steps.committed_step, self.seen.steps.furthest_step)

    @property
    def redone_until(self) -> int:
        """`redo_until`, or the newest recorded step if agents reported it later."""
        until = self.rollback.redo_until
        return max(until, self.seen.steps.committed_step) if until else 0

    def knows(self, report: SaveReport) -> bool:
        """Return whether the report repeats a known one. A restore is known once any worker has
        reported it, or a later generation has committed a step."""
        if isinstance(report, Restored):
            newest = (
                self.rollback.restored.generation
                if self.rollback.restored is not None
                else NO_GENERATION
            )
            return report.generation <= newest or report.generation < self.current.stepped
        return report in self.saves.known

    def due_report(self) -> SaveReport | None:
        """Return the first report on checkpoints whose event is due. A save waits for the report
        that its step is committed, which may arrive later."""
        committed = max(self.committed_step, self.rollback.redo_until)
        reports = self.seen.save_reports
        due = (r for r in reports if not isinstance(r, CheckpointSaved) or r.step <= committed)
        return next(due, None)

    def unanswered(self) -> tuple[WorkerId, ...]:
        """Return the workers that have not left the generation before the newest one; empty for a
        plan at a step boundary, and where this master has not watched since the plan."""
        timeline = self.seen.timeline
        if (
            self.current.made is None
            or self.current.made.boundary
            or timeline is None
            or timeline.first_step_at is not None
        ):
            return ()
        left = timeline.answered.union(self.current.made.starting)
        return tuple(worker for worker in self.current.made.plan.workers if worker not in left)

    def has_finished(self, process: Incarnation) -> bool:
        """Return whether the process has saved its share of the output under the newest plan."""
        return self.seen.processes.finished.get(process) == self.current.generation

    def all_finished(self) -> bool:
        processes = self.current.processes()
        return bool(processes) and all(map(self.has_finished, processes.values()))
