"""Estimates of plans whose workers compute in several hops: list scheduling's input, and step time.

Must not choose plans.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.profile import Profile, message_s
from oobleck.core.routes import Hop, HopTicks, Listing, Route
from oobleck.core.ties import Ties
from oobleck.planner.cost.ends import plan_end_s, summed_ends_s, updated_s
from oobleck.planner.cost.estimate import Replays, shadow_bytes, stage_peak_bytes
from oobleck.planner.cost.kinds import Place, pipeline_kinds, replicas
from oobleck.planner.cost.stages import StageCost, cost_of, idle_bytes, stage_cost
from oobleck.planner.programs.listing.schedule import Foreseen, foreseen, listed_routes

#: Ticks of the longest forward or backward of any hop.
_FINENESS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEstimate:
    """Time and memory of a step of a plan some of whose workers compute in several hops."""

    step_s: float
    #: State and activations of each worker, in rank order.
    worker_bytes: Mapping[WorkerId, int]

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the worker that needs most."""
        return max(self.worker_bytes.values())


def with_listing(plan: Plan, profile: Profile, *, split: bool = True) -> Plan:
    """Return `plan` with the times of its hops and its workers' free memory, by `profile` and its
    rates.

    Raises PlanInfeasible, as `stage_cost`.
    """
    costs = _costs(plan, profile)
    tick_s = _tick_s(costs)
    hops = tuple(_route_ticks(route, costs, tick_s, profile) for route in plan.routes)
    held = _held_bytes(plan, profile)
    room = tuple(max(0, profile.gpu_memory_bytes - held[worker]) for worker in plan.workers)
    return plan.having(listing=Listing(hops=hops, room=room, split=split))


def estimate_listed(
    plan: Plan, profile: Profile, *, tied: Ties, replays: Replays | None = None
) -> ListedEstimate:
    """Estimate a step of `plan`, which has a listing by `profile`. `replays`: those so far under
    the profile. Raises PlanInfeasible."""
    replays = replays or Replays(profile, tied=tied)
    schedule = foreseen(plan)
    assert schedule is not None, "workers compute in several hops"
    ends_s = _ends_s(plan, schedule, profile, replays)
    step_s = plan_end_s(plan, ends_s, profile, tied=tied)
    return ListedEstimate(step_s=step_s, worker_bytes=_bytes(plan, profile, schedule))


def last_of_step_s(
    plan: Plan, profile: Profile, *, tied: Ties, replays: Replays | None = None
) -> tuple[Mapping[WorkerId, float], float]:
    """Return when each worker's compute and gradient sums are over, and the whole step. `replays`:
    those so far under the profile. Raises PlanInfeasible."""
    replays = replays or Replays(profile, tied=tied)
    if plan.listing is None and listed_routes(plan):
        plan = with_listing(plan, profile)
    ends_s = _ends_s(plan, foreseen(plan), profile, replays)
    summed_s = summed_ends_s(plan, ends_s, profile, tied=tied)
    return summed_s, updated_s(plan, summed_s, profile)


def _ends_s(
    plan: Plan, schedule: Foreseen | None, profile: Profile, replays: Replays
) -> dict[WorkerId, float]:
    """Return when each worker finishes its compute; `schedule`: that of listed routes, if any."""
    ends_s: dict[WorkerId, float] = {}
    if schedule is not None:
        tick_s = _tick_s(_costs(plan, profile))
        ends_s = {worker: end * tick_s for worker, end in schedule.ends.items()}
    for kind in _closed_kinds(plan, profile):
        cut = replays.cut(kind.places, kind.costs)
        ends = replays.ends_s(plan.schedule, kind.microbatches, cut)
        for pipeline in kind.pipelines:
            for stage, end_s in zip(pipeline.stages, ends, strict=True):
                ends_s.update(dict.fromkeys(stage.workers, end_s))
    return ends_s


def listed_bytes(
    plan: Plan, profile: Profile, *, kept: float = 1.0, least_replicas: int = 1
) -> dict[WorkerId, int]:
    """Return the state and activations of each worker, in rank order. `plan` has a listing by
    `profile`.

    Each layer is counted as having at least `least_replicas` replicas. List-scheduled workers keep
    the share `kept` of their activations. Raises PlanInfeasible.
    """
    schedule = foreseen(plan)
    assert schedule is not None, "workers compute in several hops"
    return _bytes(plan, profile, schedule, kept, least_replicas)


def _bytes(
    plan: Plan, profile: Profile, schedule: Foreseen, kept: float = 1.0, least_replicas: int = 1
) -> dict[WorkerId, int]:
    held = _held_bytes(plan, profile, least_replicas)
    needed = {
        worker: held[worker] + ceil(kept * schedule.peak_bytes.get(worker, 0))
        for worker in plan.workers
    }
    shadows = shadow_bytes(plan, profile)
    copies = max(least_replicas, replicas(plan))
    for kind in _closed_kinds(plan, profile):
        own = stage_peak_bytes(kind.costs, plan.schedule, kind.microbatches, copies)
        for pipeline in kind.pipelines:
            for stage, peak in zip(pipeline.stages, own, strict=True):
                for worker in stage.workers:
                    needed[worker] = peak + shadows.get(worker, 0)
    return needed


class _Closed(NamedTuple):
    """Group of routes that share no workers with others and run alike, as pipelines."""

    microbatches: int
    places: tuple[Place, ...]
    costs: list[StageCost]
    pipelines: list[Pipeline]


def _closed_kinds(plan: Plan, profile: Profile) -> Iterator[_Closed]:
    listed = set(listed_routes(plan))
    for (microbatches, places), numbers in pipeline_kinds(plan).items():
        pipelines = [plan.pipelines[number] for number in numbers if number not in listed]
        if pipelines:
            costs = [
                cost_of(stage, profile, place.rate)
                for stage, place in zip(pipelines[0].stages, places, strict=True)
            ]
            yield _Closed(microbatches, places, costs, pipelines)


def _costs(plan: Plan, profile: Profile) -> dict[Hop, StageCost]:
    hops = dict.fromkeys(hop for route in plan.routes for hop in route.hops)
    known: dict[tuple[int, int, int, float], StageCost] = {}
    costs = {}
    for hop in hops:
        width, rate = len(hop.workers), plan.rate(hop.workers)
        kind = hop.first_layer, hop.last_layer, width, rate
        if kind not in known:
            known[kind] = stage_cost(profile, hop.first_layer, hop.last_layer, width).at(rate)
        costs[hop] = known[kind]
    return costs


def _tick_s(costs: Mapping[Hop, StageCost]) -> float:
    longest_s = max(max(cost.forward_s, cost.backward_s) for cost in costs.values())
    return longest_s / _FINENESS or 1.0


def _route_ticks(
    route: Route, costs: Mapping[Hop, StageCost], tick_s: float, profile: Profile
) -> tuple[HopTicks, ...]:
    hops = []
    for hop, after in zip(route.hops, (*route.hops[1:], None), strict=True):
        cost = costs[hop]
        kept = -(-cost.activation_bytes // cost.gpus)
        hops.append(
            HopTicks(
                forward=round(cost.forward_s / tick_s),
                backward_input=round(cost.backward_input_s / tick_s),
                backward_weight=round(cost.backward_weight_s / tick_s),
                message=0 if after is None else round(_message_s(hop, after, profile) / tick_s),
                kept_bytes=kept,
                # Nothing is freed between the two parts of a backward
                # (`StageCost.activation_bytes`).
                deferred_bytes=kept,
            )
        )
    return tuple(hops)


def _message_s(hop: Hop, after: Hop, profile: Profile) -> float:
    """Return the seconds of the largest message between two hops; each worker sends its rows to the
    workers that compute them next.
    """
    widest = max(len(hop.workers), len(after.workers))
    return message_s(
        -(-profile.layers[hop.last_layer].output_bytes // widest),
        same_node=hop.workers[0].node == after.workers[0].node,
        links=profile.links,
    )


def _held_bytes(plan: Plan, profile: Profile, least_replicas: int = 1) -> dict[WorkerId, int]:
    """Return the bytes that each worker holds before the activations of any micro-batch."""
    held, beside = dict.fromkeys(plan.workers, 0), dict.fromkeys(plan.workers, 0)
    held_twice = sum(len(hold.layers) for hold in plan.holds) > plan.layer_count
    copies = max(least_replicas, 1 + held_twice)
    known: dict[tuple[int, int, int, bool], tuple[int, int]] = {}
    for hold in plan.holds:
        kind = hold.first_layer, hold.last_layer, len(hold.workers), hold.resident
        if set(hold.layers).issubset(plan.shadows.get(hold.workers[0], ())):
            own = whole = idle_bytes(profile, hold.layers, len(hold.workers))
        else:
            if kind not in known:
                cost = cost_of(hold, profile)
                kept = replace(cost, working_bytes=0, exchange_bytes=0)
                known[kind] = (
                    kept.worker_bytes(0, replicas=copies),
                    cost.worker_bytes(0, replicas=copies),
                )
            own, whole = known[kind]
        for worker in hold.workers:
            held[worker] += own
            # One layer is computed at a time.
            beside[worker] = max(beside[worker], whole - own)
    return {worker: own + beside[worker] for worker, own in held.items()}
