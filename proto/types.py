"""Domain types of the messages between agent and master.

The other modules of this package convert them to messages and back. Must not know protobuf.
"""

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.job.code import CodePolicy
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, Measure, Report
from oobleck.host.versions import Versions
from oobleck.proto.protocol import OLDEST


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """State of a master at one moment: the identity of its journal, and how far the journal goes.

    Each journal has a random id, its history, which compaction and a restore keep. A history has
    terms: a journal that was restored, copied or moved begins a higher one. So two masters never
    issue different events in one term.
    """

    #: Identity of the authority's key; in a cluster without one, a random id.
    cluster: str
    #: Random id made with the journal.
    history: str
    #: Counted from 1.
    term: int
    #: Random id of the head that began the term.
    begun_by: str
    #: Random id of the master's process.
    start: str
    #: Number of the last event on disk.
    sequence: int

    def outranks(self, other: "Head") -> bool:
        """Return whether an agent that acted on `self` must not act on `other`. That is so if both
        are of one history, and `other` is of an earlier term, or of the same term begun by another
        head."""
        if other.history != self.history:
            return False
        return (other.term, other.begun_by) != (self.term, self.begun_by) and (
            other.term <= self.term
        )

    def __str__(self) -> str:
        """Describe the head for operators."""
        return f"term {self.term} (begun by {self.begun_by[:8]}) of history {self.history[:8]}"


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a node that do not change during one start of its agent."""

    node: NodeName
    incarnation: Incarnation
    hostname: str
    address: str
    pid: int
    worker_slots: int
    device: str
    memory_per_worker_bytes: int
    #: Name of a worker's device; equal names mean equal speed.
    device_kind: str = ""
    versions: Versions = Versions()
    #: Newest protocol that the agent speaks (`oobleck.proto.protocol`).
    newest_protocol: int = OLDEST
    #: Id of its host's boot; empty: unknown.
    boot: str = ""
    #: Jobs' code that the node runs; None: unknown.
    code: CodePolicy | None = None
    #: Label of its rack, whose nodes may fail together; empty: unknown.
    rack: str = ""

    def outlives(self, known: "NodeFacts") -> bool:
        """Return whether the host was booted again since the agent of `known` started there, so
        that no process of that agent can be left."""
        here = (self.hostname, self.address) == (known.hostname, known.address)
        return here and self.boot != known.boot and "" not in (self.boot, known.boot)


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of one worker process as its agent sees it."""

    slot: int
    incarnation: Incarnation
    pid: int
    #: Empty until the worker is ready.
    card: str = ""
    #: Fingerprint of the data that it reads, in hexadecimal; empty until the worker is ready.
    data: str = ""
    #: Generation whose layers the worker holds; 0: none.
    generation: Generation = Generation(0)
    #: Earlier generations that the worker has entered since its last committed step; it still holds
    #: their layers.
    also_entered: tuple[Generation, ...] = ()
    #: -1: none.
    committed_step: int = -1
    #: Newest generation in which it committed a step; 0: none.
    stepped: Generation = Generation(0)
    finished: bool = False
    #: Peak memory of its device since its generation began, and the part that was in use before it
    #: held any layer; 0: unknown.
    peak_memory_bytes: int = 0
    base_memory_bytes: int = 0
    #: Whole steps in `stepped`, and its compute time in them, without waits; 0: unknown.
    compute_steps: int = 0
    compute_s: float = 0.0
    #: See oobleck.core.messages.Alive; empty `doing`: not known yet.
    beats: int = 0
    doing: str = ""
    waiting: bool = False
    #: Slowdown of its GPU, reported by NVML; empty: none seen.
    hindrance: str = ""
    #: Seconds that it took to be ready; 0: it is not, or unknown.
    up_s: float = 0.0


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of an agent at one moment."""

    #: None: no job.
    job_id: JobId | None = None
    #: Newest generation that the agent has acted on.
    generation: Generation = Generation(0)
    #: Ordered by slot.
    workers: tuple[WorkerStatus, ...] = ()
    #: True if the agent was asked to end, and will once the work has moved away.
    leaving: bool = False
    #: True if the agent ends at once, and its workers with it.
    ending: bool = False
    #: Reason why the node can start no workers, with the last output of the ended process; empty:
    #: it can.
    trouble: str = ""
    #: Consecutive times that the process they are forked from has ended.
    failed_starts: int = 0
    #: Reasons, by NVML, why its GPUs should not train, with the fix, one a line; empty: none.
    sick: str = ""
    #: Other faults of the GPUs; empty: none known.
    concern: str = ""

    @property
    def troubles(self) -> tuple[str, ...]:
        return tuple(self.sick.splitlines())

    def worker(self, slot: int) -> WorkerStatus | None:
        return next((worker for worker in self.workers if worker.slot == slot), None)


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a session."""

    #: Oldest protocol that the agent speaks.
    protocol: int
    facts: NodeFacts
    status: NodeStatus
    #: Newest assignment with a plan that the node has acted on, without the job.
    running: "Assignment | None" = None
    #: Head whose assignment it acted on last; None: no assignment yet.
    acted_on: Head | None = None


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    pid: int
    #: Code of a normal exit; None when a signal killed it.
    exit_code: int | None
    signal: int | None
    log_tail: str = ""
    #: True if the kernel killed it because the host was out of memory.
    out_of_memory: bool = False

    def __post_init__(self) -> None:
        if (self.exit_code is None) == (self.signal is None):
            raise ValueError("exit_code: a process ends with either that or a signal")


class Hung(msgspec.Struct, frozen=True, kw_only=True, tag="hung"):
    """Report that the agent killed the worker because it made no progress."""

    reason: str
    #: Time without progress.
    seconds: float


#: Single event of one worker: seen by its agent, or reported by the worker.
Happening = WorkerExited | Hung | Report


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report on the process `incarnation`, which has or had that slot of the agent."""

    job_id: JobId
    slot: int
    incarnation: Incarnation
    what: Happening


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """Desired state of a whole node; newer ones replace older ones."""

    version: int
    #: None: no job.
    job_id: JobId | None = None
    #: None: no job, or the job is not sent again.
    job: JobSpec | None = None
    #: Generation to enter; None: have a worker ready in every slot, and wait.
    assign: Assign | None = None
    #: Ordered by slot; `assign` is for these worker processes alone.
    worker_incarnations: tuple[Incarnation, ...] = ()
    #: Measurements by the workers before the first plan.
    measure: Measure | None = None
    #: Number of the newest wish for a checkpoint; 0: none.
    save: int = 0
    #: True if the node is drained: an agent that was asked to end may do so.
    drained: bool = False
    #: Head that issued it; None: it has begun no term.
    head: Head | None = None

    @property
    def generation(self) -> Generation:
        """Generation to enter; 0: none."""
        return self.assign.plan.generation if self.assign is not None else Generation(0)
