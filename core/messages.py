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

#: Part that a span belongs to. One thread makes all `step` and `recovery` spans of a worker, so
#: these are adjacent or nested; `sum`s run beside them.
Category = Literal["step", "recovery", "sum"]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Activity or wait of a worker."""

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

    #: Number of the request.
    number: int
    generation: Generation
    #: Steps that were recorded from begin to end; none: the request came too late.
    steps: tuple[int, ...]
    #: Spans of the recorded steps, and of the worker's way into its generation.
    spans: tuple[Span, ...]
    #: Spans of the recorded steps on the device; none: the host computes.
    device: tuple[Span, ...] = ()


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Meeting point of a generation's workers: the host worker, and a secret of the generation."""

    #: Card of the host worker: IDENTITY@HOST:PORT.
    host: str
    #: Unguessable and never reused, so that generations cannot mix.
    prefix: str
    #: Cards of the plan's workers, in order; empty for one that is not up yet.
    cards: tuple[str, ...] = ()


class FaultRule(msgspec.Struct, frozen=True, kw_only=True):
    """Scripted fault of a drill: an action on a worker at a point.

    Fault points of a step: `before:` or `after:` and an instruction's kind, such as
    `before:Forward`; in the vote `reduced` (all gradients are complete) and `voting` (its own share
    is sent); `evaluating`, before each instruction of an evaluation; `before:LayerFile` of a
    checkpoint.

    On the way into a generation, in this order: `before:rendezvous`, `before:connect` (all have
    arrived and sent their state), `before:agree`, `before:transfer`, `sending` and `receiving`
    (`microbatch` counts the pieces of state before it), `after:transfer`. Before the first:
    `before:measure`.

    While a plan is prepared, whose generation counts: `preparing` (it was announced), `feeding`
    (after each step, where this worker feeds others), `prepared` (it is ready), `before:take over`.
    """

    worker: WorkerId
    point: str
    #: Job name; None: any job.
    job: str | None = None
    #: Generation and step; None: any.
    generation: Generation | None = None
    step: int | None = None
    #: Micro-batch (global number); None: the first one.
    microbatch: int | None = None
    #: kill_worker, kill_node: SIGKILL (the node: agent and all its workers); hold: wait for a newer
    #: generation; stop: SIGSTOP itself; hang: the training thread stops for ever; no_memory: the
    #: device is out of memory; device_fails: the device itself fails.
    action: Literal[
        "kill_worker", "kill_node", "hold", "stop", "hang", "no_memory", "device_fails"
    ] = "kill_node"


# ---- agent to worker


class Launch(msgspec.Struct, frozen=True, kw_only=True, tag="launch"):
    """First message to a new worker: its identity and its job."""

    worker: WorkerId
    job_id: JobId
    job: JobSpec
    #: Address that the worker's data-plane sockets bind to and others reach it by.
    address: str
    agent_pid: int
    #: Name of the worker's device; equal names mean equal speed.
    device_kind: str
    #: cpu, or cuda:N with the N-th GPU that the worker sees.
    device: str = "cpu"
    #: GPUs that it sees, as CUDA_VISIBLE_DEVICES; empty: as in its environment.
    visible: str = ""
    #: CPUs that it runs on, of those that its agent may; none: any.
    cpus: tuple[int, ...] = ()
    #: Silence after which its kernel takes another worker's host for gone.
    silence_s: float = 5.0
    #: Packages and directories whose functions the job may load; *: any.
    allow_code: tuple[str, ...] = ()
    #: Reason why the job's own code is not on this node; empty: it is, or the job has none.
    no_code: str = ""
    #: True if a process of this slot was ready for this job before: its code need not be tried
    #: again.
    passed: bool = False
    #: Deadline, on the host's monotonic clock, after which an unready worker is killed; None: none.
    ready_by: float | None = None
    #: True if a process of this slot has asked for its replacement in this job before.
    replaced: bool = False
    #: Bytes of its GPU that CUDA and libraries take before any model; 0: not known.
    context_bytes: int = 0
    #: Workers of the node, among which a layer may be shared.
    workers: int = 1
    faults: tuple[FaultRule, ...] = ()
    #: For drills: copy tensors through buffers as between GPUs without NCCL.
    stage_everything: bool = False
    #: Most bytes of a piece of moving state.
    chunk_bytes: int = 64 << 20
    #: For drills: replacement of NCCL between CPUs, as module and name of a function, and its
    #: argument. The function returns a maker of groups.
    nccl: tuple[str, str, str] | None = None


class Assign(msgspec.Struct, frozen=True, kw_only=True, tag="assign"):
    """Order to enter the plan's generation; repeats and older ones change nothing.

    The master's event has these fields, and agents and workers get them unchanged: a new field
    reaches them all. Give it a default, for the journals that lack it.
    """

    plan: Plan
    rendezvous: Rendezvous
    #: True for a change without a loss: workers switch after the step whose vote shows that all
    #: have this message. Otherwise all their waits are released at once.
    boundary: bool
    #: True if a part of the model has no holder: all return to the newest checkpoint.
    restore: bool = False
    #: With `restore`: no checkpoint is known. If none is found either, all begin anew.
    anew: bool = False
    #: Workers of the previous plan that are in no stage of this one: they leave with the switch.
    leaving: tuple[WorkerId, ...] = ()
    #: Layers have no other holders: all workers of both plans meet first and move them.
    handover: bool = False
    #: Fingerprint of the plan's data: an agent refuses the plan for a worker that reads other data.
    #: Empty: any data.
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
    """Order before the first plan: measure the job's layers, then the links of the worker.

    All get it at the same time, so that each measures under the load of the others, as in training.
    An `Assign` cancels it. Repeats and older attempts change nothing.

    `alone`: the worker stands by, and measures a micro-batch; the agent repeats this and counts the
    attempts.
    """

    attempt: int
    alone: bool = False
    meetings: tuple[LinkPair, ...] = ()
    #: Workers of a node, among which layers may be shared.
    gpus: int = 1


class Record(msgspec.Struct, frozen=True, kw_only=True, tag="record"):
    """Order to record and report the time spans of these steps; a newer one replaces an older."""

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
    """Notice that the worker accepts calls of others, and waits for an `Assign`."""

    pid: int
    #: Card of the worker for a `Rendezvous`: its identity and address.
    card: str
    #: Fingerprint of the data that it reads, in hexadecimal; equal for all workers of a generation.
    data: str = ""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag="alive"):
    """Heartbeat of the training thread, sent by another thread even while the training thread
    hangs."""

    #: Count of activities and waits of the training thread so far.
    beats: int
    #: Newest activity, by its name in a timeline.
    doing: str
    #: True if it waits for another process.
    waiting: bool
    #: True if it uses files, which may take long.
    files: bool = False


class PhaseReached(msgspec.Struct, frozen=True, kw_only=True, tag="phase"):
    """Notice that the worker has ended a phase on its way into `generation`.

    - aborted: it has left the old generation's groups (a fresh worker is at once);
    - received: it holds `layers`, which others may have held alone;
    - joined: the new groups are up and the survivors' states known;
    - transferred: it holds every layer it needs.
    """

    generation: Generation
    phase: Literal["aborted", "received", "joined", "transferred"]
    #: With `received`: layers of the plan that this worker holds, in the plan's shares.
    layers: tuple[int, ...] = ()
    #: With `joined`: the last committed step of the new generation's state.
    committed_step: int | None = None
    #: With `joined`: True if this worker applied a step whose vote it had not seen.
    rolled_forward: bool = False
    #: With `joined`: whether a step that was begun is redone, and how many of its micro-batches are
    #: saved.
    redo: bool = False
    salvaged_microbatches: int = 0
    #: With `transferred`: bytes that this worker received, and how many of them while training
    #: continued.
    received_bytes: int = 0
    fed_bytes: int = 0
    #: Age of the report when it is sent to the master.
    seconds_ago: float = 0.0


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Record of one committed step, a line of metrics.jsonl. Every worker makes the same one.

    A field that has a default is written only where it differs from it.
    """

    step: int
    #: None: not finite (all workers skipped the step).
    loss: float | None
    grad_norm: float | None
    tokens: int
    #: SHA-256 over the SHA-256 digests of the step's token rows in global sample order.
    samples_digest: str
    generation: Generation
    step_seconds: float
    #: Unix time of the commit.
    time: float
    #: True if the step's gradients were not finite, so that all skipped it.
    skipped: bool = False
    #: Count of skipped steps up to this one, kept by the master and not by workers.
    skipped_steps: int = 0
    #: Node whose report alone the record rests on; empty: several nodes sent equal records. Set by
    #: the master.
    told_by: str = ""


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one worker uses on its device."""

    #: Peak since its generation began.
    peak_bytes: int
    #: Part of the peak that was in use before it held any layer.
    base_bytes: int


class ComputeTime(msgspec.Struct, frozen=True, kw_only=True):
    """Compute time of one worker in whole steps of its generation, without waits. Partly redone
    steps do not count."""

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
    #: None: not measured.
    compute: ComputeTime | None = None


class EvaluationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one evaluation, a line of evaluations.jsonl. Every worker makes the same one."""

    #: Step after which the state was evaluated.
    step: int
    #: Mean over all samples, weighted as in training; None: not finite.
    loss: float | None
    samples: int
    generation: Generation
    seconds: float
    #: Unix time of its end.
    time: float
    #: Metrics of the model, as means over the samples; None: not finite.
    metrics: dict[str, float | None] = {}
    #: As in StepRecord.
    told_by: str = ""

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step: {self.step} is below 1")


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag="evaluated"):
    record: EvaluationRecord
    #: Generation that found it beside a checkpoint; 0: this worker made it.
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
    #: Workers that are unreachable from here; none: unknown, or all peers are reached.
    unreached: tuple[WorkerId, ...] = ()
    #: True if the host of the rendezvous is unreachable.
    host_unreached: bool = False
    #: True if no peer is gone: this worker has left them for the reason in `detail`, and meets them
    #: again.
    left: bool = False


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Notice that the worker cannot continue; it exits after this.

    user: the job is at fault (out of memory, an exception in the model), and no retry helps. node:
    this host is at fault (its data, device, disk, or path to the checkpoints), and another may be
    better. internal: an invariant of ours is broken, perhaps not in another process.
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
    #: Seconds of a micro-batch's forward and backward in each kind of layer, from a worker that
    #: stands by.
    alone_s: tuple[float, ...] | None = None
    problem: str = ""

    def __post_init__(self) -> None:
        wrong = next((one for one in self.alone_s or () if not 0 < one < math.inf), None)
        if wrong is not None:
            raise ValueError(f"alone_s: {wrong} is no time")


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
    """Notice that a checkpoint is published; from the worker that published it."""

    #: Count of applied steps.
    step: int
    #: Folder or URL of this checkpoint.
    path: str
    bytes: int
    #: Seconds from the step's end until it was published.
    seconds: float
    #: Newest wish (`Save`) that it answers; 0: none.
    request: int = 0


class SaveFailed(msgspec.Struct, frozen=True, kw_only=True, tag="save_failed"):
    """Notice that a write of a checkpoint or of the final output failed. Training continues. After
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
    #: Newer checkpoints that could not be used, with reasons.
    passed_over: tuple[str, ...] = ()
    #: Job that saved it; empty: unknown.
    job: str = ""
    #: Reason why the checkpoint's records cannot be used; empty: they can, or there are none.
    records_problem: str = ""


#: Reports that the master gets unchanged.
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
    #: Kind of the job's model, whose libraries are loaded before, once for all workers.
    kind: str = "gpt"
    #: True to load torch's compiler, and the modules of torch's optimizers, likewise.
    compiles: bool = False
    optimizes: bool = False


class Warm(msgspec.Struct, frozen=True, kw_only=True, tag="warm"):
    """Notice that the libraries are loaded; forks are fast from now on."""

    pid: int


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag="forked"):
    incarnation: Incarnation
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, kw_only=True, tag="fork_failed"):
    """Notice that the kernel lacks a process or memory; a later fork may succeed."""

    incarnation: Incarnation
    reason: str


class ChildExited(msgspec.Struct, frozen=True, kw_only=True, tag="child_exited"):
    """Exit status of a worker, as the kernel reports it."""

    pid: int
    #: Code of a normal exit; None when a signal killed it.
    exit_code: int | None
    signal: int | None


ToWarm = Fork
FromWarm = Warm | Forked | ForkFailed | ChildExited
