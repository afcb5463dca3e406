"""Messages between an agent and its workers, and the records that workers make.

One stream socket per worker carries these messages (`oobleck.host.ipc.channel`). If one end is
closed, the process there is gone.
"""

import math
from typing import Literal

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan
from oobleck.core.profile import LinkMeasurement, Measurement, Scope

#: What a span is part of. Those of one worker's `step` and `recovery` lie side by side or one
#: inside the other, since one thread does them all; `sum`s are under way beside them.
Category = Literal["step", "recovery", "sum"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Activity of a worker, or a wait of it."""

    name: str
    category: Category
    #: On the worker's monotonic clock, which all processes of a machine share.
    start_ns: int
    duration_ns: int

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """Recording by one worker, for one request."""

    #: Of the request.
    number: int
    generation: Generation
    #: Steps that were recorded from begin to end; none: the request came too late.
    steps: tuple[int, ...]
    #: The recorded steps, and how the worker came into its generation.
    spans: tuple[Span, ...]
    #: Of the recorded steps, when the device computed what was queued there; none: it is the host.
    device: tuple[Span, ...] = ()


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True, rename={"host": "store"}):
    """Meeting point of a generation's workers: at one of them, with a secret of their own."""

    #: The card of that worker: IDENTITY@HOST:PORT. Journals have it as `store`.
    host: str
    #: Unguessable and never used before, so that generations cannot mix.
    prefix: str
    #: Of the plan's workers, in their order; empty for one that is not up yet.
    cards: tuple[str, ...] = ()


class FaultRule(msgspec.Struct, frozen=True, kw_only=True):
    """Scripted fault of a drill: what happens to which worker at which point.

    Fault points of a step: `before:` or `after:` and an instruction's kind, such as
    `before:Forward`; in the vote `reduced` (all gradients are in hand) and `voting` (its own share
    is out); `evaluating`, before each instruction of an evaluation; `before:LayerFile` of a
    checkpoint. On the way into a generation, in this order: `before:rendezvous`, `before:connect`
    (all have arrived, and told where they stand), `before:agree`, `before:transfer`, `sending` and
    `receiving` (`microbatch` counts the pieces of state before it), `after:transfer`. Before the
    first: `before:measure`. While a plan is prepared, whose generation counts: `preparing` (it was
    announced), `feeding` (after each step, where this worker feeds others), `prepared` (it is
    ready), `before:take over`.
    """

    worker: WorkerId
    point: str
    #: Only in jobs of this name; None: in every job.
    job: str | None = None
    #: None: in whatever generation, and whatever step, the worker is in.
    generation: Generation | None = None
    step: int | None = None
    #: Only this micro-batch (global number); None: the first that comes.
    microbatch: int | None = None
    #: kill_worker, kill_node: SIGKILL (the node: agent and all its workers); hold: wait for a newer
    #: generation; stop: SIGSTOP itself; hang: the training thread alone never goes on; no_memory:
    #: what is done there fails for want of the device's memory; device_fails: the device itself.
    action: Literal[
        "kill_worker", "kill_node", "hold", "stop", "hang", "no_memory", "device_fails"
    ] = "kill_node"


# ---- agent to worker


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """First message to a new worker: who it is and what it will train."""

    worker: WorkerId
    job_id: JobId
    job: JobSpec
    #: Address that the worker's data-plane sockets bind to and others reach it by.
    address: str
    agent_pid: int
    #: Name of what the worker computes on; equal names mean equal speed.
    device_kind: str
    #: cpu, or cuda:N with the N-th GPU that the worker sees.
    device: str = "cpu"
    #: The GPUs that it sees, as CUDA_VISIBLE_DEVICES; empty: as its environment says.
    visible: str = ""
    #: The CPUs that it runs on, of those that its agent may; none: on any.
    cpus: tuple[int, ...] = ()
    #: After so long without a sign of life its kernel takes another one's host for gone.
    silence_s: float = 5.0
    #: Packages and directories whose functions the job may load; *: any.
    allow_code: tuple[str, ...] = ()
    #: Why the code that comes with the job is not on this node; empty: it is, or none comes.
    no_code: str = ""
    #: A process of this slot was ready for this job before: its code need not be tried again.
    passed: bool = False
    #: By then, on the host's monotonic clock, it is ready or is killed; None: whenever.
    ready_by: float | None = None
    #: A process of this slot has asked for its replacement in this job before.
    replaced: bool = False
    #: Of the node, among which a layer may be shared.
    workers: int = 1
    faults: tuple[FaultRule, ...] = ()
    #: For drills: copy tensors through buffers as between GPUs without NCCL.
    stage_everything: bool = False
    #: State that moves goes by so many bytes at a time.
    chunk_bytes: int = 64 << 20
    #: For drills: who stands in NCCL's place between CPUs: module and name of a function, and what
    #: it is given to return what makes groups.
    nccl: tuple[str, str, str] | None = None


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag="assign"):
    """Order to enter the plan's generation; repeats and older ones change nothing.

    The master's event has these fields, and agents and workers get them as they are: a field that
    is added here reaches them all. Give it a default, for the journals that lack it.
    """

    plan: Plan
    rendezvous: Rendezvous
    #: A change without a loss: workers switch after the step whose vote shows that all have this
    #: message. Otherwise whatever they wait for is released at once.
    boundary: bool
    #: A part of the model is with nobody: all go back to the newest checkpoint.
    restore: bool = False
    #: With `restore`: no checkpoint is known of. Where none is found either, all begin anew.
    anew: bool = False
    #: Workers of the plan before that are in no stage of this one: they leave with the switch.
    leaving: tuple[WorkerId, ...] = ()
    #: Layers are with those alone: all of both plans meet first, and hand over what is missing.
    handover: bool = False
    #: Fingerprint of the plan's data: an agent hands the plan to no worker that reads something
    #: else. Empty: to any.
    data: str = ""


class Save(msgspec.Struct, frozen=True, kw_only=True, tag="save"):
    """Order to take a checkpoint after the next step at which all have this wish.

    Wishes are numbered from 1 in a job; a newer one replaces those before it.
    """

    number: int


class LinkPair(msgspec.Struct, frozen=True, kw_only=True):
    """Pair of workers that measure the link between them; the first one reports it."""

    scope: Scope
    workers: tuple[WorkerId, WorkerId]
    rendezvous: Rendezvous


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Order before the first plan: measure the job's layers, then the links that the worker is part
    of.

    All get it at the same time, so that each measures under the load of the others, as in training.
    An `Assign` calls it off. Repeats and older attempts change nothing.

    `alone`: the worker stands by, and measures a micro-batch; the agent has it do so again and
    again, and counts the attempts.
    """

    attempt: int
    alone: bool = False
    meetings: tuple[LinkPair, ...] = ()
    #: Workers of a node, among which layers may be shared.
    gpus: int = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """Order to record where the time goes in these steps, and report it; a newer one replaces an
    older."""

    number: int
    first_step: int
    last_step: int


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """Order to answer with `Alive`."""


class Acknowledged(msgspec.Struct, frozen=True, kw_only=True, tag="acknowledged"):
    """Acknowledgement: the master has all records of steps, and evaluations, up to these on its
    disk."""

    step: int
    evaluation: int = 0


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """Order to end now: the job is over, cancelled, or the agent shuts down."""

    reason: str


ToWorker = Launch | Assign | Measure | Save | Record | Acknowledged | Ask | Stop


# ---- worker to agent


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Notice that the worker lets others call it, and waits for an `Assign`."""

    pid: int
    #: The worker's own, fit for a `Rendezvous`: who listens where.
    card: str
    #: Fingerprint of the data that it reads, in hexadecimal; those of one generation are equal.
    data: str = ""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Heartbeat of the training thread, sent by another thread even while the training thread
    hangs."""

    #: Grows with everything that the training thread begins or has waited for.
    beats: int
    #: What it has begun last, as a timeline calls it.
    doing: str
    #: It waits for another process.
    waiting: bool
    #: It is at files, which may take long.
    files: bool = False


class PhaseReached(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """Notice that the worker has ended a phase on its way into `generation`.

    aborted: it is out of the old generation's groups (a fresh worker is at once); received: it
    holds `layers`, which others may have had alone; joined: the new groups are up and the
    survivors' states known; transferred: it holds every layer it needs.
    """

    generation: Generation
    phase: Literal["aborted", "received", "joined", "transferred"]
    #: With `received`: those of the plan's layers that this worker holds, as the plan wants them.
    layers: tuple[int, ...] = ()
    #: With `joined`: the last step that is committed in the new generation's state.
    committed_step: int | None = None
    #: With `joined`: whether this worker applied a step whose vote it had not seen.
    rolled_forward: bool = False
    #: With `joined`: whether a step that was begun is done again, and how many of its micro-batches
    #: need not be.
    redo: bool = False
    salvaged_microbatches: int = 0
    #: With `transferred`: bytes this worker received, and how many of them while training went on.
    received_bytes: int = 0
    fed_bytes: int = 0
    #: Since the agent heard it, when the master is told.
    seconds_ago: float = 0.0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one committed step, a line of metrics.jsonl. Every worker makes the same one.

    A field that has a default is written only where it differs from it.
    """

    step: int
    #: None: not finite (the step was skipped by all).
    loss: float | None
    grad_norm: float | None
    tokens: int
    #: SHA-256 over the SHA-256 digests of the step's token rows in global sample order.
    samples_digest: str
    generation: Generation
    step_seconds: float
    #: Unix time of the commit.
    time: float
    #: The step's gradients were not finite, and nobody applied them.
    skipped: bool = False
    #: How many steps were, up to this one. The master counts them, not the workers.
    skipped_steps: int = 0
    #: The only node that told of it. Empty: several did, and said the same. By the master too.
    told_by: str = ""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one worker uses on its device."""

    #: Most at a time since its generation began.
    peak_bytes: int
    #: Of that, what it had before it held any layer.
    base_bytes: int


class ComputeTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time that one worker has computed in whole steps of its generation, without waiting. Steps of
    which only a part was repeated do not count."""

    steps: int
    seconds: float

    def plus(self, step_s: float) -> "ComputeTime":
        """Return the time with one more step."""
        return ComputeTime(steps=self.steps + 1, seconds=self.seconds + step_s)

    @property
    def makes_sense(self) -> bool:
        """True if the seconds are finite, and positive exactly if there are steps."""
        least = self.seconds > 0 if self.steps else self.seconds == 0
        return self.steps >= 0 and math.isfinite(self.seconds) and least


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    record: StepRecord
    memory: MemoryUse | None = None
    #: None: nothing is told.
    compute: ComputeTime | None = None


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one evaluation, a line of evaluations.jsonl. Every worker makes the same one."""

    #: Step after which the state was evaluated.
    step: int
    #: Mean over all samples, weighed as in training; None: not finite.
    loss: float | None
    samples: int
    generation: Generation
    seconds: float
    #: Unix time of its end.
    time: float
    #: The model's own, as means over the samples; None: not finite.
    metrics: dict[str, float | None] = {}
    #: As in StepRecord.
    told_by: str = ""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step: {self.step} is below 1")


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag="evaluated"):
    record: EvaluationRecord
    #: The generation that has found it beside a checkpoint; 0: it was made by this worker.
    restored_in: Generation = Generation(0)


class Handed(msgspec.Struct, frozen=True, kw_only=True, tag="handed"):
    """Records of steps that were stored beside the checkpoint from which `generation` resumes."""

    generation: Generation
    records: tuple[StepRecord, ...]


class PeerLost(msgspec.Struct, frozen=True, kw_only=True, tag="peer_lost"):
    """Notice that a peer's socket closed or an operation with it failed; the worker waits for an
    `Assign`."""

    generation: Generation
    step: int
    detail: str
    #: To whom there is no way from here; none: not known, or that all peers are reached.
    unreached: tuple[WorkerId, ...] = ()
    #: There is no way to the host of the rendezvous.
    host_unreached: bool = False
    #: No peer is gone: this worker has left them for what `detail` says, and meets them again.
    left: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Notice that the worker cannot go on; it exits after this.

    user: the job is at fault (out of memory, an exception in the model), and no retry helps. node:
    this host is (its data, device, disk, or way to the checkpoints), and another may be better.
    internal: an invariant of ours is broken, which another process may not meet.
    """

    kind: Literal["user", "node", "internal"]
    message: str


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """Notice that all steps are committed and the worker's share of the output is on disk."""

    generation: Generation
    step: int


class Measured(msgspec.Struct, frozen=True, kw_only=True, tag="measured"):
    """Measurements of the worker's layers, or the reason why there are none."""

    attempt: int
    measurement: Measurement | None
    #: Of one that stands by: what a micro-batch's forward and backward take in each kind of layer.
    alone_s: tuple[float, ...] | None = None
    problem: str = ""

    def __post_init__(self) -> None:
        if not all(0 < seconds < math.inf for seconds in self.alone_s or ()):
            raise ValueError(f"alone_s: {self.alone_s} are no times")


class LinkMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="link_measured"):
    """Measurement of a link, or the reason why there is none; from the first worker of its pair."""

    attempt: int
    scope: Scope
    link: LinkMeasurement | None
    problem: str = ""

    def __post_init__(self) -> None:
        if self.link is not None and self.link.scope != self.scope:
            raise ValueError(f"scope: {self.scope}, and the link is {self.link.scope}")


class Recorded(msgspec.Struct, frozen=True, kw_only=True, tag="recorded"):
    """Answer to a `Record`."""

    recording: Recording


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True, tag="checkpoint_saved"):
    """Notice that a checkpoint is published; from the worker that did it."""

    #: Steps applied.
    step: int
    #: Folder or URL of this checkpoint.
    path: str
    bytes: int
    #: From the step's end until it was published.
    seconds: float
    #: The newest wish (`Save`) that it answers; 0: none.
    request: int = 0


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True, tag="save_failed"):
    """Notice that a write of a checkpoint or of the final output failed. Training goes on. After
    the last step the write is retried for a minute, then the job fails."""

    what: Literal["checkpoint", "output"]
    step: int
    reason: str
    request: int = 0


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag="restored"):
    """Notice that all workers of the generation resume from a checkpoint. An empty path means from
    step 0, since the state was lost."""

    generation: Generation
    step: int
    path: str
    #: Newer checkpoints that could not be used, and why.
    passed_over: tuple[str, ...] = ()
    #: The job that has saved it; empty: not told.
    job: str = ""
    #: Why the records beside it cannot be used; empty: they can, or there are none.
    records_problem: str = ""


#: What the master is told of as it is.
Report = (
    Measured
    | LinkMeasured
    | PhaseReached
    | CheckpointSaved
    | SaveFailed
    | Restored
    | Evaluated
    | PeerLost
    | Failed
)
FromWorker = Report | Ready | Alive | Committed | Handed | Finished | Recorded


# ---- agent to warm process and back, framed as on a worker's channel


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag="fork"):
    """Order to fork a worker. It carries three descriptors (SCM_RIGHTS): the worker's end of its
    channel, the pipe that becomes its output, and the page of its `Marker`."""

    slot: int
    incarnation: Incarnation
    #: The job's kind of model: what it needs is loaded before, once for all workers.
    kind: str = "gpt"
    #: Likewise torch's compiler, and what the first of torch's optimizers loads.
    compiles: bool = False
    optimizes: bool = False


class Warm(msgspec.Struct, frozen=True, kw_only=True, tag="warm"):
    """Notice that the libraries are loaded; forks are fast from now on."""

    pid: int


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    incarnation: Incarnation
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="fork_failed"):
    """Notice that the kernel has no process or no memory to give; a later fork may succeed."""

    incarnation: Incarnation
    reason: str


class ChildExited(msgspec.Struct, frozen=True, kw_only=True, tag="child_exited"):
    """Exit status of a worker, as the kernel reports it."""

    pid: int
    #: Of an exit by itself; None when a signal killed it.
    exit_code: int | None
    signal: int | None


ToWarm = Fork
FromWarm = Warm | Forked | ForkFailed | ChildExited
