"""Journaled events of nodes and their processes: membership, losses, drains.

Must not know what the events change.
"""

from typing import Literal

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.master.events.jobs import Evidence
from oobleck.proto.types import NodeFacts


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a new agent, or one whose node was lost, joins the cluster."""

    facts: NodeFacts
    #: True if the node has earlier workers that are in no plan; they must end before it gets work.
    stale_workers: bool = False


class NodeYielded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Node whose workers were ended for another job, which is active now. Not an event: it is a
    loss to a job by `JobPutBack`."""

    job_id: JobId
    node: NodeName


class NodeHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node trains a job that this master does not know, or has in its queue. It is left
    alone until its workers end, the job becomes active, or an operator decides."""

    node: NodeName
    job_id: JobId
    #: True if the job is in the queue by the journal; False if the journal has no such job, or
    #: another one by that id.
    queued: bool = False


class NodeCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node's workers that were stale, or of an unknown job, have ended."""

    node: NodeName


class UnknownJobEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an operator ended the workers of an unknown job; its nodes are held no longer."""

    job_id: JobId
    nodes: tuple[NodeName, ...]


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: NodeName
    incarnation: Incarnation
    #: left: its agent announced its end. restarted: so are its workers, or they train a job that is
    #: not known here.
    cause: Literal["witnesses", "lease", "restarted", "left"]
    reason: str
    #: Time from the first evidence to this declaration.
    detect_s: float
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()
    #: True if the master was away too and has not heard from the node since, rather than that only
    #: the agent was restarted.
    with_master: bool = False


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a worker process of the plan has ended, on a live node."""

    job_id: JobId
    worker: WorkerId
    incarnation: Incarnation
    reason: str
    detect_s: float
    #: Its agent's observation; None: the agent did not see it end.
    evidence: Evidence | None = None
    #: Reason in its own words; empty: none.
    words: str = ""
    #: True if it had reported a lost peer before it ended.
    lost_peer: bool = False
    #: True if its agent killed it for lack of progress.
    hung: bool = False
    #: True if it is a replacement that has not started in time, rather than ended.
    late: bool = False


class NodeLeftOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node cannot take part in the job until it registers anew."""

    job_id: JobId
    node: NodeName
    reason: str


class NodeReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: workers of the node did not join a rendezvous of the others. All its workers are ended
    and started anew."""

    job_id: JobId
    node: NodeName
    reason: str
    #: True if the data network between the node and others is cut.
    cut_off: bool = False
    #: True if its workers live until the others have committed a step, since their layers may still
    #: be needed.
    keeps_workers: bool = False
    #: Seconds from the first evidence to this event, where no other event has them.
    detect_s: float = 0.0


class NodeDrainRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a drain is requested: work moves off the node, and it gets none until it is
    undrained."""

    node: NodeName
    #: Id of the operator's request. Empty: the agent asked for it, since it was ordered to end, or
    #: a GPU is sick.
    request_id: str
    reason: str
    #: True if the node is drained even where a job cannot continue without it.
    force: bool


class NodeKept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node's drain waits, since the job cannot continue without it for now."""

    node: NodeName
    job_id: JobId
    reason: str
    #: Number of the awaited checkpoint request; 0: none.
    save: int = 0


class NodeDrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node's drain is done: no other needs it."""

    node: NodeName
    #: Job that loses the node abruptly, by a forced drain; None: none.
    job_id: JobId | None = None
    reason: str = ""


class NodeQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node fails repeatedly; it is drained for a time."""

    node: NodeName
    reason: str
    seconds: float
    #: True if the node cannot start workers, and the quarantine ends once it can.
    until_ready: bool = False


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node's quarantine is over, or its drain for a sick GPU."""

    node: NodeName
    reason: str


class NodeUndrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an operator undrained the node, which clears its failures."""

    node: NodeName
    request_id: str
    #: Faults of its GPUs that are ignored from now on.
    excused: tuple[str, ...] = ()


class NodeForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: all knowledge of a lost node is dropped, after a long time or by an operator."""

    node: NodeName
    #: Id of the operator's request; empty: it was lost long ago.
    request_id: str = ""


DrainEvent = (
    NodeDrainRequested | NodeKept | NodeDrained | NodeQuarantined | NodeReleased | NodeUndrained
)
NodeEvent = (
    NodeRegistered
    | NodeHeld
    | NodeCleared
    | NodeLost
    | WorkerLost
    | NodeLeftOut
    | NodeReset
    | DrainEvent
    | NodeForgotten
)
