"""Requests for plans and their replies: plain data that can go to another process and back.

A first plan of a large cluster takes seconds, which the loop that serves a thousand nodes cannot
spare. So rules ask a `Planner`. If it lacks the reply, they decide to wait, and the loop sends the
request and continues. When the reply arrives the rules run again; by then they may ask for another
plan.

Owns the requests, and the quick answers that follow from the machines alone. Must not know how a
plan is made, nor where.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import msgspec

from oobleck.core.errors import ModelTooLarge, NoNodeReady, PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan, WorkerRate
from oobleck.core.profile import InvalidProfile, Profile
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.machine import slowest_of
from oobleck.planner.profile.memory import budget_bytes
from oobleck.planner.recovery.answer import Answer, Exposure
from oobleck.planner.recovery.chooser import Candidates, Copying, Course
from oobleck.planner.recovery.course import PlanWanted
from oobleck.planner.recovery.rules import Next
from oobleck.planner.search.firstplan import node_specification, on_usable_gpus

#: Labels of racks, for nodes that have one.
Racks = tuple[tuple[NodeName, str], ...]


def racks_of(nodes: Iterable[Node]) -> Racks:
    return tuple((node.facts.node, node.facts.rack) for node in nodes if node.facts.rack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Properties of the nodes that a plan may use."""

    worker_slots: int
    memory_bytes: int
    #: Names of the devices that their workers compute on.
    device_kinds: frozenset[str] = frozenset()
    #: The job's profile; None: the estimate.
    profile: Profile | None = None

    @classmethod
    def of(cls, job: Job, nodes: Sequence[Node]) -> "Machines":
        """Return the properties of the weakest of `nodes`, since any of them may get any stage.
        Raises PlanInfeasible."""
        if not nodes:
            raise NoNodeReady("no node is ready", "start oobleck-agent on the machines to use")
        limit = job.spec.resources.memory_per_worker_bytes
        return cls(
            worker_slots=nodes[0].facts.worker_slots,
            memory_bytes=limit or min(node.facts.memory_per_worker_bytes for node in nodes),
            device_kinds=frozenset(node.facts.device_kind for node in nodes),
            profile=job.profiling.chosen.profile if job.profiling.chosen is not None else None,
        )


@lru_cache(maxsize=32)
def profile_on(spec: JobSpec, machines: Machines) -> Profile:
    """Return the job's profile, or its estimate, with the usable memory and GPUs.

    Raises ModelTooLarge.
    """
    limit = spec.resources.memory_per_worker_bytes
    try:
        if machines.profile is not None:
            memory = budget_bytes(limit, machines.memory_bytes)
            profile = replace(machines.profile, gpu_memory_bytes=memory)
        else:
            profile = estimate_profile(
                spec,
                gpus_per_node=machines.worker_slots,
                memory_per_worker_bytes=machines.memory_bytes,
                machine=slowest_of(machines.device_kinds, spec.training),
            )
    except InvalidProfile as error:  # for a model beyond all machines
        raise ModelTooLarge(f"the model's profile: {error}") from error
    return on_usable_gpus(
        profile, gpus=machines.worker_slots, min_nodes=spec.resources.min_nodes_per_pipeline
    )


def template_sizes(spec: JobSpec, machines: Machines, nodes: int) -> range:
    """Return the sizes of the templates that `nodes` nodes need. Raises PlanInfeasible."""
    sizes = _template_sizes(spec, machines, nodes)
    if isinstance(sizes, PlanInfeasible):
        raise sizes.with_traceback(None)
    return sizes


@lru_cache(maxsize=128)
def _template_sizes(spec: JobSpec, machines: Machines, nodes: int) -> range | PlanInfeasible:
    """Return the sizes, or the refusal. Both are cached, since a waiting job asks in every
    iteration."""
    try:
        return node_specification(
            profile_on(spec, machines),
            nodes=nodes,
            fault_tolerance=spec.fault_tolerance,
            min_nodes=spec.resources.min_nodes_per_pipeline,
            shadows=spec.recovery.shadows == "auto",
        )
    except PlanInfeasible as refusal:
        return refusal


class FirstPlanRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request for a job's first plan on these nodes."""

    spec: JobSpec
    machines: Machines
    nodes: tuple[NodeName, ...]
    generation: Generation
    racks: Racks = ()


class NextPlanRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Request for the plan that replaces `plan` on `nodes`. `most_nodes`: the largest number of
    nodes that any plan of the job had."""

    spec: JobSpec
    machines: Machines
    plan: Plan
    #: Newest plan of templates or recut; None: that is `plan`.
    base: Plan | None
    #: `uneven`: no node is lost, and some workers compute at other rates than `plan` assumes.
    #: `copies`: the rates are as assumed, and more nodes shall hold layers of `plan`. `moved`:
    #: `plan` is re-routed, and another worker shall take over layers of lost ones.
    wanted: PlanWanted
    #: Rates of slow workers.
    rates: tuple[WorkerRate, ...] = ()
    nodes: tuple[NodeName, ...]
    most_nodes: int
    generation: Generation
    racks: Racks = ()


PlanRequest = FirstPlanRequest | NextPlanRequest


class FirstPlanReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `FirstPlanRequest`."""

    plan: Plan


class NumberedCourse(msgspec.Struct, frozen=True, kw_only=True):
    """Course whose answers are named by their numbers."""

    first: int
    behind: int | None
    behind_late_s: float
    copying: Copying | None
    shadowing: Copying | None
    shadowed_s: float | None
    then: Next | None
    guarantee: int
    exposure: Exposure
    beyond: bool


class NextPlanReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `NextPlanRequest`: candidates, from which the client chooses by the current outlook.
    Each plan is in it once, since large plans take long to decode."""

    answers: tuple[Answer, ...]
    courses: tuple[NumberedCourse, ...]
    #: Candidates, with their courses left out.
    rest: Candidates

    @classmethod
    def of(cls, candidates: Candidates) -> "NextPlanReply":
        both = [each for course in candidates.courses for each in (course.first, course.behind)]
        answers = {id(each): each for each in both if each is not None}
        number = {key: place for place, key in enumerate(answers)}
        return cls(
            answers=tuple(answers.values()),
            courses=tuple(
                NumberedCourse(
                    first=number[id(course.first)],
                    behind=number.get(id(course.behind)),
                    behind_late_s=course.behind_late_s,
                    copying=course.copying,
                    shadowing=course.shadowing,
                    shadowed_s=course.shadowed_s,
                    then=course.then,
                    guarantee=course.guarantee,
                    exposure=course.exposure,
                    beyond=course.beyond,
                )
                for course in candidates.courses
            ),
            rest=replace(candidates, courses=()),
        )

    @property
    def candidates(self) -> Candidates:
        """Candidates with their courses."""
        courses = (
            Course(
                first=self.answers[one.first],
                behind=None if one.behind is None else self.answers[one.behind],
                behind_late_s=one.behind_late_s,
                copying=one.copying,
                shadowing=one.shadowing,
                shadowed_s=one.shadowed_s,
                then=one.then,
                guarantee=one.guarantee,
                exposure=one.exposure,
                beyond=one.beyond,
            )
            for one in self.courses
        )
        return replace(self.rest, courses=tuple(courses))


class Infeasible(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: no plan is possible; see `PlanInfeasible`."""

    causes: tuple[str, ...]


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply: planning failed by an internal error."""

    error: str


class PlanningFailed(PlanInfeasible):
    """Failure to plan because of an internal error. A job that can continue does."""

    def __init__(self, wanted: PlanWanted, broken: Broken) -> None:
        super().__init__(
            f"an error of Oobleck's own: {wanted} failed with {broken.error}; please report it "
            "with the master's log"
        )


PlanReply = FirstPlanReply | NextPlanReply | Infeasible | Broken


class StillPlanning(Exception):
    """Notice that the reply is not available yet."""

    def __init__(self, request: PlanRequest) -> None:
        super().__init__(f"a plan for {len(request.nodes)} nodes is being made")
        self.request = request


class Planner(Protocol):
    """Interface to the planner: rules ask for plans, and the loop names the awaited one."""

    def reply(self, request: PlanRequest) -> PlanReply:
        """Return the reply to `request`. Raises StillPlanning."""

    def prepare(self) -> None:
        """Prepare for plans: there is a job that will need them."""

    def want(self, request: PlanRequest | None) -> None:
        """Set the request that the newest decision waits for; None: it waits for no plan."""

    def foresee(self, requests: tuple[PlanRequest, ...]) -> None:
        """Set the requests that may come next, to work on while no decision waits. Earlier ones
        that are not among them are dropped."""

    def listen(self, notify: Callable[[], None]) -> None:
        """Call `notify` after each new reply."""
