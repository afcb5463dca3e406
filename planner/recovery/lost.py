"""Answers to lost or joined nodes: by templates, and by re-routing around the lost ones."""

from collections import Counter
from dataclasses import replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan, place
from oobleck.core.units import comma_separated
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.programs.compiler.proof import prove
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.answer import Answer, Change, answer, idle, situation
from oobleck.planner.recovery.reconfigure import Reconfiguration, reconfigure
from oobleck.planner.recovery.reroute import add_load, reroute
from oobleck.planner.recovery.shadowed import shadows_behind
from oobleck.planner.recovery.uneven.candidates import hop_ticks, scheduled
from oobleck.planner.recovery.uneven.shares import reshared
from oobleck.planner.search.choose import keep_schedule, settled
from oobleck.planner.search.shadows import with_shadows


def by_templates(change: Change) -> Answer:
    """Answer with a plan of templates for the live nodes. Raises PlanInfeasible."""
    profile = change.profile
    base, why = _base_for_rates(change)
    found = reconfigure(
        base,
        change.live,
        templates=change.templates,
        profile=profile,
        fault_tolerance=change.fault_tolerance,
        generation=change.generation,
        judge=change.judge,
        costs=change.costs,
    )
    plan = found.plan.with_rates(change.rates)
    if plan.rates or change.base.rates:
        plan = reshared(plan, profile)
    plan = keep_schedule(plan, profile)
    if change.shadows:
        # State that moves for shadows must not delay the next step.
        plan = with_shadows(
            plan,
            profile,
            fault_tolerance=change.fault_tolerance,
            held=change.plan.shards,
            moving=False,
        )
    plan = settled(plan, profile)
    return answer(
        "templates",
        replace(found, plan=plan, reason=found.reason + why),
        estimate_step(plan, profile, tied=change.tied).step_s,
        change,
        then=shadows_behind(plan, change),
    )


def _base_for_rates(change: Change) -> tuple[Plan, str]:
    """Return the base, with the template's cut again for pipelines whose slow workers have
    recovered; and words about that for the reason."""
    base = change.base
    slow = [one.worker for one in base.rates if one.worker.node in change.live]
    well = [str(worker) for worker in slow if worker not in change.rates]
    if not well:
        return base, ""
    pipelines = [
        place(change.templates[len(each.nodes)], each.nodes, microbatches=each.microbatches)
        if len(each.nodes) in change.templates
        else each
        for each in base.pipelines
    ]
    plan = Plan.of_pipelines(pipelines, generation=base.generation, schedule=base.schedule)
    if plan.routes == base.routes:
        return base, ""
    who = f"{comma_separated(well)} {'is' if len(well) == 1 else 'are'}"
    return plan, f"; cut as templates are, since {who} slow no more"


def by_reroute(change: Change) -> Answer:
    """Answer with the running plan re-routed around lost workers. Raises PlanInfeasible."""
    plan, alive = change.plan, frozenset(change.live)
    gone = sorted(set(plan.nodes) - alive)
    if not gone:
        raise PlanInfeasible("no node is lost whose micro-batches could go elsewhere")
    lost = {worker for worker in plan.workers if worker.node in gone}
    profile = change.profile
    ticks = hop_ticks(profile, plan.with_rates(change.rates))
    routed = reroute(plan, lost, generation=change.generation, ticks=ticks)
    routed, step_s = scheduled(routed.with_rates(change.rates), situation(change))
    if listed_routes(routed):
        prove(routed)
    found = Reconfiguration(
        plan=routed,
        rule="reroute",
        reason=f"{comma_separated(gone)} lost: others that hold the same layers take the "
        "micro-batches",
        # Only templates give layers to nodes that hold none.
        idle=idle(change, plan),
    )
    return answer("reroute", found, step_s, change, then=shadows_behind(routed, change))


def least_step_s(change: Change) -> float:
    """Return the time of the busiest worker's compute in the running plan around lost nodes, below
    which no schedule of it comes. Raises PlanInfeasible."""
    plan, alive = change.plan, frozenset(change.live)
    lost = {worker for worker in plan.workers if worker.node not in alive}
    ticks = hop_ticks(change.profile, plan.with_rates(change.rates))
    routed = reroute(plan, lost, generation=change.generation, ticks=ticks)
    load = Counter[WorkerId]()
    for route in routed.routes:
        for hop in route.hops:
            add_load(load, hop, route.microbatches * ticks(hop))
    return max(load.values()) / 1e9
