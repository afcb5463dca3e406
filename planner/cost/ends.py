"""The end of a step, worker by worker: gradient sums, vote and update of any plan.

`oobleck.planner.cost.sums` does the same by kinds of pipelines, for plans whose workers run every
layer that they hold. Must not know how routes compute.
"""

from collections.abc import Mapping, Sequence

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile, all_reduce_s
from oobleck.core.ties import Ties
from oobleck.planner.programs.compiler.gradients import gradient_buckets

#: Bytes of a vote's message: loss, norm and flags.
_VOTE_BYTES = 64


def plan_end_s(
    plan: Plan, ends_s: Mapping[WorkerId, float], profile: Profile, *, tied: Ties
) -> float:
    """Return when the step is over on all workers, from when each finishes its compute (`ends_s`).

    After its compute come a worker's gradient sums, the vote and the update. Each worker's link
    carries its sums one after the other as they become ready. A worker that holds a layer without
    running it adds no wait, and one that computes nothing is not in `ends_s`.
    """
    sums: dict[WorkerId, list[tuple[float, float]]] = {worker: [] for worker in plan.workers}
    for bucket in gradient_buckets(plan, tied=tied):
        own = {part.layer: part.share for part in bucket.parts if part.part == "own"}
        taken_s = all_reduce_s(
            sum(s.of_bytes(profile.layers[layer].summed_bytes) for layer, s in own.items()),
            workers=len(bucket.owners),
            same_node=len({owner.node for owner in bucket.owners}) == 1,
            links=profile.links,
        )
        layers = {part.layer for part in bucket.parts}
        running = [o for o in bucket.owners if layers & set(plan.held[o]) - _shadows(plan, o)]
        ready_s = max((ends_s.get(owner, 0.0) for owner in running), default=0.0)
        for owner in bucket.owners:
            sums[owner].append((ready_s, taken_s))
    summed_s = max(
        max(ends_s.get(worker, 0.0), _in_turn(sorted(own))) for worker, own in sums.items()
    )
    vote_s = all_reduce_s(
        _VOTE_BYTES, workers=len(plan.workers), same_node=False, links=profile.links
    )
    return summed_s + vote_s + max(_updates_s(plan, profile).values())


def _shadows(plan: Plan, worker: WorkerId) -> set[int]:
    return set(plan.shadows.get(worker, ()))


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
