"""Context of a worker process, from its launch to its end; all of its parts share it."""

from dataclasses import dataclass

from oobleck.core.ids import JobId, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.faults import FaultInjector
from oobleck.worker.runtime.records import RecordLog
from oobleck.worker.runtime.stopwatch import Stopwatch
from oobleck.worker.runtime.timeline import Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import TrainingProgress
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.links.hub import Links


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Context of one worker of one job, in all generations."""

    worker: WorkerId
    job: JobSpec
    job_id: JobId
    #: What the agent wants, and where reports to it go.
    control: Control
    faults: FaultInjector
    timeline: Timeline
    stopwatch: Stopwatch
    #: The worker's device and address.
    connector: Connector
    #: To the other workers, for as long as this one lives.
    links: Links
    #: The layers that it holds, and how far they are trained.
    state: ModelState
    progress: TrainingProgress
    #: What it has recorded and the master may not have.
    records: RecordLog
    #: State that moves goes by so many bytes at a time.
    chunk_bytes: int
    #: SHA-256 of the training data that it reads.
    data: bytes
    #: Of the initial weights, where a part of the model is in these alone; else empty.
    base: bytes
    #: SHA-256 of all inputs that must be the same on every node: data, initial weights.
    inputs: bytes
