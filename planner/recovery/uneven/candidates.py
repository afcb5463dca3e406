"""Plans for the rates that workers have now (Malleus), each with what a step of it takes.

- *as planned*: the routes of the base; also what ends a way around a worker that is
  well again.
- *reshare*: its pipelines with shares by their rates.
- *partial reroute*: some micro-batches go around slow workers.
- *recut*: its pipelines with fewer layers for slow workers, and shares by that; state moves.

The routes of the base, the newest plan of templates or recut, can be gone back to without moving
state as long as its workers are there. Where it was re-routed after a loss, only a way around slow
workers is left: whole pipelines come from templates. Owns the candidates. Must not know which is
worth a change.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hop
from oobleck.core.schedules import Schedule
from oobleck.core.ties import Ties
from oobleck.core.units import format_bytes
from oobleck.planner.cost.estimate import estimate_step, peak_bytes
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.cost.stagecost import stage_cost
from oobleck.planner.programs.compiler.schedule import splits_backward
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.recovery.rules import Rule
from oobleck.planner.recovery.uneven.around import around
from oobleck.planner.recovery.uneven.cuts import recut
from oobleck.planner.recovery.uneven.shares import reshared
from oobleck.planner.search.choose import keep_schedule, settled
from oobleck.planner.search.shadows import with_shadows

#: Micro-batches times hops that are list-scheduled: a second and a half, on all workers. As many of
#: each slow worker are moved around it in a second or two.
MOST_VISITS = 40_000
#: Of all moves around slow workers, how many are made: an order of compute has room for some.
_PARTS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
#: Of more visits one order alone is tried: whole routes are the better way where shares are large.
_FEW_VISITS = 2_000
#: All stages times the square of the model's layers: cut anew in a second or two, for all schedules
#: and choices of nodes.
_MOST_CUTS = 30_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan that is not proven yet."""

    rule: Rule
    plan: Plan
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Situation from which candidates are made."""

    running: Plan
    base: Plan
    rates: Mapping[WorkerId, float]
    profile: Profile
    #: The head shares layer 0's token embedding.
    tied: Ties
    schedule_named: bool = False
    #: As many nodes at a time shall be lost at no cost, by shadows where need be.
    shadows_for: int = 0


def staying_s(now: Situation) -> float:
    """Return the step time of the running plan at the rates as they are now."""
    plan = now.running.with_rates(now.rates)
    if not listed_routes(plan):
        return estimate_step(plan, now.profile, tied=now.tied).step_s
    listing = now.running.listing
    split = listing is None or listing.split
    return estimate_listed(
        with_listing(plan, now.profile, split=split), now.profile, tied=now.tied
    ).step_s


def candidates(now: Situation) -> Iterator[Candidate]:
    """Yield the candidates, in the order in which equal ones are preferred."""
    source = _whole_routes(now).with_rates(now.rates)
    if not listed_routes(source):
        yield from _of_pipelines("as planned", source, now)
        yield from _of_pipelines("reshare", reshared(source, now.profile), now)
    if source.rates:
        yield from _partial_reroutes(source, now)
    yield from recuts(source, now)


def _whole_routes(now: Situation) -> Plan:
    """The routes of the base on what workers hold now: the same layers, and shadows of others. The
    running plan, where they do not hold that."""
    try:
        return replace(now.base, holds=now.running.holds, listing=None, rates=())
    except ValueError:
        return now.running


def _of_pipelines(rule: Rule, plan: Plan, now: Situation) -> Iterator[Candidate]:
    """Yield the plan as a candidate, if it has room."""
    with suppress(PlanInfeasible):
        final, step_s = _settled(plan, now)
        yield Candidate(rule=rule, plan=final, step_s=step_s)


def _settled(plan: Plan, now: Situation) -> tuple[Plan, float]:
    """The plan of whole routes, and what a step takes. Raises PlanInfeasible."""
    final = settled(keep_schedule(plan, now.profile), now.profile)
    check_room(peak_bytes(final, now.profile), now)
    return final, estimate_step(final, now.profile, tied=now.tied).step_s


def recuts(source: Plan, now: Situation) -> Iterator[Candidate]:
    """The best one, if these are whole pipelines: under their schedule, or 1F1B, which keeps least
    and so lets stages grow most."""
    if listed_routes(source):
        return
    stages = sum(len(pipeline.stages) for pipeline in source.pipelines)
    if stages * source.layer_count**2 > _MOST_CUTS:
        return
    schedules: tuple[Schedule, ...] = (source.schedule, "1f1b")
    cuts = [recut(replace(source, schedule=s), now.profile) for s in dict.fromkeys(schedules)]
    found = [
        each
        for plan in cuts
        if plan.holds != source.holds
        for each in _of_pipelines("recut", _with_shadows_in_place(plan, now), now)
    ]
    if found:
        yield min(found, key=lambda each: each.step_s)


def _with_shadows_in_place(cut: Plan, now: Situation) -> Plan:
    """Return the plan with shares by its cuts; its shadows are those that the state held now
    allows. The others come at a step boundary behind it."""
    plan = keep_schedule(reshared(cut, now.profile), now.profile)
    held = now.running.shards
    tolerated = now.shadows_for
    return with_shadows(plan, now.profile, fault_tolerance=tolerated, held=held, moving=False)


def _partial_reroutes(source: Plan, now: Situation) -> Iterator[Candidate]:
    """The best one: by single hops alone, or by whole routes too."""
    ticks = hop_ticks(now.profile, source)
    visits = sum(route.microbatches * len(route.hops) for route in source.routes)
    if visits * len(source.rates) > MOST_VISITS:
        return
    many = visits > _FEW_VISITS
    best: Candidate | None = None
    for whole in (True,) if many else (False, True):
        for plan in around(source, ticks, whole=whole, parts=_PARTS[:1] if many else _PARTS):
            with suppress(PlanInfeasible):
                # Around who is only slow, a job that names a schedule has its backwards split by
                # that alone.
                split = not now.schedule_named or splits_backward(plan.schedule)
                routed, step_s = scheduled(plan, now, split=split)
                if best is None or step_s < best.step_s:
                    best = Candidate(rule="partial reroute", plan=routed, step_s=step_s)
    if best is not None:
        yield best


def scheduled(plan: Plan, now: Situation, *, split: bool = True) -> tuple[Plan, float]:
    """The plan with its listing, and what a step takes. Routes that nobody helps keep the plan's
    schedule, or have their backwards split as all others, where memory allows that and a step takes
    less. `split`: the listed routes' backwards are. Raises PlanInfeasible."""
    profile = now.profile
    routes = [plan.routes[position] for position in listed_routes(plan)]
    if not routes:  # whole micro-batches have moved
        return _settled(plan, now)
    if sum(route.microbatches * len(route.hops) for route in routes) > MOST_VISITS:
        raise PlanInfeasible("so many micro-batches on so many hops take too long to schedule")
    plan = with_listing(plan, profile, split=split)
    estimate = estimate_listed(plan, profile, tied=now.tied)
    if plan.schedule != "1f1b" and estimate.peak_bytes > profile.gpu_memory_bytes:
        plan = replace(plan, schedule="1f1b")  # it keeps least
        estimate = estimate_listed(plan, profile, tied=now.tied)
    check_room(estimate.peak_bytes, now)
    others = replace(plan, schedule="zb-h1")
    if others != plan and not now.schedule_named and len(routes) < len(plan.routes):
        other = estimate_listed(others, profile, tied=now.tied)
        if other.peak_bytes <= profile.gpu_memory_bytes and other.step_s < estimate.step_s:
            return others, other.step_s
    return plan, estimate.step_s


def check_room(needed: int, now: Situation) -> None:
    """A shadow that takes over has activations too. Raises PlanInfeasible where a worker needs more
    than it has, and more than the plan of templates needs."""
    room = now.profile.gpu_memory_bytes
    if needed > max(room, peak_bytes(now.base, now.profile)):
        raise PlanInfeasible(
            f"who takes the micro-batches needs {format_bytes(needed)} of {format_bytes(room)}; "
            "move state instead"
        )


def hop_ticks(profile: Profile, plan: Plan) -> Callable[[Hop], int]:
    """Return a function that gives the ticks of a hop: what a micro-batch takes one of its workers
    at the plan's rates, in nanoseconds. It raises PlanInfeasible where the profile has no time of a
    layer for so many workers."""
    known: dict[Hop, int] = {}

    def ticks(hop: Hop) -> int:
        if hop not in known:
            cost = stage_cost(profile, hop.first_layer, hop.last_layer, len(hop.workers))
            cost = cost.at(plan.rate(hop.workers))
            known[hop] = round((cost.forward_s + cost.backward_s) * 1e9)
        return known[hop]

    return ticks
