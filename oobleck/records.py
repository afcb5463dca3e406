"""Plain frozen records of jobs and nodes, as a master reports them.

`details` has all that the command prints with --json, including values without a field here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oobleck.cli.output.text import ENDED, plain
from oobleck.core.ids import JobId, NodeName
from oobleck.proto import control_pb2 as pb


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    id: JobId
    name: str
    #: One of queued, starting, profiling, running, reconfiguring, waiting for nodes, succeeded,
    #: failed or cancelled.
    state: str
    #: Reason of that state; empty where it is obvious.
    reason: str
    #: Last committed step; 0: none so far.
    step: int
    steps: int
    #: Loss of the last step; None: it was not finite, or there is none.
    loss: float | None
    generation: int
    #: Number of further nodes that can be lost, whichever they are, without losing a layer.
    can_lose: int
    tokens_per_s: float
    #: Path of the newest checkpoint; None: there is none.
    checkpoint: str | None
    #: Folder of the job's files on the master's host.
    directory: str
    details: Mapping[str, Any] = field(repr=False)

    @property
    def ended(self) -> bool:
        return self.state in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: NodeName
    #: One of live, draining, drained, quarantined, disconnected, lost or left (lost on purpose).
    state: str
    reason: str
    hostname: str
    workers: int
    device: str
    #: Job that it works on; None: none.
    job: JobId | None
    details: Mapping[str, Any] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    step: int
    path: str


def job_status(told: pb.JobStatus) -> JobStatus:
    return JobStatus(
        id=JobId(told.job_id),
        name=told.name,
        state=told.state,
        reason=told.reason,
        step=told.committed_step,
        steps=told.steps,
        loss=told.loss if told.HasField("loss") else None,
        generation=told.generation,
        can_lose=told.can_lose,
        tokens_per_s=told.tokens_per_s,
        checkpoint=told.checkpoint or None,
        directory=told.directory,
        details=plain(told),
    )


def node(told: pb.NodeInfo) -> Node:
    return Node(
        name=NodeName(told.node),
        state=told.state,
        reason=told.reason,
        hostname=told.hostname,
        workers=told.worker_slots,
        device=told.device,
        job=JobId(told.job_id) if told.job_id else None,
        details=plain(told),
    )
