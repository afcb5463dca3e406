"""Context of a worker process, from its launch to its end; all of its parts share it."""

from dataclasses import dataclass

from oobleck.core.ids import JobId, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.worker.runtime.control import Control, FaultInjector
from oobleck.worker.runtime.records import RecordLog
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import TrainingProgress
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.links.hub import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Context of one worker of one job; it outlives generations."""

    worker: WorkerId
    job: JobSpec
    job_id: JobId
    #: Instructions from the agent, and reports to it.
    control: Control
    faults: FaultInjector
    timeline: Timeline
    stopwatch: Stopwatch
    #: Device of the worker, and its connections to the other members of a generation.
    connector: Connector
    #: Links to the other workers, for the worker's whole life.
    links: Links
    #: Layers that the worker holds, and the steps that they have been trained for.
    state: ModelState
    progress: TrainingProgress
    #: Records of steps; the master may not have received the newest ones.
    records: RecordLog
    #: Bytes per message when state moves between workers.
    chunk_bytes: int
    #: SHA-256 of the training data.
    data: bytes
    #: SHA-256 of the initial weights if some of the model exists only in their files; else empty.
    base: bytes
    #: SHA-256 of the inputs that must be equal on every node: data and initial weights.
    inputs: bytes
