"""Everything that can happen to the cluster, as the master sees it.

Two kinds, told apart here and nowhere else:

*Journaled* events (`Journaled`) are durable facts: what operators asked for, who the nodes are,
and every decision of the master. They are on disk before anyone acts on them, and the durable
part of the state is a fold over them alone.

*Observed* events (`Observed`) are what the agents and the clock tell: streams, heartbeats,
reports. They are not journaled: a restarted master forgets them and is told again. Step records
are observed too; their durable copy is metrics.jsonl.

The shell stamps each event with the time of its arrival; events carry no clock of their own.
The tag of a journaled event is its class's name.
"""

from typing import Any, Literal

import msgspec

from oobleck.host.messages import (
    CheckpointSaved,
    EvaluationRecord,
    LinkMeasured,
    Measure,
    Measured,
    PeerLost,
    PhaseReached,
    Rendezvous,
    Restored,
    SaveFailed,
    StepRecord,
)
from oobleck.master.trustevents import TrustChanged
from oobleck.planner.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.planner.job import JobSpec
from oobleck.planner.plan import Plan
from oobleck.planner.profile import Profile
from oobleck.proto.types import Assignment, Hung, NodeFacts, NodeStatus, WorkerExited

#: What a plan answers.
Cause = Literal[
    "start",
    "node lost",
    "worker lost",
    "peers lost",
    "no progress",
    "node joined",
    "node returned",
    "node left out",
    "node drained",
    "journal cut",
]


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody saw of a failure. The event that carries it says when, less `ago_s`."""

    #: agent: of a process that it started; peer: a worker, of another one; stream: the master, of
    #: an agent's session; worker: of itself.
    by: Literal["agent", "peer", "stream", "worker"]
    #: Node, worker, or `master`.
    observer: str
    #: Node or worker; empty: the observer cannot tell.
    about: str
    saw: str
    ago_s: float = 0.0
    #: With `agent`: how the process ended.
    exited: WorkerExited | None = None


# ---- journaled


class MasterStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A master has replayed the journal: whatever an earlier one observed is forgotten."""


class JournalCut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The journal was found with an end that is no whole event, or without events that had been
    acted on."""

    #: What was cut off, and the name of the file that has it.
    bytes: int
    kept_as: str
    #: Of jobs whose events.jsonl has more records than the journal gives: how many it has.
    records: dict[JobId, int]


class JobSubmitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    request_id: str
    spec: JobSpec
    #: Of the file that the job names.
    profile: Profile | None = None
    #: The job ends as soon as its profile is measured.
    profile_only: bool = False


class JobCancelRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    request_id: str


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A start of an agent that was not known, or was lost, is part of the cluster."""

    facts: NodeFacts
    #: It has workers of before that no plan counts on: they must go before it gets work.
    stale_workers: bool = False


class NodeCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent has no stale workers any more."""

    node: NodeName


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: NodeName
    incarnation: Incarnation
    #: left: it was drained, and has ended as it was told to.
    cause: Literal["witnesses", "lease", "restarted", "left"]
    reason: str
    #: From the first evidence to this declaration.
    detect_s: float
    #: As in PlanMade.
    sightings: tuple[Sighting, ...] = ()


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker process that the plan counts on is gone; its node lives."""

    job_id: JobId
    worker: WorkerId
    incarnation: Incarnation
    reason: str
    detect_s: float
    #: Its agent's word; None: the agent did not see it end.
    sighting: Sighting | None = None
    #: Its own word on why; empty: none.
    words: str = ""
    #: It had reported that it lost a peer before it ended.
    lost_peer: bool = False
    #: It did not get on, and its agent has killed it.
    hung: bool = False


class NodeLeftOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node cannot take part in the job: it gets no work of it until it registers anew."""

    job_id: JobId
    node: NodeName
    reason: str


class NodeReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Workers of the node do not come to a meeting of the others: all that it has are ended, and
    it gets new ones."""

    job_id: JobId
    node: NodeName
    reason: str
    #: Since there is no way between it and others.
    cut_off: bool = False


class NodeDrainRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The work on the node is to move off, and no more is to come until it is undrained."""

    node: NodeName
    #: Empty: the agent's own wish, because it was told to end.
    request_id: str
    reason: str
    #: Also where a job cannot go on without the node.
    force: bool


class NodeKept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node is to be drained, and the job cannot go on without it for now."""

    node: NodeName
    job_id: JobId
    reason: str
    #: Number of the request for a checkpoint that is waited for; 0: none.
    save: int = 0


class NodeDrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No work is on the node any more, nor what others need."""

    node: NodeName
    #: The job that must do without it from one moment to the next; None: none.
    job_id: JobId | None = None
    reason: str = ""


class NodeQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node fails again and again: it is drained, and comes back by itself."""

    node: NodeName
    reason: str
    seconds: float
    #: It starts no workers, and comes back as soon as it does.
    until_ready: bool = False


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node's quarantine is over."""

    node: NodeName
    reason: str


class NodeUndrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing that is known against the node counts any more."""

    node: NodeName
    request_id: str


class JobStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job has its turn: nodes get ready for it."""

    job_id: JobId


class JobPutBack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job, that could not start so far, lets another one have its turn."""

    job_id: JobId
    instead: JobId


class MeasuringStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """These processes measure the job's model, and some of them the links."""

    job_id: JobId
    wish: Measure
    workers: tuple[tuple[WorkerId, Incarnation], ...]
    #: Why the stored profile of that key is not used; empty: there is none.
    passed_over: str = ""


class ProfileChosen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The profile that all plans of the job are made by."""

    job_id: JobId
    source: Literal["measured", "stored", "file", "estimate"]
    #: None: the estimate, which follows from the job.
    profile: Profile | None
    #: Name under which it is stored; empty: it is not.
    key: str
    reason: str
    #: How it was measured.
    notes: dict[str, Any] = {}


class JobWaiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No plan is possible until nodes come."""

    job_id: JobId
    causes: tuple[str, ...]


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """How the way into a generation went, as far as it went."""

    #: detect, plan, abort, rendezvous, transfer, first_step; they add up to `total_s`.
    phases: dict[str, float]
    total_s: float
    #: Step that was begun and is done again; None: none.
    redo_step: int | None
    rolled_forward: bool
    received_bytes: int
    #: Micro-batches of the step that is done again which did not have to be.
    salvaged_microbatches: int = 0
    #: Where it did not come to a step: who had not left the generation before.
    unanswered: tuple[WorkerId, ...] = ()
    #: The phases inside were not observed because the master restarted meanwhile.
    master_restarted: bool


class PlanMade(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The next generation: every node of the plan is to enter it."""

    job_id: JobId
    plan: Plan
    rendezvous: Rendezvous
    boundary: bool
    #: The processes that the plan counts on, in rank order.
    incarnations: tuple[Incarnation, ...]
    cause: Cause
    rule: str
    reason: str
    nodes_lost: tuple[NodeName, ...]
    workers_lost: tuple[WorkerId, ...]
    nodes_joined: tuple[NodeName, ...]
    can_lose: int
    worker_slots: int
    detect_s: float
    #: Workers of the plan before that leave with the switch, and their processes; whether those
    #: hand over layers first. See `oobleck.host.messages.Assign`.
    leaving: tuple[WorkerId, ...] = ()
    leaving_incarnations: tuple[Incarnation, ...] = ()
    handover: bool = False
    #: Fingerprint of the data that all workers of the job read.
    data: str = ""
    #: A part of the model is with nobody: all go back to the newest checkpoint.
    restore: bool = False
    #: Of the generation before, where it did not come to its first step.
    overtaken: Transition | None = None
    #: What was seen of failures since the last event that carries such.
    sightings: tuple[Sighting, ...] = ()


class PlanFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Agents have a plan that the journal does not have, and not all of them are there that are in
    it. It tells which layers their workers hold."""

    job_id: JobId
    plan: Plan


class FirstStepCommitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The newest generation has committed its first step."""

    job_id: JobId
    generation: Generation
    step: int
    transition: Transition
    #: As in PlanMade.
    sightings: tuple[Sighting, ...] = ()


class CheckpointRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operator wants a checkpoint; requests of a job are numbered from 1."""

    job_id: JobId
    request_id: str
    number: int


class CheckpointPublished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job can go on from this checkpoint."""

    job_id: JobId
    saved: CheckpointSaved


class SaveProblem(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A checkpoint, or the output, could not be written so far."""

    job_id: JobId
    failed: SaveFailed


class JobRestored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The workers go on from a checkpoint."""

    job_id: JobId
    restored: Restored
    #: The job began with it, instead of with initial weights.
    resumed: bool
    #: Committed steps that are done again.
    lost_steps: int


class JobSucceeded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    #: Of a generation that came after the last step and has only saved the result.
    transition: Transition | None = None
    #: Records of steps that nobody has any more, so that metrics.jsonl ends before them.
    missing_steps: int = 0


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    reason: str
    #: It failed for want of this node alone, by the word of a worker there.
    node: NodeName | None = None
    transition: Transition | None = None
    #: As in PlanMade.
    sightings: tuple[Sighting, ...] = ()


class JobCancelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    transition: Transition | None = None


JobEnded = JobSucceeded | JobFailed | JobCancelled
Journaled = (
    MasterStarted
    | JournalCut
    | JobSubmitted
    | JobCancelRequested
    | NodeRegistered
    | NodeCleared
    | NodeLost
    | WorkerLost
    | NodeLeftOut
    | NodeReset
    | NodeDrainRequested
    | NodeKept
    | NodeDrained
    | NodeQuarantined
    | NodeReleased
    | NodeUndrained
    | JobStarted
    | MeasuringStarted
    | ProfileChosen
    | JobWaiting
    | JobPutBack
    | PlanMade
    | PlanFound
    | FirstStepCommitted
    | CheckpointRequested
    | CheckpointPublished
    | SaveProblem
    | JobRestored
    | JobSucceeded
    | JobFailed
    | JobCancelled
    | TrustChanged
)


# ---- observed


class StreamOpened(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's newest session; a session number is never used twice."""

    node: NodeName
    session: int
    status: NodeStatus
    #: As in Registration.
    running: Assignment | None = None


class AgentRefused(msgspec.Struct, frozen=True, kw_only=True):
    """An agent has registered under this name and was refused."""

    node: NodeName
    incarnation: Incarnation


class StreamClosed(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeName
    session: int


class StatusReceived(msgspec.Struct, frozen=True, kw_only=True):
    node: NodeName
    status: NodeStatus


class WorkerExitReported(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    exited: WorkerExited


class WorkerHungReported(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    hung: Hung


class PhaseReported(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    phase: PhaseReached


class PeerLostReported(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    lost: PeerLost


class WorkerFailedReported(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    kind: Literal["user", "node", "internal"]
    message: str


class MeasurementReported(msgspec.Struct, frozen=True, kw_only=True):
    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    measured: Measured | LinkMeasured


class SaveReported(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's word on checkpoints; repeated with every session of its agent."""

    worker: WorkerId
    job_id: JobId
    incarnation: Incarnation
    what: CheckpointSaved | SaveFailed | Restored


class ProfilesFound(msgspec.Struct, frozen=True, kw_only=True):
    """All profiles that are stored, by key; of those that cannot be read, why."""

    profiles: dict[str, Profile]
    unusable: dict[str, str] = {}


class RecordsReceived(msgspec.Struct, frozen=True, kw_only=True):
    """New lines of metrics.jsonl, in step order, now on disk."""

    job_id: JobId
    records: tuple[StepRecord, ...]


class EvaluationReceived(msgspec.Struct, frozen=True, kw_only=True):
    """A new line of evaluations.jsonl, now on disk."""

    job_id: JobId
    record: EvaluationRecord


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    """Time has passed; `late_s` is how much later than planned the master looks."""

    late_s: float
    #: Late enough for agents to have given up their streams because of it.
    cut: bool


Observed = (
    StreamOpened
    | AgentRefused
    | StreamClosed
    | StatusReceived
    | WorkerExitReported
    | WorkerHungReported
    | PhaseReported
    | PeerLostReported
    | WorkerFailedReported
    | MeasurementReported
    | SaveReported
    | ProfilesFound
    | RecordsReceived
    | EvaluationReceived
    | Tick
)
Event = Journaled | Observed
