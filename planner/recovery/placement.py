"""Placement of nodes in a new plan so that the fewest bytes of state move.

This is an assignment problem: a node placed where it already holds layers keeps them. Pipelines
that stay whole are no part of it. Places of the same template position are alike, and so are nodes
that hold the same layers, so gains are computed by kinds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Pipeline, PipelineTemplate, Plan, Templates, place
from oobleck.planner.search.racks import over_racks, renamed

Matrix = NDArray[np.float64]
#: Holdings of a node's workers, by slot: first layer, layer after the last, part, parts.
Kind = tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Place of one pipeline in the next plan: its size, and the pipeline itself if it stays."""

    size: int
    kept: Pipeline | None
    #: Pipeline of the previous plan that it continues, maybe with another size; None: it is new.
    origin: Pipeline | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Seats:
    """Nodes of every slot, in the order of its template, and the bytes that move for them."""

    nodes: tuple[tuple[NodeName, ...], ...]
    #: Bytes of state from elsewhere; those from the same node count half.
    moved_bytes: int
    #: Bytes of the node that receives most.
    busiest_bytes: int


def keep_fitting(sizes: Sequence[int], plan: Plan, alive: frozenset[NodeName]) -> tuple[Slot, ...]:
    """Return slots of these sizes in which whole pipelines of `plan` stay as far as sizes allow.

    No placement moves fewer bytes than one that keeps them. A node that takes a place where another
    node holds all layers may swap with that one at no cost.
    """
    free = list(sizes)
    slots = []
    for pipeline in plan.pipelines:
        if len(pipeline.nodes) in free and alive.issuperset(pipeline.nodes):
            free.remove(len(pipeline.nodes))
            slots.append(Slot(size=len(pipeline.nodes), kept=pipeline, origin=pipeline))
    return (
        *slots,
        *(Slot(size=size, kept=None, origin=None) for size in sorted(free, reverse=True)),
    )


def put_in_place(
    slots: Sequence[Slot],
    seats: Seats,
    shares: Sequence[int],
    plan: Plan,
    *,
    templates: Templates,
    generation: Generation,
) -> Plan:
    """Build the next plan: pipelines that stay, and new ones on their `seats`."""
    return Plan.of_pipelines(
        [
            place(templates[slot.size], nodes, microbatches=share)
            if slot.kept is None
            else replace(slot.kept, microbatches=share)
            for slot, nodes, share in zip(slots, seats.nodes, shares, strict=True)
        ],
        generation=generation,
        schedule=plan.schedule,
    )


def seat(
    slots: Sequence[Slot],
    plan: Plan,
    alive: frozenset[NodeName],
    *,
    templates: Templates,
    state_bytes: Sequence[int],
    held: Mapping[NodeName, Kind] | None = None,
) -> Seats:
    """Return the seats that move the fewest bytes; among equals a node stays beside its old
    neighbours. `held`: `plan_kinds` of the plan, where the caller has them.
    """
    staying = {node for slot in slots if slot.kept for node in slot.kept.nodes}
    pool = sorted(alive - staying)
    wanted = [
        (slot, kind)
        for slot in slots
        if slot.kept is None
        for kind in _template_kinds(templates[slot.size])
    ]
    held = plan_kinds(plan) if held is None else held
    rows, places = _numbered([kind for _, kind in wanted])
    columns, holders = _numbered([held.get(node, ()) for node in pool])
    kept = _kept_bytes(places, holders, state_bytes)[np.ix_(rows, columns)]
    homes = np.zeros(kept.shape)
    number = {node: column for column, node in enumerate(pool)}
    for row, (slot, _) in enumerate(wanted):
        if slot.origin is not None:
            homes[row, [number[node] for node in slot.origin.nodes if node in number]] = 0.5
    chosen_rows, chosen = _assigned(kept + homes)
    needed = np.array([_bytes_of(kind, state_bytes) for kind in places], dtype=float)[rows]
    moved = np.maximum(needed - kept[chosen_rows, chosen] / 2, 0.0)
    nodes = iter([pool[column] for column in chosen])
    return Seats(
        nodes=tuple(
            slot.kept.nodes if slot.kept else tuple(next(nodes) for _ in range(slot.size))
            for slot in slots
        ),
        moved_bytes=round(moved.sum()),
        busiest_bytes=round(moved.max(initial=0.0)),
    )


def reseated(
    wanted: Plan, plan: Plan, state_bytes: Sequence[int], *, live: Sequence[NodeName]
) -> Plan:
    """Return the `wanted` plan with its places given to `live` nodes, as many as it has or more, so
    that the fewest bytes move from what they hold under `plan`."""
    kinds, held = plan_kinds(wanted), plan_kinds(plan)
    pool = sorted(live)
    rows, places = _numbered([kinds[name] for name in wanted.nodes])
    columns, holders = _numbered([held.get(node, ()) for node in pool])
    kept = _kept_bytes(places, holders, state_bytes)[np.ix_(rows, columns)]
    chosen_rows, chosen = _assigned(kept)
    nodes = {
        wanted.nodes[row]: pool[column]
        for row, column in zip(chosen_rows.tolist(), chosen.tolist(), strict=True)
    }
    return renamed(wanted, nodes)


def spread(
    wanted: Plan, plan: Plan, racks: Mapping[NodeName, str], *, live: Sequence[NodeName]
) -> Plan:
    """Return the `wanted` plan with fewer layers whose holders are all in one rack, where it moves
    no further bytes: by nodes that held the same under `plan` and do not keep it."""
    if not racks or wanted.rates or wanted.listing is not None:
        return wanted
    held, taken = plan_kinds(plan), plan_kinds(wanted)
    alike: dict[Kind, list[NodeName]] = {}
    for name in sorted(live):
        before = held.get(name, ())
        if not before or before != taken.get(name):
            alike.setdefault(before, []).append(name)
    return over_racks(wanted, racks, alike.values())


def _assigned(gains: Matrix) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows, and the column of each, for the largest sum of gains."""
    # Imported late: it takes 45 MB, and most processes that import this module place no nodes.
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(gains, maximize=True)


def _template_kinds(template: PipelineTemplate) -> list[Kind]:
    """Return the layers that each of the template's nodes is to hold."""
    kinds: list[list[tuple[int, int, int, int]]] = [[] for _ in range(template.nodes)]
    for stage in template.stages:
        kinds[stage.node] += [
            (stage.first_layer, stage.last_layer + 1, part, stage.gpus)
            for part in range(stage.gpus)
        ]
    return [tuple(kind) for kind in kinds]


def plan_kinds(plan: Plan) -> dict[NodeName, Kind]:
    """Return what each node of the plan holds: by slot the layers that a worker runs, then shadows,
    which suit any worker of the node."""
    kinds: dict[NodeName, list[tuple[bool, int, tuple[int, int, int, int]]]] = {}
    for hold in plan.holds:
        for part, worker in enumerate(hold.workers):
            shadow = hold.first_layer in plan.shadows.get(worker, ())
            held = (hold.first_layer, hold.last_layer + 1, part, len(hold.workers))
            kinds.setdefault(worker.node, []).append((shadow, worker.slot, held))
    return {node: tuple(held for *_, held in sorted(kind)) for node, kind in kinds.items()}


def _numbered(kinds: Sequence[Kind]) -> tuple[list[int], list[Kind]]:
    """Return the number of each element's kind, and the kinds."""
    number: dict[Kind, int] = {}
    return [number.setdefault(kind, len(number)) for kind in kinds], list(number)


def _kept_bytes(
    places: Sequence[Kind], nodes: Sequence[Kind], state_bytes: Sequence[int]
) -> Matrix:
    """Return by [place, node] the bytes that need not come from another node, plus once more those
    that stay in their slot. A worker that shares its stage holds its part of every layer of it."""
    sums = np.concatenate([[0.0], np.cumsum(np.array(state_bytes, dtype=np.float64))])
    wanted, held = _table(places), _table(nodes)
    total = np.zeros((len(places), len(nodes)))
    for own, slot in enumerate(wanted):
        for other, source in enumerate(held):
            first = np.maximum(slot[0][:, None], source[0]).astype(np.intp)
            stop = np.minimum(slot[1][:, None], source[1]).astype(np.intp)
            part = np.minimum(slot[3][:, None], source[3]) - np.maximum(slot[2][:, None], source[2])
            layers = sums[np.maximum(first, stop)] - sums[first]
            total += layers * np.maximum(part, 0.0) * (2 if own == other else 1)
    return total


def _table(kinds: Sequence[Kind]) -> NDArray[np.float64]:
    """Return by [slot, field, kind] the holdings, with parts as begin and end of a share of the
    layer.
    """
    slots = max((len(kind) for kind in kinds), default=0)
    table = np.zeros((slots, 4, len(kinds)))
    for column, kind in enumerate(kinds):
        for slot, (first, stop, part, parts) in enumerate(kind):
            table[slot, :, column] = first, stop, part / parts, (part + 1) / parts
    return table


def _bytes_of(kind: Kind, state_bytes: Sequence[int]) -> float:
    """Return the bytes of state that the workers of a place hold."""
    return sum(sum(state_bytes[first:stop]) / parts for first, stop, _, parts in kind)
