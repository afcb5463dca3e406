"""Journaled events of jobs: requests, turns, plans, checkpoints, ends.

Owns the causes of plans (`Cause`), the observations of failures (`Evidence`, which events of nodes
carry too), and the statistics of transitions into a generation (`ReconfigurationStats`). Must not
know what the events change.
"""

from typing import Any, Literal, get_args

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, CheckpointSaved, Measure, Restored, SaveFailed
from oobleck.core.plan import Plan, WorkerRate
from oobleck.core.profile import Profile
from oobleck.planner.recovery.course import MOVING, is_base
from oobleck.planner.recovery.rules import Next
from oobleck.proto.types import WorkerExited

#: Phases of the transition into a generation, in order: detecting the loss, planning, waiting for
#: enough nodes; then workers leave the previous generation, meet, move layers, and do the first
#: step.
Phase = Literal["detect", "plan", "waiting", "abort", "rendezvous", "transfer", "first_step"]
PHASES: tuple[Phase, ...] = get_args(Phase)
#: Cause of a plan.
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


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Observation of a failure, made `ago_s` before the event that carries it."""

    #: Kind of observer. agent: of a process that it started; peer: a worker, of another one;
    #: stream: the master, of an agent's session; worker: of itself.
    by: Literal["agent", "peer", "stream", "worker"]
    #: Node, worker, or `master`.
    observer: str
    #: Node or worker; empty: the observer cannot tell.
    about: str
    saw: str
    ago_s: float = 0.0
    #: End of the process, where the observer is its `agent`.
    exited: WorkerExited | None = None


class ReconfigurationStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of the transition into a generation, as far as it went."""

    #: Seconds by `Phase`; they add up to `total_s`.
    phases: dict[str, float]
    total_s: float
    #: Step that was begun and is done again; None: none.
    redo_step: int | None
    rolled_forward: bool
    received_bytes: int
    #: Part of the received bytes that arrived while the previous generation trained on.
    fed_bytes: int = 0
    #: Seconds between the last step before and the first step after, less one usual step; None: not
    #: known.
    stall_s: float | None = None
    #: Micro-batches of the redone step that did not have to be computed again.
    salvaged_microbatches: int = 0
    #: Workers that never left the previous generation, if this one committed no step.
    unanswered: tuple[WorkerId, ...] = ()
    #: True if phases are missing because the master restarted meanwhile.
    master_restarted: bool


class StandByFor(msgspec.Struct, frozen=True, kw_only=True):
    """Least time for which a slow worker stands by, even if it is measured as faster before."""

    worker: WorkerId
    incarnation: Incarnation
    seconds: float


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """Best answer that was not taken, and the steps expected of it until the next loss."""

    policy: str
    rule: str
    value: float


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """Expectation of a plan by the planner, computed from the job's profile."""

    step_s: float
    #: Time without a committed step.
    stall_s: float
    #: Part of it in which state moves; None: not known.
    transfer_s: float | None = None
    #: Time of work that is done again; None: not known.
    redone_s: float | None = None
    #: State that nodes receive, before the switch too; 0: none, or unknown.
    moved_bytes: int = 0
    #: Steps until the next loss is expected; None: nothing was compared.
    value: float | None = None
    runner_up: RunnerUp | None = None


class PlanMade(Assign, frozen=True, kw_only=True, tag=True):
    """Event: the next generation's plan, which its nodes enter as `Assign` says."""

    job_id: JobId
    #: Processes of the plan's workers, in rank order.
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
    #: Processes of the workers that leave.
    leaving_incarnations: tuple[Incarnation, ...] = ()
    #: Workers of the plan whose processes were not up yet.
    starting: tuple[WorkerId, ...] = ()
    #: Series of torch that the plan's nodes have; empty: more than one, or not known.
    torch: str = ""
    #: Engine that the plan's nodes have (`oobleck.host.versions`).
    engine: str
    #: Policy that made the plan (`oobleck.planner.recovery.policies`).
    policy: str = MOVING
    #: Policy whose plan is to follow at a step boundary; empty: none.
    then: Next | Literal[""] = ""
    #: Prediction for the plan; None: there is none, as for a first plan.
    expected: Expected | None = None
    #: True if the previous plan, for a step boundary, was never entered: this plan replaces the
    #: plan in training.
    passes_over: bool = False
    #: Rates of slow workers on nodes that stand by, when the plan was made.
    standing_by: tuple[WorkerRate, ...] = ()
    #: Least stand-by times of those workers that were in the previous plan.
    stand_by_for: tuple[StandByFor, ...] = ()
    #: Statistics of the previous generation, if it committed no step.
    overtaken: ReconfigurationStats | None = None
    #: Observations of failures that no event has carried yet.
    evidence: tuple[Evidence, ...] = ()

    @property
    def assign(self) -> Assign:
        """Assignment as agents and workers receive it."""
        return Assign(**{name: getattr(self, name) for name in Assign.__struct_fields__})

    @property
    def is_base(self) -> bool:
        """True if later plans start from this plan's pipelines rather than from an earlier
        plan's."""
        return is_base(self.policy, self.rule)


class PlanFound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: agents run a plan that the journal lacks, and some of its nodes are missing. Kept to
    know which layers workers hold."""

    job_id: JobId
    plan: Plan


class FirstStepCommitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the newest generation has committed its first step."""

    job_id: JobId
    generation: Generation
    step: int
    transition: ReconfigurationStats
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()
    #: Unix time of the last step of the previous generations, by the clock of a worker's host; 0:
    #: not known.
    trained_until: float = 0.0


class FollowUpDropped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the newest plan's follow-up is given up: none is worth it, or planning failed."""

    job_id: JobId
    generation: Generation
    reason: str


PlanEvent = PlanMade | PlanFound | FirstStepCommitted | FollowUpDropped


class JobSubmitted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    request_id: str
    spec: JobSpec
    #: Profile in the file that the job names.
    profile: Profile | None = None
    #: True: the job ends as soon as its profile is measured.
    profile_only: bool = False


class JobAdopted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: this master takes over a job that nodes train and that it did not know."""

    job_id: JobId
    request_id: str
    spec: JobSpec
    #: Nodes that were held until now.
    nodes: tuple[NodeName, ...]
    #: Newest generation that they have reported.
    generation: Generation


class JobCancelRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    request_id: str


class JobStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the job becomes active, and nodes start workers for it."""

    job_id: JobId


class JobPutBack(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the active job, which cannot continue for now, returns to the queue and another one
    becomes active."""

    job_id: JobId
    instead: JobId


class MeasuringStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: these processes begin to measure the job's model, and some of them the links."""

    job_id: JobId
    wish: Measure
    workers: tuple[tuple[WorkerId, Incarnation], ...]
    #: Reason why the stored profile of that key is not used; empty: there is none.
    passed_over: str = ""


class ProfileChosen(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Profile by which all plans of the job are made."""

    job_id: JobId
    source: Literal["measured", "stored", "file", "estimate"]
    #: None: the estimate, which follows from the job.
    profile: Profile | None
    #: Name under which it is stored; empty: it is not.
    key: str
    reason: str
    #: Notes on how it was measured.
    notes: dict[str, Any] = {}


class JobWaiting(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: no plan is possible until more nodes are ready."""

    job_id: JobId
    causes: tuple[str, ...]


class CheckpointRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request of an operator for a checkpoint. Requests of a job are numbered from 1."""

    job_id: JobId
    request_id: str
    number: int


class CheckpointPublished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Checkpoint from which the job can go on."""

    job_id: JobId
    saved: CheckpointSaved


class SaveProblem(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a checkpoint or the output could not be written; it is retried."""

    job_id: JobId
    failed: SaveFailed


class JobRestored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the workers have loaded a checkpoint and continue from it."""

    job_id: JobId
    restored: Restored
    #: True: the job began with it, instead of with initial weights.
    resumed: bool
    #: Committed steps that are done again.
    lost_steps: int


class JobCaughtUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the steps undone by the return to a checkpoint are committed again."""

    job_id: JobId
    #: Step that training has reached.
    step: int


class RateChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a worker's relative speed has changed."""

    job_id: JobId
    worker: WorkerId
    incarnation: Incarnation
    #: Relative speed: 0.5 is half as fast as the others; 1 is as fast, or a new process.
    rate: float
    #: Its compute seconds per step, and those at the others' pace.
    step_s: float = 0.0
    usual_s: float = 0.0
    #: Steps that the rate is from, and their time. 0: a new process, or measured `alone`.
    steps: int = 0
    seconds: float = 0.0
    #: True if the worker stands by: the compared step is another worker's.
    alone: bool = False
    #: Cause by NVML that slows its GPU; empty: none was seen.
    hindrance: str = ""

    @property
    def is_measured(self) -> bool:
        """True if the rate was measured, of the same process as before."""
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
    """Event: two nodes reported different results of one step. All workers compute the same record,
    so one of the nodes is broken or lying."""

    job_id: JobId
    #: Kind of the record.
    record: Literal["step", "evaluation", "restore"]
    step: int
    nodes: tuple[NodeName, NodeName]
    #: Names of the fields that differ.
    fields: tuple[str, ...]


class RecordsLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: no agent has the records of these steps any more, so metrics.jsonl skips them."""

    job_id: JobId
    first: int
    last: int
    why: str

    @property
    def steps(self) -> range:
        """Range of the lost steps."""
        return range(self.first, self.last + 1)


class JobSucceeded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    #: Statistics of a generation that only saved the result, after the last step.
    transition: ReconfigurationStats | None = None


class JobFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    reason: str
    #: Only node at fault, if the job failed because something is missing there, as one of its
    #: workers reported.
    node: NodeName | None = None
    transition: ReconfigurationStats | None = None
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()


class JobCancelled(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    job_id: JobId
    transition: ReconfigurationStats | None = None


JobEnded = JobSucceeded | JobFailed | JobCancelled


class JobForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an ended job is dropped from the state; its files stay."""

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
