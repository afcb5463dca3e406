"""What the master knows: nodes, jobs, and what is desired of each node.

`ClusterState` has one owner, the loop, which changes it through `oobleck.master.apply` alone.
Everything in it follows from journaled events, except what stands under `seen`: that is
observed, lives as long as this master process, and starts anew with `MasterStarted`. Must not
know the clock, files, gRPC or how decisions are made.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oobleck.host.messages import (
    CheckpointSaved,
    EvaluationRecord,
    LinkMeasured,
    Measured,
    PeerLost,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.master.incident import Incident, LastIncident
from oobleck.master.jobevents import MeasuringStarted, ProfileChosen
from oobleck.master.nodeevents import (
    NodeDrained,
    NodeLeftOut,
    NodeLost,
    NodeReset,
    Sighting,
    WorkerLost,
)
from oobleck.master.planevents import PlanMade, Transition
from oobleck.master.trust import Trust
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.measurement import Scope
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.proto.types import Assignment, Hung, NodeFacts, NodeStatus, WorkerExited

#: What workers say of checkpoints, and how many of their last words are known again.
SaveReport = CheckpointSaved | SaveFailed | Restored
_KNOWN_REPORTS = 64
_KNOWN_REQUESTS = 256
#: Processes of earlier plans that are known again when something old is told of them.
KNOWN_PROCESSES = 10_000
#: Operators ask again within seconds: so many of their last requests are known again.
KNOWN_REQUESTS = 64
#: Step records that rates are taken from.
RECENT_RECORDS = 10
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
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")


@dataclass(slots=True, kw_only=True)
class NodeSeen:
    """Observed of a node in this master's life."""

    #: When it was last heard of, or could first have been.
    last_heard: float
    #: Not heard of since this master began, or since it was paused itself: it has longer.
    awaited: bool = False
    #: When this master last went on after a pause of its own that agents may have ended streams in.
    resumed_at: float | None = None
    #: None: no stream.
    session: int | None = None
    #: Another agent that wants the node's name, and since when.
    rival: tuple[Incarnation, float] | None = None
    #: When its last stream ended; None while one is open, and before the first one.
    closed_at: float | None = None
    status: NodeStatus = field(default_factory=NodeStatus)
    #: Since when it could prepare for the active job, and since when it is ready for it.
    assigned_at: float | None = None
    #: When its quarantine ends, by this master's clock.
    release_at: float | None = None
    #: What its agent had on the way when its newest session began; see `Registration`.
    running: Assignment | None = None
    ready_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """What a node shall do, by reference; `version` grows with every change."""

    version: int = 0
    job_id: JobId | None = None
    #: None: get workers ready and wait.
    generation: Generation | None = None
    #: Without a generation: the attempt at measuring that the workers shall make; 0: none.
    attempt: int = 0
    #: Number of the newest request for a checkpoint.
    save: int = 0
    #: It is drained, and its agent may end.
    drained: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """The work on a node is to move off it."""

    #: Whose wish it is; an agent's own ends with the agent.
    by: Literal["operator", "agent", "quarantine"]
    reason: str
    force: bool
    #: Why a job cannot go on without the node; empty: nothing is known.
    kept: str = ""
    #: Number of the request for a checkpoint that a forced drain waits for; 0: none.
    save: int = 0
    #: Nothing is on it any more.
    done: bool = False
    #: Of a quarantine: until when it lasts (Unix time), or until the node starts workers again.
    until: float = 0.0
    until_ready: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Of one node, over all starts of its agent."""

    #: Unix times of those close together up to the last one.
    times: tuple[float, ...] = ()
    last: str = ""
    #: Quarantines that followed on each other, and when the newest ends or has ended (Unix time).
    quarantines: int = 0
    quarantined_until: float = 0.0


@dataclass(slots=True, kw_only=True)
class Node:
    facts: NodeFacts
    #: False: lost.
    registered: bool = True
    #: Why it is lost.
    reason: str = ""
    #: Workers of before its loss must go first.
    stale_workers: bool = False
    #: None: it may get work.
    drain: Drain | None = None
    failures: Failures = Failures()
    desired: Desired = Desired()
    seen: NodeSeen

    @property
    def connected(self) -> bool:
        return self.registered and self.seen.session is not None


@dataclass(slots=True, kw_only=True)
class Way:
    """Observed on the way into the newest generation: when each phase ended, and how."""

    evidence_at: float
    declared_at: float
    pushed_at: float
    aborted_at: float | None = None
    joined_at: float | None = None
    transferred_at: float | None = None
    first_step_at: float | None = None
    committed_step: int | None = None
    redo: bool = False
    rolled_forward: bool = False
    received_bytes: int = 0
    salvaged_microbatches: int = 0
    #: Who has left the generation before, met the others, and come to hold its layers.
    answered: set[WorkerId] = field(default_factory=set)
    joined: set[WorkerId] = field(default_factory=set)
    entered: set[WorkerId] = field(default_factory=set)

    def transition(self, end: float, unanswered: tuple[WorkerId, ...] = ()) -> Transition:
        """The phases up to `end`; one that was not reported took no time of its own."""
        marks = {
            "detect": self.declared_at,
            "plan": self.pushed_at,
            "abort": self.aborted_at,
            "rendezvous": self.joined_at,
            "transfer": self.transferred_at,
            "first_step": end,
        }
        end = max(end, self.evidence_at)
        phases, before = {}, self.evidence_at
        for phase, at in marks.items():
            # Reports of different nodes overtake each other, and none counts after the end.
            at = before if at is None else min(max(at, before), end)
            phases[phase] = at - before
            before = at
        redo_step = None
        if self.redo and self.committed_step is not None:
            redo_step = self.committed_step + 1
        return Transition(
            phases=phases,
            total_s=end - self.evidence_at,
            redo_step=redo_step,
            rolled_forward=self.rolled_forward,
            received_bytes=self.received_bytes,
            salvaged_microbatches=self.salvaged_microbatches,
            unanswered=unanswered,
            master_restarted=False,
        )


@dataclass(slots=True, kw_only=True)
class JobSeen:
    """Observed of a job in this master's life."""

    #: When that began, or the job.
    since: float = 0.0
    committed_step: int = 0
    recent: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=RECENT_RECORDS))
    #: When the last of them came.
    recorded_at: float | None = None
    #: The newest one.
    evaluation: EvaluationRecord | None = None
    #: The last committed step that a record or an agent's status has told of.
    furthest_step: int = 0
    #: When the newest generation last came any further on its way, in its steps or to its end.
    progressed_at: float | None = None
    #: How often it was given up on because it did not, since the last step.
    stalls: int = 0
    #: First report of a lost peer by each worker since the last plan that was not at a boundary.
    peers_lost: dict[WorkerId, tuple[float, PeerLost]] = field(default_factory=dict)
    #: First evidence and last declaration of the losses that no plan has answered yet.
    evidence_at: float | None = None
    declared_at: float | None = None
    #: None: no plan of this master's life is on its way to its first step.
    way: Way | None = None
    #: How worker processes ended, and those of each worker of the plan since the last step.
    exits: dict[Incarnation, WorkerExited] = field(default_factory=dict)
    #: Processes that their agents have given up on, since they hang.
    hung: dict[Incarnation, Hung] = field(default_factory=dict)
    deaths: dict[WorkerId, list[WorkerExited]] = field(default_factory=dict)
    #: Plans without a loss of a node since the last step, and when the first of them was made.
    regroups: int = 0
    fruitless_since: float | None = None
    #: Since the last step, by the node whose store they met at: pairs of nodes, in the order of
    #: their names, of which one has reported that there is no way to the other.
    no_way: dict[NodeName, set[tuple[NodeName, NodeName]]] = field(default_factory=dict)
    #: Generation that each process has reported to have entered.
    entered: dict[Incarnation, Generation] = field(default_factory=dict)
    #: Generation that each process has finished in.
    finished: dict[Incarnation, Generation] = field(default_factory=dict)
    #: A worker's word that the job is at fault; and each one's that something else is, since the
    #: last step.
    failure: str | None = None
    complaints: dict[WorkerId, str] = field(default_factory=dict)
    #: Since when the newest attempt at measuring is under way, and what has come of it.
    measuring_since: float | None = None
    measured: dict[Incarnation, Measured] = field(default_factory=dict)
    links_measured: dict[Scope, LinkMeasured] = field(default_factory=dict)
    #: What workers said of checkpoints and nothing was made of yet.
    save_reports: tuple[SaveReport, ...] = ()
    #: Of steps that are done again: the first and the last committed one that a status told of in
    #: this generation.
    redone: tuple[Generation, int, int] | None = None
    #: Of nodes that have trained: why they were given up since the last step.
    given_up: dict[NodeName, str] = field(default_factory=dict)
    #: What workers that count found wrong with their node, and when; kept when it is left out.
    ailing: dict[NodeName, tuple[float, str]] = field(default_factory=dict)
    #: Of processes that have had no part in a step, while others have: why they cannot have one,
    #: and the ends of those that a plan counted on.
    unfit: dict[NodeName, str] = field(default_factory=dict)
    #: What was seen of failures, and when, that no event has carried yet.
    sightings: list[tuple[float, Sighting]] = field(default_factory=list)
    stillborn: dict[NodeName, list[WorkerExited]] = field(default_factory=dict)

    def is_gone(self, process: Incarnation) -> bool:
        """Whether it has ended, or is about to."""
        return process in self.exits or process in self.hung


@dataclass(slots=True, kw_only=True)
class Job:
    id: JobId
    request_id: str
    spec: JobSpec
    state: JobState = "queued"
    #: Why it is in that state, where that is not plain.
    reason: str = ""
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
    #: Most nodes that any plan was made for; the templates cover them.
    most_nodes: int = 0
    #: Losses of the newest plan's nodes and workers that no plan has answered yet.
    losses: tuple[NodeLost | WorkerLost | NodeLeftOut | NodeReset | NodeDrained, ...] = ()
    reconfigurations: int = 0
    #: Number of the newest request for a checkpoint, and of the newest that was answered.
    save_request: int = 0
    #: Processes that an earlier plan counted on and the newest one does not, oldest first.
    replaced: dict[Incarnation, None] = field(default_factory=dict)
    #: The numbers that the last requests got, by the id of the request.
    save_numbers: dict[str, int] = field(default_factory=dict)
    save_answered: int = 0
    #: The newest checkpoint.
    checkpoint: CheckpointSaved | None = None
    #: Why the last save came to nothing; empty: it did not.
    save_failure: str = ""
    #: The checkpoint that the workers' state goes back to, and the step that the job began at.
    restored: Restored | None = None
    resumed_step: int = 0
    #: The failure that is being answered; None: none. How many there were, and the last one.
    incident: Incident | None = None
    incidents: int = 0
    last_incident: LastIncident | None = None
    #: Unix time at which the journal was last found without its end; 0: never in the job's life.
    journal_cut_at: float = 0.0
    known_reports: deque[SaveReport] = field(default_factory=lambda: deque(maxlen=_KNOWN_REPORTS))
    #: The last transitions, for the report of one that is not allowed.
    history: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    seen: JobSeen = field(default_factory=JobSeen)
    #: `processes`, and the plan that they were gathered from: every report asks for them.
    _processes: dict[WorkerId, Incarnation] = field(default_factory=dict, repr=False, compare=False)
    _of_processes: PlanMade | None = field(default=None, repr=False, compare=False)

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
        return frozenset(loss.node for loss in self.losses if not isinstance(loss, WorkerLost))

    @property
    def members(self) -> tuple[NodeName, ...]:
        """Nodes of the newest plan, without those lost since."""
        if self.made is None:
            return ()
        lost = self.lost_nodes
        return tuple(node for node in self.made.plan.nodes if node not in lost)

    @property
    def leaving(self) -> tuple[NodeName, ...]:
        """Nodes that the newest plan takes out, as long as it may still need them."""
        if self.made is None or not self.on_the_way:
            return ()
        nodes = {worker.node for worker in self.made.leaving}
        return tuple(sorted(nodes - self.lost_nodes))

    @property
    def lost_workers(self) -> frozenset[WorkerId]:
        return frozenset(loss.worker for loss in self.losses if isinstance(loss, WorkerLost))

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a checkpoint, as far as is known, that the job can go back to."""
        return self.checkpoint is not None or self.restored is not None

    def is_replaced(self, worker: WorkerId, process: Incarnation) -> bool:
        """Whether the newest plan counts on another process in the place of this one. What waits in
        an agent for its next session may be of a process that has ended, and comes after the news
        of the one in its place."""
        return process in self.replaced and worker in self.processes()

    def knows(self, report: SaveReport) -> bool:
        """Whether it was told before, by this or, of a restore, by another worker."""
        if isinstance(report, Restored):
            return self.restored is not None and self.restored.generation >= report.generation
        return report in self.known_reports

    def unanswered(self) -> tuple[WorkerId, ...]:
        """Workers that shall enter the newest generation at once, and have not left the one
        before; none where that is not to be known."""
        way = self.seen.way
        if self.made is None or self.made.boundary or way is None or way.first_step_at is not None:
            return ()
        return tuple(worker for worker in self.made.plan.workers if worker not in way.answered)

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

    @property
    def newcomers(self) -> tuple[NodeName, ...]:
        """Members that had no part in the last step."""
        if self.trained is None:
            return ()
        return tuple(node for node in self.members if node not in self.trained.plan.nodes)

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


@dataclass(slots=True, kw_only=True)
class ClusterState:
    #: Number of the last journaled event.
    sequence: int = 0
    nodes: dict[NodeName, Node] = field(default_factory=dict)
    #: In the order of submission.
    jobs: dict[JobId, Job] = field(default_factory=dict)
    requests: dict[str, JobId] = field(default_factory=dict)
    #: The last requests about nodes.
    node_requests: deque[str] = field(default_factory=lambda: deque(maxlen=_KNOWN_REQUESTS))
    #: Stored measurements by key; observed, since the files are the truth.
    profiles: dict[str, Profile] = field(default_factory=dict)
    unusable_profiles: dict[str, str] = field(default_factory=dict)
    active: JobId | None = None
    #: Who may speak to this master.
    trust: Trust = field(default_factory=Trust)

    @property
    def job(self) -> Job | None:
        """The job that has its turn."""
        return self.jobs[self.active] if self.active is not None else None

    def worker_slots(self, job: Job) -> int | None:
        """Workers per node of the job: what its plan has, before that what most nodes have."""
        if job.made is not None:
            return job.made.worker_slots
        counts = Counter(n.facts.worker_slots for n in self.nodes.values() if n.registered)
        return max(counts, key=lambda slots: (counts[slots], slots)) if counts else None

    def candidates(self, job: Job) -> list[Node]:
        """Nodes that may get work of the job, by name."""
        slots = self.worker_slots(job)
        return [
            node
            for _, node in sorted(self.nodes.items())
            if node.registered
            and not node.stale_workers
            and node.drain is None
            and node.facts.worker_slots == slots
            and node.facts.node not in job.left_out
        ]

    def is_ready(self, node: Node, job: Job) -> bool:
        """Whether a worker of the job is up in every slot of the node.

        The last status may be older than the report of an exit, and still list the dead.
        """
        status = node.seen.status
        up = [w for w in status.workers if w.store and not job.seen.is_gone(w.incarnation)]
        return node.connected and status.job_id == job.id and len(up) == node.facts.worker_slots

    def data_of(self, node: Node) -> str:
        """Fingerprint of the data that the node's workers read."""
        return ", ".join(sorted({worker.data for worker in node.seen.status.workers}))

    def assignment(self, node: Node, job_text: str) -> Assignment:
        """What `node` is to be told; `job_text` is the text of its desired job."""
        desired = node.desired
        if desired.job_id is None:
            return Assignment(version=desired.version, drained=desired.drained)
        made = self.jobs[desired.job_id].made
        if desired.generation is None or made is None:
            measuring = self.jobs[desired.job_id].measuring
            return Assignment(
                version=desired.version,
                job_id=desired.job_id,
                job=job_text,
                measure=measuring.wish if measuring is not None else None,
            )
        job = self.jobs[desired.job_id]
        processes, leaving = job.processes(), job.leaving_processes()
        name = node.facts.node
        workers = [WorkerId(name, slot) for slot in range(made.worker_slots)]
        return Assignment(
            version=desired.version,
            job_id=desired.job_id,
            job=job_text,
            plan=made.plan,
            rendezvous=made.rendezvous,
            boundary=made.boundary,
            restore=made.restore,
            save=desired.save,
            leaving=made.leaving,
            handover=made.handover,
            worker_incarnations=tuple(
                process
                for worker in workers
                if (process := processes.get(worker) or leaving.get(worker)) is not None
            ),
        )
