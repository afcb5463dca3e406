"""Ways to go on after a change of the nodes, by the idea that they stand on, and which is taken.

- `templates` (Oobleck §5): a plan of templates for the nodes that live; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; nothing moves, so training goes on at once.

Owns the choice. Must not know how a policy comes to its plan.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.cost.stagecost import stage_cost
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.job.spec import RecoveryPolicy
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.programs.plan import Hop, Plan
from oobleck.planner.programs.proof import prove
from oobleck.planner.recovery.reconfigure import Reconfiguration, Templates, reconfigure
from oobleck.planner.recovery.reroute import reroute
from oobleck.planner.search.choose import keep_schedule, settled
from oobleck.planner.search.demand import Costs
from oobleck.planner.search.instantiate import Judge, by_formula
from oobleck.planner.units import listed

Policy = Literal["templates", "reroute"]
POLICIES: tuple[Policy, ...] = ("templates", "reroute")
#: State that moves in less than this is moved at once.
QUICK_S = 1.0
#: Micro-batches times hops that are list-scheduled: a second and a half, on all workers.
MOST_VISITS = 40_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What nodes and plans are before a change, and what plans are made of."""

    #: What runs, and the newest plan of templates: the same, unless it was re-routed since.
    plan: Plan
    base: Plan
    live: tuple[NodeName, ...]
    generation: Generation
    templates: Templates
    profile: Profile
    fault_tolerance: int
    #: The head shares layer 0's token embedding.
    tied: bool
    #: The job names the plan's schedule.
    schedule_named: bool = False
    judge: Judge = by_formula
    costs: Costs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One policy's answer to a change, or the one that is taken."""

    policy: Policy
    #: Its plan is settled: it can be handed out.
    found: Reconfiguration
    #: State that moves before the next step, and what that takes.
    moved_bytes: int
    stall_s: float
    step_s: float
    #: What follows at a step boundary behind it.
    then: Policy | None = None


def answer(change: Change, wanted: RecoveryPolicy) -> Answer:
    """What is done about a change.

    `auto`: a loss whose state moves in less than a second is answered by `templates`; else by
    `reroute` at once and by `templates` behind it, as far as both are possible. Where `reroute` is
    wanted by name and has no answer to a loss, `templates` takes its place and the reason says why.
    Raises PlanInfeasible where there is no answer.
    """
    if wanted == "reroute" and not frozenset(change.live).issuperset(change.plan.nodes):
        try:
            return _by_reroute(change)
        except PlanInfeasible as infeasible:
            found = _by_templates(change)
            reason = f"{found.found.reason}; not by reroute: {infeasible}"
            return replace(found, found=replace(found.found, reason=reason))
    found = _by_templates(change)
    if wanted == "auto" and found.stall_s >= QUICK_S:
        with suppress(PlanInfeasible):
            return replace(_by_reroute(change), then="templates")
    return found


def answers(change: Change) -> Mapping[Policy, Answer | PlanInfeasible]:
    """Every policy's own answer, or why it has none."""
    found: dict[Policy, Answer | PlanInfeasible] = {}
    for policy, make in _MAKERS.items():
        try:
            found[policy] = make(change)
        except PlanInfeasible as infeasible:
            found[policy] = infeasible
    return found


def _by_templates(change: Change) -> Answer:
    profile = change.profile
    found = reconfigure(
        change.base,
        change.live,
        templates=change.templates,
        profile=profile,
        fault_tolerance=change.fault_tolerance,
        generation=change.generation,
        judge=change.judge,
        costs=change.costs,
    )
    plan = settled(keep_schedule(found.plan, profile), profile)
    moved_bytes, busiest_bytes = _moves(change, plan)
    return Answer(
        policy="templates",
        found=replace(found, plan=plan),
        moved_bytes=moved_bytes,
        stall_s=busiest_bytes / profile.links.inter_node_bytes_per_s,
        step_s=estimate_step(plan, profile, tied=change.tied).step_s,
    )


def _by_reroute(change: Change) -> Answer:
    plan, alive = change.plan, frozenset(change.live)
    gone = sorted(set(plan.nodes) - alive)
    if not gone:
        raise PlanInfeasible("no node is lost whose micro-batches could go elsewhere")
    lost = {worker for worker in plan.workers if worker.node in gone}
    profile = change.profile
    routed = reroute(plan, lost, generation=change.generation, ticks=_hop_ticks(profile))
    if positions := listed_routes(routed):
        routes = [routed.routes[position] for position in positions]
        if sum(route.microbatches * len(route.hops) for route in routes) > MOST_VISITS:
            raise PlanInfeasible("so many micro-batches on so many hops take too long to schedule")
        routed, step_s = _under_best_schedule(with_listing(routed, profile), change)
        prove(routed)
    else:  # the routes that are left are those of whole pipelines
        routed = settled(keep_schedule(routed, profile), profile)
        step_s = estimate_step(routed, profile, tied=change.tied).step_s
    return Answer(
        policy="reroute",
        found=Reconfiguration(
            plan=routed,
            rule="reroute",
            reason=f"{listed(gone)} lost: others that hold the same layers take the micro-batches",
            # Only templates give layers to nodes that hold none.
            idle=tuple(sorted(alive - set(plan.nodes))),
        ),
        moved_bytes=0,
        stall_s=0.0,
        step_s=step_s,
    )


def _under_best_schedule(plan: Plan, change: Change) -> tuple[Plan, float]:
    """Routes that nobody helps keep the plan's schedule, or have their backwards split as all
    others, where memory allows that and a step takes less; and what a step takes."""
    profile = change.profile
    best = plan, estimate_listed(plan, profile, tied=change.tied).step_s
    split = replace(plan, schedule="zb-h1")
    if split != plan and not change.schedule_named:
        estimate = estimate_listed(split, profile, tied=change.tied)
        if estimate.peak_bytes <= profile.gpu_memory_bytes and estimate.step_s < best[1]:
            return split, estimate.step_s
    return best


_MAKERS: Mapping[Policy, Callable[[Change], Answer]] = {
    "templates": _by_templates,
    "reroute": _by_reroute,
}


def _hop_ticks(profile: Profile) -> Callable[[Hop], int]:
    """What a micro-batch takes a worker of a hop, in nanoseconds."""

    def ticks(hop: Hop) -> int:
        cost = stage_cost(profile, hop.first_layer, hop.last_layer, len(hop.workers))
        return round((cost.forward_s + cost.backward_s) * 1e9)

    return ticks


def _moves(change: Change, plan: Plan) -> tuple[int, int]:
    """Bytes of state that workers lack before `plan` can begin, and those of the node that lacks
    most."""
    held, received = change.plan.shards, Counter[NodeName]()
    for worker, shards in plan.shards.items():
        for shard in shards - held.get(worker, frozenset()):
            size = change.profile.layers[shard.layer].state_bytes
            received[worker.node] += -(-size // shard.parts)
    return received.total(), max(received.values(), default=0)
