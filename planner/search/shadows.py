"""Shadows: layers that nodes hold beside those that they run, so that more nodes can be lost.

In Bamboo (Thorpe et al., NSDI 2023) each node holds its successor's layers too. Here any node may,
whole layers to one worker, and layers on the fewest nodes get further holders. No worker computes
with a shadow: it takes part in its layer's gradient sums and updates, which keep it equal. Owns the
choice of holders. Must not know how state moves.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hold, ShardTable, runs
from oobleck.planner.cost.estimate import shadow_bytes, worker_peak_bytes
from oobleck.planner.cost.listed import listed_bytes
from oobleck.planner.cost.stagecost import idle_bytes
from oobleck.planner.search.filling import Gap, whole_layers


def with_shadows(
    plan: Plan,
    profile: Profile,
    *,
    fault_tolerance: int,
    held: ShardTable | None = None,
    moving: bool = True,
    kept: float = 1.0,
) -> Plan:
    """Return `plan` with shadows so that any `fault_tolerance` nodes can be lost; where memory is
    short, as many as possible.

    The same object is returned where nothing is added. Either enough nodes hold each layer, or the
    shadows that fit would not let one node more be lost. `held` is the current state of workers:
    its shadows stay where they help. Without `moving` no state may move, so only those are used.

    Free memory is measured at a worker's peak under the plan's schedule, with nothing resident;
    `oobleck.planner.search.choose` adds residents later. Workers that are list-scheduled keep their
    order, and shadows get the memory beside it. With `kept` below 1 they keep only that share of
    their activations, so that shadows get more; the plan then needs another listing.
    """
    nodes = plan.layer_nodes()
    safe = min(map(len, nodes)) - 1
    if safe >= fault_tolerance:
        return plan
    bare = plan
    if plan.listing is None:
        bare = replace(plan, holds=tuple(replace(hold, resident=False) for hold in plan.holds))
    room = _room(bare, profile, kept)
    if room is None:
        return plan
    had = shadow_bytes(bare, profile)
    for target in range(min(fault_tolerance, len(plan.nodes) - 1), safe, -1):
        gap = Gap(
            sizes=tuple(idle_bytes(profile, [layer], 1) for layer in range(plan.layer_count)),
            nodes=tuple(map(frozenset, nodes)),
            copies=tuple(max(0, target + 1 - len(have)) for have in nodes),
            room={worker: left + had.get(worker, 0) for worker, left in room.items()},
            had=had,
        )
        found = gap.filled(held or {})
        if found is not None:
            break
    else:
        return plan
    if not moving:
        found = {w: layers & whole_layers(held or {}, w) for w, layers in found.items()}
    more = tuple(hold for worker in sorted(found) for hold in _holds(worker, found[worker]))
    return replace(bare, holds=(*bare.holds, *more)) if more else plan


def _room(plan: Plan, profile: Profile, kept: float) -> dict[WorkerId, int] | None:
    """Return the bytes that each worker has left when layers have shadows, in the order of the
    holds. None: a lone replica lacks memory for the gradient sums that shadows bring."""
    limit = profile.gpu_memory_bytes
    if plan.listing is None:
        without = worker_peak_bytes(plan, profile)
        peaks = worker_peak_bytes(plan, profile, least_replicas=2)
    else:
        without = listed_bytes(plan, profile, kept=kept)
        peaks = listed_bytes(plan, profile, kept=kept, least_replicas=2)
    if max(peaks.values()) > limit >= max(without.values()):
        return None
    order = dict.fromkeys(worker for hold in plan.holds for worker in hold.workers)
    return {worker: max(0, limit - peaks[worker]) for worker in order}


def _holds(worker: WorkerId, layers: Iterable[int]) -> Iterator[Hold]:
    """Yield a hold for each run of layers."""
    for run in runs(layers):
        yield Hold(first_layer=run[0], last_layer=run[-1], workers=(worker,))
