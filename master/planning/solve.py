"""Construction and proof of the requested plans, from cached templates.

Every plan is proven before it is returned, as for `oobleck plan`: its programs cannot deadlock.
Pure, and cached: the results of one request serve the next ones. A first plan of a thousand nodes
takes a second or two. Must not know who asks, or why.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from oobleck.core.errors import PlanInfeasible, ProgramDeadlock
from oobleck.core.ids import Generation
from oobleck.core.job.spec import JobSpec
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.ties import Ties
from oobleck.master.planning.requests import (
    FirstPlanReply,
    FirstPlanRequest,
    Infeasible,
    NextPlanReply,
    NextPlanRequest,
    PlanReply,
    PlanRequest,
    profile_on,
    template_sizes,
)
from oobleck.planner.programs.compiler import proof
from oobleck.planner.recovery.course import MOVING, most_more
from oobleck.planner.recovery.policies import ask
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.firstplan import make_first_plan


def work_out(request: PlanRequest) -> PlanReply:
    """Return a proven plan, or the reason why there is none. Raises ProgramDeadlock, an internal
    error."""
    try:
        match request:
            case FirstPlanRequest():
                return FirstPlanReply(plan=_first_plan(request))
            case NextPlanRequest():
                return _next_plan(request)
    except PlanInfeasible as infeasible:
        return Infeasible(causes=infeasible.causes)


class AtOnce:
    """Planner that computes each reply when it is asked for."""

    def reply(self, request: PlanRequest) -> PlanReply:
        return _remembered(request)

    def prepare(self) -> None:
        """Do nothing: plans are made when asked for."""

    def want(self, request: PlanRequest | None) -> None:
        assert request is None, "nothing is ever waited for"

    def foresee(self, requests: tuple[PlanRequest, ...]) -> None:
        """Do nothing: plans are not made ahead."""

    def listen(self, notify: Callable[[], None]) -> None:
        """Do nothing: each reply is there at once."""


_remembered = lru_cache(maxsize=32)(work_out)


@lru_cache(maxsize=8)
def _catalogue(profile_of_any_memory: Profile, tied: Ties) -> Catalogue:
    return Catalogue(tied=tied)


def _known(spec: JobSpec, profile: Profile) -> Catalogue:
    return _catalogue(replace(profile, gpu_memory_bytes=1), spec.model.ties)


def _first_plan(request: FirstPlanRequest) -> Plan:
    """Make a job's first plan. Raises PlanInfeasible."""
    spec, machines = request.spec, request.machines
    profile = profile_on(spec, machines)
    return make_first_plan(
        _known(spec, profile),
        template_sizes(spec, machines, len(request.nodes)),
        request.nodes,
        profile=profile,
        microbatches=spec.training.microbatches,
        min_pipelines=spec.fault_tolerance + 1,
        generation=request.generation,
        wanted=spec.training.wanted_schedule,
        shadows=spec.recovery.shadows == "auto",
        racks=dict(request.racks),
    ).plan


def _next_plan(request: NextPlanRequest) -> NextPlanReply:
    """Make the plan that replaces another one. Raises PlanInfeasible."""
    spec, machines, plan = request.spec, request.machines, request.plan
    profile = profile_on(spec, machines)
    sizes = template_sizes(spec, machines, request.most_nodes)
    base = request.base or plan
    terms = Terms(
        profile=profile,
        sizes=sizes,
        fault_tolerance=spec.fault_tolerance,
        tied=spec.model.ties,
        schedule=spec.training.wanted_schedule,
        shadows=spec.recovery.shadows == "auto",
    )
    change = terms.change(
        _known(spec, profile),
        plan=plan,
        base=base,
        live=request.nodes,
        generation=request.generation,
        rates={one.worker: one.rate for one in request.rates},
        racks=dict(request.racks),
        most_more=most_more(spec.recovery.policy),
    )
    return NextPlanReply.of(ask(change, request.wanted))


def forget() -> None:
    """Clear all caches."""
    _remembered.cache_clear()
    _catalogue.cache_clear()
    proof.forget()


def rehearse(request: PlanRequest, reply: PlanReply) -> Iterator[None]:
    """Plan for the loss of one node of each pipeline size, after a first plan. This fills the
    judge's caches for the plans after a real loss."""
    if not isinstance(request, FirstPlanRequest) or not isinstance(reply, FirstPlanReply):
        return
    plan = reply.plan
    for pipeline in {len(pipeline.nodes): pipeline for pipeline in plan.pipelines}.values():
        # A real request for such a plan raises the error again.
        with suppress(PlanInfeasible, ProgramDeadlock):
            _next_plan(
                NextPlanRequest(
                    spec=request.spec,
                    machines=request.machines,
                    plan=plan,
                    base=None,
                    wanted=MOVING,  # the only policy that uses the judge
                    nodes=tuple(node for node in plan.nodes if node != pipeline.nodes[0]),
                    most_nodes=len(request.nodes),
                    generation=Generation(plan.generation + 1),
                    racks=request.racks,
                )
            )
        yield
