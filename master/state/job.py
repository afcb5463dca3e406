"""What the master knows of one job: what was asked for, its plans, losses and checkpoints.

All of it follows from journaled events, except what stands under `seen`
(`oobleck.master.state.job_observed`). Only `oobleck.master.state.apply` and what it calls change
it. What depends on the nodes as well is `oobleck.master.state.cluster`'s.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from oobleck.host.ipc.messages import CheckpointSaved, Restored
from oobleck.master.events.jobs import MeasuringStarted, ProfileChosen
from oobleck.master.events.nodes import (
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeReset,
    NodeYielded,
    WorkerLost,
)
from oobleck.master.events.plans import PlanMade
from oobleck.master.state.incident import Incident, LastIncident
from oobleck.master.state.job_observed import JobSeen, SaveReport
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.plan import Plan

#: So many of the workers' last words on checkpoints are known again when they are repeated.
_KNOWN_REPORTS = 64
#: Processes of earlier plans that are known again when something old is told of them.
KNOWN_PROCESSES = 10_000
#: Operators ask again within seconds: so many of their last requests are known again.
KNOWN_REQUESTS = 64
NO_GENERATION = Generation(0)

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
#: What takes away something that the newest plan counts on.
DeclaredLoss = NodeLost | WorkerLost | NodeLeftOut | NodeReset | NodeDrained
Loss = DeclaredLoss | NodeYielded
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")


def nodes_of(losses: Iterable[Loss]) -> frozenset[NodeName]:
    return frozenset(loss.node for loss in losses if not isinstance(loss, WorkerLost))


@dataclass(slots=True, kw_only=True)
class Job:
    id: JobId
    request_id: str
    spec: JobSpec
    state: JobState = "queued"
    #: Why it is in that state, where that is not plain.
    reason: str = ""
    #: Unix time since when it waits for nodes; 0: it does not. How long the newest plan was waited
    #: for.
    waiting_since: float = 0.0
    waited_s: float = 0.0
    #: Unix times; 0: not yet.
    submitted_at: float
    started_at: float = 0.0
    finished_at: float = 0.0
    cancel_requested: bool = False
    #: It could not start, and waits until a job after it has ended.
    passed_over: bool = False
    #: It ends as soon as its profile is measured.
    profile_only: bool = False
    #: The attempt at measuring that is under way, and how many there have been.
    measuring: MeasuringStarted | None = None
    attempts: int = 0
    #: What its plans are made by; None: not chosen yet, or the job wants the estimate.
    profile: ProfileChosen | None = None
    #: Newest plan; None: none yet.
    made: PlanMade | None = None
    made_at: float = 0.0
    #: Plan of the generation before.
    before: Plan | None = None
    #: Newest plan that a step was committed in; None: none yet.
    trained: PlanMade | None = None
    #: Nodes that cannot take part, and why.
    left_out: dict[NodeName, str] = field(default_factory=dict)
    #: Plans of the generations whose layers live workers may hold.
    plans: dict[Generation, Plan] = field(default_factory=dict)
    #: Newest generation that has committed a step.
    stepped: Generation = NO_GENERATION
    #: Newest generation that was not to be entered at a step boundary.
    abrupt: Generation = NO_GENERATION
    #: Nodes whose workers of `plans` are known to be gone: an agent was started anew, or has ended
    #: as it was told to, or the job must do without a node that was drained.
    emptied: set[NodeName] = field(default_factory=set)
    #: Most nodes that any plan was made for; the templates cover them.
    most_nodes: int = 0
    #: Losses of the newest plan's nodes and workers that no plan has answered yet.
    losses: tuple[Loss, ...] = ()
    reconfigurations: int = 0
    #: Processes that an earlier plan counted on and the newest one does not, oldest first.
    replaced: dict[Incarnation, None] = field(default_factory=dict)
    #: Number of the newest request for a checkpoint, and of the newest that was answered.
    save_request: int = 0
    save_answered: int = 0
    #: The numbers that the last requests got, by the id of the request.
    save_numbers: dict[str, int] = field(default_factory=dict)
    #: The newest checkpoint.
    checkpoint: CheckpointSaved | None = None
    #: Why the last save came to nothing; empty: it did not.
    save_failure: str = ""
    #: The checkpoint that the workers' state goes back to (without a path: the job began anew), and
    #: the step that the job began at.
    restored: Restored | None = None
    resumed_step: int = 0
    #: The last step that was committed before all went back to a checkpoint, until it is committed
    #: again; 0: none.
    redo_until: int = 0
    #: The failure that is being answered; None: none. How many there were, and the last one.
    incident: Incident | None = None
    incidents: int = 0
    last_incident: LastIncident | None = None
    #: The versions that differ among its nodes, as far as that was told.
    mixed: tuple[str, ...] = ()
    #: Unix time at which the journal was last found without its end; 0: never in the job's life.
    journal_cut_at: float = 0.0
    known_reports: deque[SaveReport] = field(default_factory=lambda: deque(maxlen=_KNOWN_REPORTS))
    #: The last transitions, for the report of one that is not allowed.
    history: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    seen: JobSeen = field(default_factory=JobSeen)
    #: `processes`, and the plan that they were gathered from: every report asks for them.
    _processes: dict[WorkerId, Incarnation] = field(default_factory=dict, repr=False, compare=False)
    _of_processes: PlanMade | None = field(default=None, repr=False, compare=False)
    #: The same of `members`, which change with losses too.
    _members: dict[NodeName, None] = field(default_factory=dict, repr=False, compare=False)
    _of_members: tuple[PlanMade | None, tuple[Loss, ...]] = field(
        default=(None, ()), repr=False, compare=False
    )

    @property
    def generation(self) -> Generation:
        return self.made.plan.generation if self.made else NO_GENERATION

    @property
    def newest_known(self) -> Generation:
        """Also of plans that were found with agents, and that nobody counts on."""
        return max(self.generation, *self.plans, NO_GENERATION)

    @property
    def astray(self) -> bool:
        """Workers are in a generation that is not known well enough to go on in."""
        return self.newest_known > self.generation

    @property
    def on_the_way(self) -> bool:
        """The newest generation has not committed a step yet."""
        return self.stepped < self.generation

    @property
    def lost_nodes(self) -> frozenset[NodeName]:
        """Also those that are there and left out."""
        return nodes_of(self.losses)

    @property
    def members(self) -> tuple[NodeName, ...]:
        """Nodes of the newest plan, without those lost since, in the order of their names."""
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
        """Nodes that the newest plan takes out, as long as it may still need them."""
        if self.made is None or not self.on_the_way:
            return ()
        nodes = {worker.node for worker in self.made.leaving}
        return tuple(sorted(nodes - self.lost_nodes))

    @property
    def put_back(self) -> bool:
        """Another job had the turn since the newest plan, which counts on nobody any more."""
        return any(isinstance(loss, NodeYielded) for loss in self.losses)

    @property
    def lost_workers(self) -> frozenset[WorkerId]:
        return frozenset(loss.worker for loss in self.losses if isinstance(loss, WorkerLost))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, as far as is known, that the job can go back to."""
        begun_with = self.restored is not None and self.restored.path != ""
        return self.checkpoint is not None or begun_with

    def is_replaced(self, worker: WorkerId, process: Incarnation) -> bool:
        """Whether the newest plan counts on another process in the place of this one. What waits in
        an agent for its next session may be of a process that has ended, and comes after the news
        of the one in its place."""
        return process in self.replaced and worker in self.processes()

    @property
    def redone_until(self) -> int:
        """`redo_until`, or the newest recorded step where agents told of it later."""
        return max(self.redo_until, self.seen.committed_step) if self.redo_until else 0

    def knows(self, report: SaveReport) -> bool:
        """Whether it was told before, by this or, of a restore, by another worker; or it is of a
        restore that steps of a later generation have followed."""
        if isinstance(report, Restored):
            newest = self.restored.generation if self.restored is not None else NO_GENERATION
            return report.generation <= newest or report.generation < self.stepped
        return report in self.known_reports

    def unanswered(self) -> tuple[WorkerId, ...]:
        """Workers that shall enter the newest generation at once, and have not left the one
        before; none where that is not to be known."""
        way = self.seen.way
        if self.made is None or self.made.boundary or way is None or way.first_step_at is not None:
            return ()
        left = way.answered.union(self.made.starting)
        return tuple(worker for worker in self.made.plan.workers if worker not in left)

    def has_finished(self, process: Incarnation) -> bool:
        """All steps are done and the process's share of the newest plan's output is saved."""
        return self.seen.finished.get(process) == self.generation

    def all_finished(self) -> bool:
        processes = self.processes()
        return bool(processes) and all(map(self.has_finished, processes.values()))

    def counts_on(self, process: Incarnation) -> bool:
        """Whether the job stands and falls with the process: before the first plan with every
        one, then with those of the newest plan. Once steps are committed only processes that
        have had a part in them count; others are about to join, and only their node is at stake."""
        if self.made is None:
            return True
        trained = self.trained is None or process in self.trained.incarnations
        return trained and process in self.made.incarnations

    def goes_back(self, process: Incarnation) -> bool:
        """Whether the process is to go on from a checkpoint, as all others of the newest plan are:
        what is wrong may be wrong for all of them, though it has had no part in a step."""
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
        """The processes that the newest plan counts on, by rank."""
        if self.made is None:
            return {}
        if self.made is not self._of_processes:
            self._of_processes = self.made
            self._processes = dict(zip(self.made.plan.workers, self.made.incarnations, strict=True))
        return self._processes

    def leaving_processes(self) -> dict[WorkerId, Incarnation]:
        """Those that the newest plan takes out, as long as it may still need them."""
        if self.made is None or not self.on_the_way:
            return {}
        return dict(zip(self.made.leaving, self.made.leaving_incarnations, strict=True))
