"""Which worker sends which layer's state to whom before a new plan can start.

Every worker computes this from the same table and comes to the same list, so nobody has to be
told. Must not know how state travels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.planner.errors import LayerLost
from oobleck.planner.ids import WorkerId
from oobleck.planner.plan import Plan

#: The layers whose state each reachable worker holds, all at the same committed step.
LayerTable = Mapping[WorkerId, frozenset[int]]

__all__ = ["LayerLost", "LayerTable", "Transfer", "plan_transfers"]


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Transfer:
    """The whole state of `layer` (parameters and moments) goes from source to destination."""

    layer: int
    source: WorkerId
    destination: WorkerId


def plan_transfers(
    held: LayerTable, plan: Plan, *, state_bytes: Sequence[int]
) -> tuple[Transfer, ...]:
    """All transfers after which every worker of `plan` holds its layers, sorted.

    The biggest layers are placed first, each on the holder of the destination's node if there is
    one, else on the holder that has the fewest bytes to send so far. Raises LayerLost.
    """
    holders = {
        layer: tuple(sorted(worker for worker, layers in held.items() if layer in layers))
        for layer in range(plan.layer_count)
    }
    nothing: frozenset[int] = frozenset()
    missing = [
        (layer, worker)
        for worker, layers in plan.holdings().items()
        for layer in layers
        if layer not in held.get(worker, nothing)
    ]
    if lost := {layer for layer, _ in missing if not holders[layer]}:
        raise LayerLost(lost)

    sending = dict.fromkeys(held, 0)
    transfers = []
    for layer, destination in sorted(missing, key=lambda item: (-state_bytes[item[0]], item)):
        source = min(holders[layer], key=lambda w: (w.node != destination.node, sending[w], w))
        sending[source] += state_bytes[layer]
        transfers.append(Transfer(layer=layer, source=source, destination=destination))
    return tuple(sorted(transfers))
