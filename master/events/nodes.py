"""Journaled events of nodes and their processes: membership, losses, drains.

Must not know what the events change.
"""

from typing import Literal

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.master.events.jobs import Evidence
from oobleck.proto.types import NodeFacts


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an agent that was not known, or was lost, has started and is part of the cluster."""

    facts: NodeFacts
    #: True: the node has earlier workers that no plan counts on. They must go before it gets work.
    stale_workers: bool = False


class NodeYielded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Node whose workers were ended for another job, which has the turn meanwhile. It is no event
    of its own: it is the effect of `JobPutBack` on the job."""

    job_id: JobId
    node: NodeName


class NodeHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node trains a job that this master does not know, or has in its queue. Nothing is
    asked of it until that is over, the job gets its turn, or an operator decides."""

    node: NodeName
    job_id: JobId
    #: True: by the journal, the job waits in the queue. False: it has no job of that id, or another
    #: one.
    queued: bool = False


class NodeCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the agent has no workers any more that were stale, or of an unknown job."""

    node: NodeName


class UnknownJobEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an operator ended the workers of an unknown job; its nodes are held no longer."""

    job_id: JobId
    nodes: tuple[NodeName, ...]


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: NodeName
    incarnation: Incarnation
    #: left: its agent ends, by its own word. restarted: so are its workers, or they train a job
    #: that is not known here.
    cause: Literal["witnesses", "lease", "restarted", "left"]
    reason: str
    #: Time from the first evidence to this declaration.
    detect_s: float
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()
    #: True: the master was away too, and has not heard of the node since; nor was its agent alone
    #: started anew.
    with_master: bool = False


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: a worker process that the plan counts on is gone, and its node lives."""

    job_id: JobId
    worker: WorkerId
    incarnation: Incarnation
    reason: str
    detect_s: float
    #: Word of its agent; None: the agent did not see it end.
    evidence: Evidence | None = None
    #: Reason in its own words; empty: none.
    words: str = ""
    #: True: it had reported that it lost a peer before it ended.
    lost_peer: bool = False
    #: True: it made no progress, and its agent has killed it.
    hung: bool = False
    #: True: it has not ended. It takes the place of a lost one, and is not up yet.
    late: bool = False


class NodeLeftOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node cannot take part in the job until it registers anew."""

    job_id: JobId
    node: NodeName
    reason: str


class NodeReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: workers of the node do not come to a rendezvous of the others. All its workers are
    ended, and it gets new ones."""

    job_id: JobId
    node: NodeName
    reason: str
    #: True: there is no way between the node and others.
    cut_off: bool = False
    #: True: its workers end only once the others have committed a step. Until then they may be
    #: asked for their layers.
    keeps_workers: bool = False
    #: Time from the first evidence to this event, where no other event tells it.
    detect_s: float = 0.0


class NodeDrainRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request to move the work off the node, and to give it no more until it is undrained."""

    node: NodeName
    #: Id of the operator's request. Empty: the agent's own wish, because it was told to end, or a
    #: GPU is sick.
    request_id: str
    reason: str
    #: True: the node is drained even where a job cannot go on without it.
    force: bool


class NodeKept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node is to be drained, and the job cannot go on without it for now."""

    node: NodeName
    job_id: JobId
    reason: str
    #: Number of the awaited checkpoint request; 0: none.
    save: int = 0


class NodeDrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node has no work any more, nor anything that others need."""

    node: NodeName
    #: Job that must do without it from one moment to the next; None: none.
    job_id: JobId | None = None
    reason: str = ""


class NodeQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node fails again and again; it is drained, and comes back by itself."""

    node: NodeName
    reason: str
    seconds: float
    #: True: the node starts no workers, and comes back as soon as it does.
    until_ready: bool = False


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node's quarantine is over, or its drain for a sick GPU."""

    node: NodeName
    reason: str


class NodeUndrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an operator undrained the node, which clears all that was held against it."""

    node: NodeName
    request_id: str
    #: Faults of its GPUs that are not to be held against it.
    excused: tuple[str, ...] = ()


class NodeForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: the node was lost long ago, or an operator wants it so, and nothing that is known of
    it counts any more."""

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
