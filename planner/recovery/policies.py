"""Ways to go on after a change of the nodes, by the idea that they stand on, and which is taken.

- `templates` (Oobleck §5): a plan of templates for the nodes that live; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; nothing moves, so training goes on at once.
- `uneven` (Malleus): where nobody is lost, by how fast each worker is now.
- `shadow` (Bamboo, NSDI 2023) answers no loss itself: behind an answer, nodes get copies of layers
  that too few hold, and `reroute` finds them at the next loss.

Owns the choice. Must not know how a policy comes to its plan.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.job.spec import RecoveryPolicy
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.proof import prove
from oobleck.planner.recovery.reconfigure import Reconfiguration, Templates, can_lose, reconfigure
from oobleck.planner.recovery.reroute import reroute
from oobleck.planner.recovery.uneven.candidates import (
    Situation,
    candidates,
    hop_ticks,
    scheduled,
    staying_s,
)
from oobleck.planner.recovery.uneven.shares import reshared
from oobleck.planner.recovery.uneven.worth import Prospect
from oobleck.planner.search.choose import keep_schedule, settled
from oobleck.planner.search.demand import Costs
from oobleck.planner.search.instantiate import Judge, by_formula
from oobleck.planner.search.shadows import with_shadows
from oobleck.planner.units import count, format_bytes, listed

#: What comes behind an answer, at a step boundary; `shadow`: see `shadowed`.
Next = Literal["templates", "shadow"]

Policy = Literal["templates", "reroute", "uneven", "shadow"]
#: State that moves in less than this is moved at once.
QUICK_S = 1.0


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
    #: Whether nodes may hold layers that they do not run.
    shadows: bool = False
    judge: Judge = by_formula
    costs: Costs | None = None
    #: Of workers that are slower than profiled; those of others than the live ones do not matter.
    rates: Mapping[WorkerId, float] = field(default_factory=dict)
    #: `uneven` may leave out nodes with slow workers: whoever asks takes them back when they are
    #: well.
    stand_by: bool = False


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
    then: Next | None = None


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
    try:
        found = _by_templates(change)
    except PlanInfeasible:
        if wanted == "templates" or not change.shadows:
            raise
        # Fewer nodes than templates need may hold all layers as shadows.
        with suppress(PlanInfeasible):
            return _by_reroute(change)
        raise
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
    plan = found.plan.with_rates(change.rates)
    if plan.rates:
        plan = reshared(plan, profile)
    plan = keep_schedule(plan, profile)
    if change.shadows:
        # What moves for shadows must not keep the next step waiting.
        plan = with_shadows(
            plan,
            profile,
            fault_tolerance=change.fault_tolerance,
            held=change.plan.shards,
            moving=False,
        )
    plan = settled(plan, profile)
    moved_bytes, busiest_bytes = _moves(change, plan)
    return Answer(
        policy="templates",
        found=replace(found, plan=plan),
        moved_bytes=moved_bytes,
        stall_s=busiest_bytes / profile.links.inter_node_bytes_per_s,
        step_s=estimate_step(plan, profile, tied=change.tied).step_s,
        then=_then(plan, change),
    )


def _then(plan: Plan, change: Change) -> Next | None:
    tolerated = change.fault_tolerance
    if not change.shadows or _more_shadows(plan, change.profile, tolerated) is plan:
        return None
    return "shadow"


def shadowed(change: Change) -> Answer:
    """The running plan with all shadows that let more nodes be lost; its routes and schedule stay.
    For a step boundary. Raises PlanInfeasible where there are none to add."""
    profile = change.profile
    found = _more_shadows(change.plan, profile, change.fault_tolerance)
    if found is change.plan:
        raise PlanInfeasible("no layer can be on one node more, or none has to be")
    plan = settled(replace(found, generation=change.generation), profile)
    moved_bytes, busiest_bytes = _moves(change, plan)
    nodes = sorted({worker.node for worker in plan.shadows})
    return Answer(
        policy="shadow",
        found=Reconfiguration(
            plan=plan,
            rule="shadow",
            reason=f"{listed(nodes)} hold layers of others too, so that "
            f"{count(can_lose(plan), 'node')} can be lost",
            idle=tuple(sorted(set(change.live).difference(plan.nodes))),
        ),
        moved_bytes=moved_bytes,
        stall_s=busiest_bytes / profile.links.inter_node_bytes_per_s,
        step_s=estimate_step(plan, profile, tied=change.tied).step_s,
    )


def _more_shadows(plan: Plan, profile: Profile, fault_tolerance: int) -> Plan:
    return with_shadows(plan, profile, fault_tolerance=fault_tolerance, held=plan.shards)


def _by_reroute(change: Change) -> Answer:
    plan, alive = change.plan, frozenset(change.live)
    gone = sorted(set(plan.nodes) - alive)
    if not gone:
        raise PlanInfeasible("no node is lost whose micro-batches could go elsewhere")
    lost = {worker for worker in plan.workers if worker.node in gone}
    profile = change.profile
    ticks = hop_ticks(profile, plan.with_rates(change.rates))
    routed = reroute(plan, lost, generation=change.generation, ticks=ticks)
    routed, step_s = scheduled(routed.with_rates(change.rates), _situation(change))
    if listed_routes(routed):
        prove(routed)
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
        then=_then(routed, change),
    )


def uneven(change: Change) -> Answer:
    """The best plan for the rates that the workers of the running one have now; nobody is lost.

    Raises PlanInfeasible, which says why, where staying is better.
    """
    now = _situation(change)
    before_s = staying_s(now)
    offers = list(_by_rates(change, now))
    if not offers:
        raise PlanInfeasible("no other plan is better for the rates of the workers")
    best = max(offers, key=lambda one: _prospect(one).until_next_loss)
    if problem := _prospect(best).why_not(before_s):
        raise PlanInfeasible(f"{problem}: not worth a change")
    if listed_routes(best.found.plan):
        prove(best.found.plan)
    reason = (
        f"{_slow_ones(change)}: {best.found.rule}: a step takes {best.step_s:.4g} s in place of "
        f"{before_s:.4g} s, and {format_bytes(best.moved_bytes)} move"
    )
    return replace(best, found=replace(best.found, reason=reason))


def by_rates(change: Change) -> tuple[float, Sequence[Answer]]:
    """What a step of the running plan takes at the rates of now, and all that could be done."""
    now = _situation(change)
    return staying_s(now), list(_by_rates(change, now))


def _by_rates(change: Change, now: Situation) -> Iterator[Answer]:
    running = change.plan
    for each in candidates(now):
        plan = replace(each.plan, generation=change.generation)
        if (plan.holds, plan.routes, plan.schedule) == (
            running.holds,
            running.routes,
            running.schedule,
        ):
            continue
        moved_bytes, busiest_bytes = _moves(change, plan)
        yield Answer(
            policy="uneven",
            found=Reconfiguration(
                plan=plan,
                rule=each.rule,
                reason="",
                idle=tuple(sorted(set(change.live).difference(plan.nodes))),
            ),
            moved_bytes=moved_bytes,
            stall_s=busiest_bytes / change.profile.links.inter_node_bytes_per_s,
            step_s=each.step_s,
        )
    if change.stand_by and now.rates:
        slow = {worker.node for worker in now.rates}
        fewer = replace(change, live=tuple(node for node in change.live if node not in slow))
        with suppress(PlanInfeasible):
            found = _by_templates(fewer)
            without = replace(found.found, rule="stand by", idle=(*found.found.idle, *sorted(slow)))
            yield replace(found, policy="uneven", found=without)


def _situation(change: Change) -> Situation:
    return Situation(
        running=change.plan,
        base=change.base,
        rates={worker: rate for worker, rate in sorted(change.rates.items()) if rate != 1},
        profile=change.profile,
        tied=change.tied,
        schedule_named=change.schedule_named,
    )


def _prospect(one: Answer) -> Prospect:
    return Prospect(step_s=one.step_s, stall_s=one.stall_s)


def _slow_ones(change: Change) -> str:
    slow = [
        f"{worker} at {rate:.2g}"
        for worker, rate in sorted(change.rates.items())
        if rate != 1 and worker.node in change.live
    ]
    return f"{listed(slow)} of the profiled speed" if slow else "all workers are well again"


_MAKERS: Mapping[Policy, Callable[[Change], Answer]] = {
    "templates": _by_templates,
    "reroute": _by_reroute,
}


def _moves(change: Change, plan: Plan) -> tuple[int, int]:
    """Bytes of state that workers lack before `plan` can begin, and those of the node that lacks
    most."""
    held, received = change.plan.shards, Counter[NodeName]()
    for worker, shards in plan.shards.items():
        for shard in shards - held.get(worker, frozenset()):
            size = change.profile.layers[shard.layer].state_bytes
            received[worker.node] += -(-size // shard.parts)
    return received.total(), max(received.values(), default=0)
