"""Interface of a rule of `oobleck.master.rules.reconcile`: the context it reads and the decision it
returns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oobleck.core.ids import NodeName
from oobleck.core.units import head
from oobleck.host.detection import Detection
from oobleck.master.config import GIVES_WAY_S, Retention
from oobleck.master.events.jobs import (
    JobFailed,
)
from oobleck.master.events.nodes import (
    NodeLeftOut,
    NodeLost,
    NodeQuarantined,
    NodeReleased,
    NodeReset,
)
from oobleck.master.events.unions import Journaled
from oobleck.master.planning.requests import Planner, PlanRequest
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.evidence import carried, transition_stats
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

_OF_A_NODE = NodeLost | NodeLeftOut | NodeReset | NodeQuarantined | NodeReleased


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision of a rule: events, or what the rule waits for."""

    #: Events to be journaled and applied, in this order.
    actions: tuple[Journaled, ...] = ()
    #: Time of the next look without an event; None: no need.
    wake_at: float | None = None
    #: Reason of the actions, or of having none.
    reason: str = ""
    #: Reason why ready nodes are not in the plan; empty: all are.
    why_idle: str = ""
    #: True if later rules must not make plans meanwhile.
    holds_plans: bool = False
    #: Request for the awaited plan; the rules run again when the reply arrives.
    awaits: PlanRequest | None = None


def decide(events: Sequence[Journaled], reason: str = "") -> Decision | None:
    """Return the decision to journal `events`; None: there are none. `reason`: text of the
    decision; by default the reasons of events of nodes."""
    reasons = (f"{e.node}: {e.reason}" for e in events if isinstance(e, _OF_A_NODE))
    return Decision(actions=tuple(events), reason=reason or "; ".join(reasons)) if events else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Input of all rules."""

    state: ClusterState
    now: float
    timing: Detection
    #: Random text for the rendezvous of a plan made now.
    nonce: str
    planner: Planner
    retention: Retention = field(default_factory=Retention)
    #: Seconds for which a job with a checkpoint waits for nodes before it gives way.
    gives_way_s: float = GIVES_WAY_S


#: None: the rule does not apply. May raise StillPlanning.
Rule = Callable[[Context], Decision | None]
#: Rule about the active job.
JobRule = Callable[[Context, Job], Decision | None]


def left_out(job: Job, node: Node, reason: str) -> NodeLeftOut:
    """Return the event that the job continues without the node, until the node registers anew."""
    return NodeLeftOut(job_id=job.id, node=node.facts.node, reason=reason)


def fail(context: Context, job: Job, reason: str, node: NodeName | None = None) -> Decision:
    """Return the decision that ends a job that cannot continue. `node`: the only one at fault."""
    reason = head(reason)
    event = JobFailed(
        job_id=job.id,
        reason=reason,
        node=node,
        transition=transition_stats(job, context.now),
        evidence=carried(job, context.now),
    )
    return Decision(actions=(event,), reason=reason)
