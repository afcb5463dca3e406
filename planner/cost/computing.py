"""How long each worker of a plan computes in a step, as its profile has it.

What workers measure of themselves is held against this. Must not know rates, nor the order of
things.
"""

from collections.abc import Mapping

from oobleck.planner.cost.stagecost import stage_cost
from oobleck.planner.ids import WorkerId
from oobleck.planner.profile.profile import Profile
from oobleck.planner.programs.plan import Hop, Plan


def computing_s(plan: Plan, profile: Profile) -> Mapping[WorkerId, float]:
    """Seconds of forward and backward of all its micro-batches that each worker of the plan has in
    a step, in rank order; 0 for those that only hold layers. Rates are not counted.

    Raises ValueError, as `stage_cost`.
    """
    known: dict[tuple[int, int, int], float] = {}
    found = dict.fromkeys(plan.workers, 0.0)
    for route in plan.routes:
        for hop in route.hops:
            key = hop.first_layer, hop.last_layer, len(hop.workers)
            if key not in known:
                known[key] = _microbatch_s(hop, profile)
            for worker in hop.workers:
                found[worker] += route.microbatches * known[key]
    return found


def _microbatch_s(hop: Hop, profile: Profile) -> float:
    cost = stage_cost(profile, hop.first_layer, hop.last_layer, len(hop.workers))
    return cost.forward_s + cost.backward_s
