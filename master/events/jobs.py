"""Journaled events of jobs: requests, turns, plans, checkpoints, ends.

Owns the words for what a plan answers (`Cause`) and for how the way into a generation went
(`ReconfigurationStats`). Must not know what the events change.
"""

from typing import Any, Literal, get_args

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, CheckpointSaved, Measure, Restored, SaveFailed
from oobleck.core.plan import Plan, WorkerRate
from oobleck.core.profile import Profile
from oobleck.master.events.nodes import Evidence
from oobleck.master.policies import MOVING, is_base
from oobleck.planner.recovery.rules import Next

#: Of the way into a generation, in order: the loss is found out, no plan is found and none can be
#: made until nodes come, the workers leave the generation before, meet, move layers, and train.
Phase = Literal["detect", "plan", "waiting", "abort", "rendezvous", "transfer", "first_step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
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
    "put back",
    "journal cut",
    "re-routed",
    "few holders",
    "worker slow",
    "worker well",
]


class ReconfigurationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the transition into a generation, as far as it went."""

    #: By `Phase`; they add up to `total_s`.
    phases: dict[str, float]
    total_s: float
    #: Step that was begun and is done again; None: none.
    redo_step: int | None
    rolled_forward: bool
    received_bytes: int
    #: Of these, what came while the generation before trained on.
    fed_bytes: int = 0
    #: For how long no step was committed, less one step of the generation before; None: not known.
    stall_s: float | None = None
    #: Micro-batches of the step that is done again which did not have to be.
    salvaged_microbatches: int = 0
    #: Where it did not come to a step: who had not left the generation before.
    unanswered: tuple[WorkerId, ...] = ()
    #: The phases inside were not observed because the master restarted meanwhile.
    master_restarted: bool


class StandByFor(msgspec.Struct, frozen=True, kw_only=True):
    """A slow worker is put to stand by; for so long nothing that it measures makes it better."""

    worker: WorkerId
    incarnation: Incarnation
    seconds: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Expectation of a plan by the planner, computed from the job's profile."""

    step_s: float
    #: How long the state that moves takes.
    stall_s: float


class PlanMade(Assign, frozen=True, kw_only=True, tag=True):
    """The next generation: every node of the plan is to enter it as `Assign` says."""

    job_id: JobId
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
    #: The processes of those that leave.
    leaving_incarnations: tuple[Incarnation, ...] = ()
    #: Those of its workers whose processes were not up yet.
    starting: tuple[WorkerId, ...] = ()
    #: The series of torch that its nodes have; empty: more than one, or not known.
    torch: str = ""
    #: Their engine (`oobleck.host.versions`).
    engine: str
    #: Whose plan it is (`oobleck.planner.recovery.policies`).
    policy: str = MOVING
    #: Whose plan is to follow at a step boundary; empty: nobody's.
    then: Next | Literal[""] = ""
    #: None: it was not asked for, as of the first plan.
    expected: Expected | None = None
    #: Nobody had entered the plan before, which was for a step boundary: this one comes from the
    #: one that was trained in.
    passes_over: bool = False
    #: Slow workers of nodes that stand by, and how slow they were then.
    standing_by: tuple[WorkerRate, ...] = ()
    #: Those of them that had a part in the plan before.
    stand_by_for: tuple[StandByFor, ...] = ()
    #: Of the generation before, where it did not come to its first step.
    overtaken: ReconfigurationStats | None = None
    #: What was seen of failures since the last event that carries such.
    evidence: tuple[Evidence, ...] = ()

    @property
    def assign(self) -> Assign:
        """Assignment as agents and workers receive it."""
        return Assign(**{name: getattr(self, name) for name in Assign.__struct_fields__})

    @property
    def is_base(self) -> bool:
        """Return whether later plans start from this plan's pipelines rather than from an earlier
        plan's."""
        return is_base(self.policy, self.rule)


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
    transition: ReconfigurationStats
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()
    #: Unix time of the last step of a generation before, by the calendar of a worker's host; 0: not
    #: known.
    trained_until: float = 0.0


class FollowUpDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: no follow-up plan replaces the newest one, since no change is worth it or planning
    failed."""

    job_id: JobId
    generation: Generation
    reason: str


PlanEvent = PlanMade | PlanFound | FirstStepCommitted | FollowUpDropped


class JobSubmitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    request_id: str
    spec: JobSpec
    #: Of the file that the job names.
    profile: Profile | None = None
    #: The job ends as soon as its profile is measured.
    profile_only: bool = False


class JobAdopted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A job that nodes train and that this master did not know is its own from here on."""

    job_id: JobId
    request_id: str
    spec: JobSpec
    #: Held until now.
    nodes: tuple[NodeName, ...]
    #: The newest that they have told.
    generation: Generation


class JobCancelRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    request_id: str


class JobStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job has its turn: nodes get ready for it."""

    job_id: JobId


class JobPutBack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job, that cannot go on for now, lets another one have its turn."""

    job_id: JobId
    instead: JobId


class MeasuringStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: these processes begin to measure the job's model, and some of them the links."""

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


class JobCaughtUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the steps that were lost by going back to a checkpoint are committed again."""

    job_id: JobId
    #: How far training is.
    step: int


class RateChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker computes more slowly than the others, or does so no more."""

    job_id: JobId
    worker: WorkerId
    incarnation: Incarnation
    #: 0.5: half as fast as the others; 1: as fast, or its process is another one.
    rate: float
    #: Seconds that it has computed per step, and that it would have at the others' pace.
    step_s: float = 0.0
    usual_s: float = 0.0
    #: So many steps have told it, in so many seconds; 0: its process is another one, or it was
    #: measured `alone`.
    steps: int = 0
    seconds: float = 0.0
    #: It stands by, and the step is one of another worker.
    alone: bool = False
    #: What holds its GPU back, by NVML; empty: nothing that was seen.
    hindrance: str = ""

    @property
    def is_measured(self) -> bool:
        """Return whether the rate was measured, of the same process as before. If not, another
        process took the worker's place."""
        return self.steps > 0 or self.alone

    def __str__(self) -> str:
        """Describe the change for operators, in half a sentence."""
        if not self.is_measured:
            return f"{self.worker} is another process, and its pace is not known yet"
        if self.rate == 1:
            return f"{self.worker} computes at the others' pace again"
        why = f" ({self.hindrance})" if self.hindrance else ""
        return f"{self.worker} computes at {self.rate:.2f} of the others' pace{why}"


class RecordsDiffer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Two nodes have told different things of the same step, of which all workers make one record:
    one of them is broken, or lies."""

    job_id: JobId
    #: What it is that they told of.
    record: Literal["step", "evaluation", "restore"]
    step: int
    nodes: tuple[NodeName, NodeName]
    #: Names of what differs.
    fields: tuple[str, ...]


class RecordsLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: no agent has the records of these steps any more, so metrics.jsonl skips them."""

    job_id: JobId
    first: int
    last: int
    why: str

    @property
    def steps(self) -> range:
        """The steps."""
        return range(self.first, self.last + 1)


class JobSucceeded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    #: Of a generation that came after the last step and has only saved the result.
    transition: ReconfigurationStats | None = None


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    reason: str
    #: It failed for want of this node alone, by the word of a worker there.
    node: NodeName | None = None
    transition: ReconfigurationStats | None = None
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()


class JobCancelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    transition: ReconfigurationStats | None = None


JobEnded = JobSucceeded | JobFailed | JobCancelled


class JobForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The job ended long ago: its files alone tell of it from now on."""

    job_id: JobId


JobEvent = (
    JobSubmitted
    | JobAdopted
    | JobCancelRequested
    | JobStarted
    | JobPutBack
    | MeasuringStarted
    | ProfileChosen
    | JobWaiting
    | CheckpointRequested
    | CheckpointPublished
    | SaveProblem
    | JobRestored
    | JobCaughtUp
    | RateChanged
    | RecordsDiffer
    | RecordsLost
    | JobEnded
    | JobForgotten
)
