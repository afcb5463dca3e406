"""Journaled events of nodes and of the processes on them: who is part of the cluster, what is lost,
what is drained or put aside.

Owns the words for what somebody saw of a failure too (`Evidence`), which more events carry. Must
not know what the events change.
"""

from typing import Literal

import msgspec

from oobleck.core.ids import Incarnation, JobId, NodeName, WorkerId
from oobleck.proto.types import NodeFacts, WorkerExited


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Observation of a failure, and its observer. It was made `ago_s` before the event that carries
    it."""

    #: agent: of a process that it started; peer: a worker, of another one; stream: the master, of
    #: an agent's session; worker: of itself.
    by: Literal["agent", "peer", "stream", "worker"]
    #: Node, worker, or `master`.
    observer: str
    #: Node or worker; empty: the observer cannot tell.
    about: str
    saw: str
    ago_s: float = 0.0
    #: With `agent`: how the process ended.
    exited: WorkerExited | None = None


class NodeRegistered(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A start of an agent that was not known, or was lost, is part of the cluster."""

    facts: NodeFacts
    #: It has workers of before that no plan counts on: they must go before it gets work.
    stale_workers: bool = False


class NodeYielded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A node's workers were ended for another job, which has the turn meanwhile. No event of its
    own: what `JobPutBack` takes from the job that it is about."""

    job_id: JobId
    node: NodeName


class NodeHeld(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node trains a job that this master does not know, or has in its queue: nothing is asked
    of it until that is over, the job gets its turn, or an operator decides."""

    node: NodeName
    job_id: JobId
    #: By the journal, the job waits in the queue; else it has none of that id, or another one.
    queued: bool = False


class NodeCleared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The agent has no workers any more that were stale, or of a job that is not known."""

    node: NodeName


class UnknownJobEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An operator has the workers end of a job that this master does not know. Its nodes are held
    no longer."""

    job_id: JobId
    nodes: tuple[NodeName, ...]


class NodeLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    node: NodeName
    incarnation: Incarnation
    #: left: its agent ends, by its own word; restarted: so are its workers, or they train a job
    #: that is not known here.
    cause: Literal["witnesses", "lease", "restarted", "left"]
    reason: str
    #: From the first evidence to this declaration.
    detect_s: float
    #: As in PlanMade.
    evidence: tuple[Evidence, ...] = ()


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker process that the plan counts on is gone; its node lives."""

    job_id: JobId
    worker: WorkerId
    incarnation: Incarnation
    reason: str
    detect_s: float
    #: Its agent's word; None: the agent did not see it end.
    evidence: Evidence | None = None
    #: Its own word on why; empty: none.
    words: str = ""
    #: It had reported that it lost a peer before it ended.
    lost_peer: bool = False
    #: It did not get on, and its agent has killed it.
    hung: bool = False
    #: It has not ended: it takes the place of a lost one, and is not up yet.
    late: bool = False


class NodeLeftOut(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node cannot take part in the job: it gets no work of it until it registers anew."""

    job_id: JobId
    node: NodeName
    reason: str


class NodeReset(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Workers of the node do not come to a rendezvous of the others: all that it has are ended, and
    it gets new ones."""

    job_id: JobId
    node: NodeName
    reason: str
    #: Since there is no way between it and others.
    cut_off: bool = False
    #: Only once the others have committed a step: until then they may be asked for what they hold.
    keeps_workers: bool = False
    #: From the first evidence to this, where no other event tells.
    detect_s: float = 0.0


class NodeDrainRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The work on the node is to move off, and no more is to come until it is undrained."""

    node: NodeName
    #: Empty: the agent's own wish, because it was told to end, or a GPU is sick.
    request_id: str
    reason: str
    #: Also where a job cannot go on without the node.
    force: bool


class NodeKept(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node is to be drained, and the job cannot go on without it for now."""

    node: NodeName
    job_id: JobId
    reason: str
    #: Number of the request for a checkpoint that is waited for; 0: none.
    save: int = 0


class NodeDrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """No work is on the node any more, nor what others need."""

    node: NodeName
    #: The job that must do without it from one moment to the next; None: none.
    job_id: JobId | None = None
    reason: str = ""


class NodeQuarantined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node fails again and again: it is drained, and comes back by itself."""

    node: NodeName
    reason: str
    seconds: float
    #: It starts no workers, and comes back as soon as it does.
    until_ready: bool = False


class NodeReleased(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node's quarantine is over, or its drain for a sick GPU."""

    node: NodeName
    reason: str


class NodeUndrained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Event: an operator undrained the node, which clears all that was held against it."""

    node: NodeName
    request_id: str
    #: What is wrong with its GPUs, and is not to be held against it.
    excused: tuple[str, ...] = ()


class NodeForgotten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The node was lost long ago, and nothing that is known of it counts any more."""

    node: NodeName


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
