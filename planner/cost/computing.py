"""Compute time of each worker of a plan in a step, predicted from its profile.

Workers' own measurements are compared with it. Must not know rates or the order of compute.
"""

from collections.abc import Mapping

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Share
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.planner.cost.stages import stage_cost


def computing_by_layer_s(plan: Plan, profile: Profile) -> Mapping[WorkerId, Mapping[int, float]]:
    """Return the seconds of forward and backward that each layer takes each worker in a step.

    Workers are in rank order; those that only hold layers have none. Where several share a layer,
    each has the rows of a micro-batch that are its own. Rates are not counted.
    Raises ValueError, as `stage_cost`.
    """
    known: dict[tuple[int, int], float] = {}
    found: dict[WorkerId, dict[int, float]] = {worker: {} for worker in plan.workers}
    for route in plan.routes:
        for hop in route.hops:
            parts = len(hop.workers)
            for part, worker in enumerate(hop.workers):
                rows = Share(part, part + 1, parts).of_rows(profile.microbatch)
                share = route.microbatches * len(rows) * parts / profile.microbatch
                own = found[worker]
                for layer in hop.layers if rows else ():
                    if (layer, parts) not in known:
                        known[layer, parts] = _layer_s(profile, layer, parts)
                    own[layer] = own.get(layer, 0.0) + share * known[layer, parts]
    return found


def _layer_s(profile: Profile, layer: int, gpus: int) -> float:
    cost = stage_cost(profile, layer, layer, gpus)
    return cost.forward_s + cost.backward_s
