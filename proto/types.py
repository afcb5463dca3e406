"""Domain types of what agent and master tell each other.

The other modules of this package turn them into messages and back. Must not know protobuf.
"""

import msgspec

from oobleck.core.ids import Generation, Incarnation, JobId, NodeName
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Assign, Measure, Report
from oobleck.host.versions import Versions
from oobleck.proto.protocol import OLDEST


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """State of a master at one moment: the identity of its journal, and how far the journal goes.

    Each journal has a random id, its history, which compaction and a restore keep. A history has
    terms: a journal that was restored, copied or moved goes on in a higher one, so two masters
    never speak in one term of different events.
    """

    #: Identity of the authority's key; of a cluster without one, a random id.
    cluster: str
    #: Random id made with the journal.
    history: str
    #: From 1.
    term: int
    #: Random id of the head that began the term.
    begun_by: str
    #: Random id of the master's process.
    start: str
    #: Number of the last event on disk.
    sequence: int

    def outranks(self, other: "Head") -> bool:
        """Return whether an agent that acted on `self` must not act on `other`: both are of one
        history, and `other` speaks in an earlier term, or in the same one of another head."""
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
    #: Name of what one worker computes on; equal names mean equal speed.
    device_kind: str = ""
    versions: Versions = Versions()
    #: The newest that the agent speaks (`oobleck.proto.protocol`).
    newest_protocol: int = OLDEST


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
    #: Generations before it that the worker has entered since it last committed a step. It still
    #: holds their layers.
    also_entered: tuple[Generation, ...] = ()
    #: -1: none.
    committed_step: int = -1
    #: Newest generation that it has committed a step in; 0: none.
    stepped: Generation = Generation(0)
    finished: bool = False
    #: Most memory of its device since its generation began, and what of it was there before it
    #: held any layer; 0: not known.
    peak_memory_bytes: int = 0
    base_memory_bytes: int = 0
    #: Whole steps in `stepped`, and how long it has computed in them, without what it waited for;
    #: 0: not known.
    compute_steps: int = 0
    compute_s: float = 0.0
    #: See oobleck.core.messages.Alive; empty `doing`: not known yet.
    beats: int = 0
    doing: str = ""
    waiting: bool = False
    #: What holds its GPU back, by NVML; empty: nothing that is seen.
    hindrance: str = ""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of an agent at one moment."""

    #: None: no job.
    job_id: JobId | None = None
    #: Newest generation that the agent has acted on.
    generation: Generation = Generation(0)
    #: By slot.
    workers: tuple[WorkerStatus, ...] = ()
    #: The agent was told to end, and does as soon as the work has moved off.
    leaving: bool = False
    #: The agent ends at once, and its workers with it.
    ending: bool = False
    #: Why the node can start no workers, with the last words of what ended; empty: it can.
    trouble: str = ""
    #: How often in a row what they are forked from has ended.
    failed_starts: int = 0
    #: Why its GPUs should train nothing, by NVML, with the fix, a trouble a line; empty: they may.
    sick: str = ""
    #: What else is wrong with them; empty: nothing that is known.
    concern: str = ""

    @property
    def troubles(self) -> tuple[str, ...]:
        return tuple(self.sick.splitlines())

    def worker(self, slot: int) -> WorkerStatus | None:
        return next((worker for worker in self.workers if worker.slot == slot), None)


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """First message of a session."""

    #: The oldest that the agent speaks.
    protocol: int
    facts: NodeFacts
    status: NodeStatus
    #: The newest assignment with a plan that the node has acted on, without the job.
    running: "Assignment | None" = None
    #: The head whose assignment it acted on last; None: of a release before, or none.
    acted_on: Head | None = None


class WorkerExited(msgspec.Struct, frozen=True, kw_only=True, tag="exited"):
    pid: int
    #: Of an exit by itself; None when a signal killed it.
    exit_code: int | None
    signal: int | None
    log_tail: str = ""
    #: It was the kernel that killed it, for want of memory on the host.
    out_of_memory: bool = False

    def __post_init__(self) -> None:
        if (self.exit_code is None) == (self.signal is None):
            raise ValueError("exit_code: a process ends with either that or a signal")


class Hung(msgspec.Struct, frozen=True, kw_only=True, tag="hung"):
    """Report that the agent has killed the worker because it made no progress."""

    reason: str
    #: For how long.
    seconds: float


#: Something that happened to one worker, once: what its agent saw, or what it said.
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
    #: None: no job, or it is not told again.
    job: JobSpec | None = None
    #: The generation to enter; None: have a worker ready in every slot, and wait.
    assign: Assign | None = None
    #: By slot; `assign` is for these worker processes alone.
    worker_incarnations: tuple[Incarnation, ...] = ()
    #: Before the first plan: what the workers shall measure.
    measure: Measure | None = None
    #: Number of the newest wish for a checkpoint; 0: none.
    save: int = 0
    #: The node is drained: an agent that was told to end may.
    drained: bool = False
    #: Who tells it; None: a master of the release before.
    head: Head | None = None

    @property
    def generation(self) -> Generation:
        """Generation to enter; 0: none."""
        return self.assign.plan.generation if self.assign is not None else Generation(0)
