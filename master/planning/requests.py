"""Requests for plans and their replies: plain data that can go to another process and back.

A first plan of a large cluster takes seconds, which the loop that hears a thousand nodes cannot
spare. So rules ask a `Planner`, which either has the reply or is told after the decision which one
is wanted. The loop goes on, and the rules ask again when the reply is there. By then the request
may be another one. Owns the requests and the remembered replies; must not know how a plan is made,
nor where.
"""

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.job.spec import JobSpec, RecoveryPolicy
from oobleck.core.plan import Plan, WorkerRate
from oobleck.master.planning.machines import Machines
from oobleck.planner.recovery.answer import Answer

#: Whose plan. `plain`: templates with nothing beside, where the answer by another policy failed.
PlanWanted = RecoveryPolicy | Literal["shadow", "normalise", "plain"]
#: Changes that nobody is forced to make.
VOLUNTARY: frozenset[PlanWanted] = frozenset({"uneven", "shadow", "normalise"})
#: Replies that are kept beside those that the last decision has asked for.
_KEPT = 8


class FirstPlanRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first plan of a job on these nodes."""

    spec: JobSpec
    machines: Machines
    nodes: tuple[NodeName, ...]
    generation: Generation


class NextPlanRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request for the plan that replaces `plan` on `nodes`. `most_nodes`: the largest number of
    nodes that any plan of the job had."""

    spec: JobSpec
    machines: Machines
    plan: Plan
    #: The newest plan of templates or recut; None: that is `plan`.
    base: Plan | None
    #: `uneven`: no node is lost, and some workers compute at other rates than `plan` counts on;
    #: `shadow`: nor that, and more nodes shall hold layers of `plan`; `normalise`: `plan` is
    #: re-routed, and somebody shall take over layers of lost workers.
    wanted: PlanWanted
    #: Of slow workers.
    rates: tuple[WorkerRate, ...] = ()
    nodes: tuple[NodeName, ...]
    most_nodes: int
    generation: Generation


PlanRequest = FirstPlanRequest | NextPlanRequest


class FirstPlanReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to `FirstPlanRequest`."""

    plan: Plan


class NextPlanReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The reply to `NextPlanRequest`."""

    answer: Answer


class Infeasible(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: no plan is possible; see `PlanInfeasible`."""

    causes: tuple[str, ...]


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An error of ours."""

    error: str


class PlanningFailed(PlanInfeasible):
    """Failure to plan because of an error of ours. A job that can go on as before does."""

    def __init__(self, wanted: PlanWanted, broken: Broken) -> None:
        super().__init__(
            f"an error of Oobleck's own: {wanted} failed with {broken.error}; please report it "
            "with the master's log"
        )


PlanReply = FirstPlanReply | NextPlanReply | Infeasible | Broken


class StillPlanning(Exception):
    """The reply is not there yet."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(f"a plan for {len(request.nodes)} nodes is being made")
        self.request = request


class Planner(Protocol):
    """Interface to the planner: the rules ask it, and it is told which plan they wait for."""

    def reply(self, request: PlanRequest) -> PlanReply:
        """Raises StillPlanning."""

    def prepare(self) -> None:
        """Prepare for plans: there is a job that will need them."""

    def want(self, request: PlanRequest | None) -> None:
        """Set the request that the newest decision waits for; None: it waits for no plan."""

    def foresee(self, requests: tuple[PlanRequest, ...]) -> None:
        """Set the requests that may come next, to work on while no decision waits. Earlier ones
        that are not among them are dropped."""

    def listen(self, tell: Callable[[], None]) -> None:
        """Call `tell` with each reply that comes."""


class Replies:
    """Cache of the planner's replies, bounded by what current decisions need."""

    def __init__(self) -> None:
        #: Those asked for last come last; to compare requests costs milliseconds where plans are
        #: large.
        self._known: dict[PlanRequest, PlanReply] = {}
        #: How many were asked for since the last decision.
        self._used = 0
        #: Those that nobody has asked for.
        self._ahead: dict[PlanRequest, PlanReply] = {}

    def __contains__(self, request: PlanRequest) -> bool:
        return request in self._known or request in self._ahead

    def reply(self, request: PlanRequest) -> PlanReply:
        """Raises StillPlanning."""
        reply = self._known.pop(request, None) or self._ahead.pop(request, None)
        if reply is None:
            raise StillPlanning(request)
        self._known[request] = reply
        self._used += 1
        return reply

    def add(self, request: PlanRequest, reply: PlanReply) -> None:
        self._known[request] = reply

    def add_ahead(self, request: PlanRequest, reply: PlanReply) -> None:
        """Store the reply to a request that nobody has made yet."""
        self._ahead[request] = reply

    def forget_ahead(self) -> None:
        self._ahead.clear()

    def forget_unused(self) -> None:
        """A decision has been made: what it did not ask for, but for the newest, is let go. One
        that asks for many at once finds all of them again."""
        spare = len(self._known) - self._used - _KEPT
        for request in list(self._known)[: max(0, spare)]:
            del self._known[request]
        self._used = 0
