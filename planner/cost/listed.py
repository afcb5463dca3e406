"""Plans whose workers stand in several hops: what list scheduling needs of a profile, and what a
step takes then.

Must not choose plans.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oobleck.planner.cost.estimate import stage_peak_bytes
from oobleck.planner.cost.kinds import Kind, cost_of, pipeline_cut, pipeline_kinds
from oobleck.planner.cost.replay import computed_s
from oobleck.planner.cost.stagecost import StageCost, stage_cost
from oobleck.planner.ids import WorkerId
from oobleck.planner.profile.links import all_reduce_s, message_s
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.gradients import gradient_buckets
from oobleck.planner.programs.listing.schedule import listed_routes, planned
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hop, Route
from oobleck.planner.programs.ticks import HopTicks, Listing

#: The longest forward or backward of any hop has so many ticks.
_FINENESS = 1024
#: Loss, norm and flags of a vote.
_VOTE_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedEstimate:
    """What a step takes of a plan some of whose workers stand in several hops."""

    step_s: float
    #: Of the worker that needs most memory: state and activations.
    peak_bytes: int


def with_listing(plan: Plan, profile: Profile, *, split: bool = True) -> Plan:
    """`plan` with what its hops take and the room that its workers have, by `profile` and its
    rates.

    Raises ValueError, as `stage_cost`.
    """
    costs = _costs(plan, profile)
    tick_s = _tick_s(costs)
    hops = tuple(_route_ticks(route, costs, tick_s, profile) for route in plan.routes)
    held = _held_bytes(plan, profile)
    room = tuple(max(0, profile.gpu_memory_bytes - held[worker]) for worker in plan.workers)
    return replace(plan, listing=Listing(hops=hops, room=room, split=split))


def estimate_listed(plan: Plan, profile: Profile, *, tied: bool) -> ListedEstimate:
    """What a step takes of `plan`, which has a listing by `profile`. Raises PlanInfeasible."""
    schedule = planned(plan)
    assert schedule is not None, "workers stand in several hops"
    tick_s, held = _tick_s(_costs(plan, profile)), _held_bytes(plan, profile)
    ends_s = {worker: max(ends) * tick_s for worker, ends in schedule.ends.items()}
    peaks = [held[worker] + kept for worker, kept in schedule.peak_bytes.items()]
    listed = set(listed_routes(plan))
    for (microbatches, places), numbers in pipeline_kinds(plan).items():
        if closed := [number for number in numbers if number not in listed]:
            costs = [
                cost_of(stage, profile, place.rate)
                for stage, place in zip(plan.pipelines[closed[0]].stages, places, strict=True)
            ]
            kind = Kind(microbatches, pipeline_cut(places, costs, profile))
            (ends,) = computed_s([(plan.schedule, kind)]).values()
            for number in closed:
                for stage, end_s in zip(plan.pipelines[number].stages, ends, strict=True):
                    ends_s.update(dict.fromkeys(stage.workers, end_s))
            peaks += stage_peak_bytes(costs, plan.schedule, microbatches, len(plan.pipelines))
    return ListedEstimate(step_s=_step_s(plan, ends_s, profile, tied=tied), peak_bytes=max(peaks))


def _costs(plan: Plan, profile: Profile) -> dict[Hop, StageCost]:
    hops = dict.fromkeys(hop for route in plan.routes for hop in route.hops)
    return {
        hop: stage_cost(profile, hop.first_layer, hop.last_layer, len(hop.workers)).at(
            plan.rate(hop.workers)
        )
        for hop in hops
    }


def _tick_s(costs: Mapping[Hop, StageCost]) -> float:
    longest_s = max(max(cost.forward_s, cost.backward_s) for cost in costs.values())
    return longest_s / _FINENESS or 1.0


def _route_ticks(
    route: Route, costs: Mapping[Hop, StageCost], tick_s: float, profile: Profile
) -> tuple[HopTicks, ...]:
    found = []
    for hop, after in zip(route.hops, (*route.hops[1:], None), strict=True):
        cost = costs[hop]
        kept = -(-cost.activation_bytes // cost.gpus)
        found.append(
            HopTicks(
                forward=round(cost.forward_s / tick_s),
                backward_input=round(cost.backward_input_s / tick_s),
                backward_weight=round(cost.backward_weight_s / tick_s),
                message=0 if after is None else round(_message_s(hop, after, profile) / tick_s),
                kept_bytes=kept,
                # Nothing is freed between the parts of a backward (`StageCost.activation_bytes`).
                deferred_bytes=kept,
            )
        )
    return tuple(found)


def _message_s(hop: Hop, after: Hop, profile: Profile) -> float:
    """Each worker sends its rows to those that compute them next; the largest message counts."""
    widest = max(len(hop.workers), len(after.workers))
    return message_s(
        -(-profile.layers[hop.last_layer].output_bytes // widest),
        same_node=hop.workers[0].node == after.workers[0].node,
        links=profile.links,
    )


def _held_bytes(plan: Plan, profile: Profile) -> dict[WorkerId, int]:
    """What each worker has before it keeps anything of a micro-batch."""
    found = dict.fromkeys(plan.workers, 0)
    for hold in plan.holds:
        cost = stage_cost(
            profile,
            hold.first_layer,
            hold.last_layer,
            len(hold.workers),
            resident=hold.resident,
        )
        own = cost.worker_bytes(0, replicas=len(plan.nodes))
        for worker in hold.workers:
            found[worker] += own
    return found


def _step_s(plan: Plan, ends_s: Mapping[WorkerId, float], profile: Profile, *, tied: bool) -> float:
    """From when workers have computed their last: the sums, which each worker's link passes on one
    after the other as they become ready, the vote and the update."""
    sums: dict[WorkerId, list[tuple[float, float]]] = {worker: [] for worker in plan.workers}
    for bucket in gradient_buckets(plan, tied=tied):
        own = {part.layer: part.share for part in bucket.parts if part.part == "own"}
        taken_s = all_reduce_s(
            sum(s.of_bytes(profile.layers[layer].parameter_bytes) for layer, s in own.items()),
            workers=len(bucket.owners),
            same_node=len({owner.node for owner in bucket.owners}) == 1,
            links=profile.links,
        )
        ready_s = max(ends_s.get(owner, 0.0) for owner in bucket.owners)
        for owner in bucket.owners:
            sums[owner].append((ready_s, taken_s))
    summed_s = max(
        max(ends_s.get(worker, 0.0), _in_turn(sorted(own))) for worker, own in sums.items()
    )
    vote_s = all_reduce_s(
        _VOTE_BYTES, workers=len(plan.workers), same_node=False, links=profile.links
    )
    return summed_s + vote_s + max(_updates_s(plan, profile).values())


def _in_turn(sums: Sequence[tuple[float, float]]) -> float:
    end_s = 0.0
    for ready_s, taken_s in sums:
        end_s = max(end_s, ready_s) + taken_s
    return end_s


def _updates_s(plan: Plan, profile: Profile) -> dict[WorkerId, float]:
    found = dict.fromkeys(plan.workers, 0.0)
    for hold in plan.holds:
        update_s = sum(
            profile.layers[layer].update_s.get(len(hold.workers), 0.0) for layer in hold.layers
        )
        for worker in hold.workers:
            found[worker] += update_s / plan.rate((worker,))
    return found
