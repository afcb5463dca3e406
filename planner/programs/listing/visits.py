"""Visits of all micro-batches at all hops of some routes, as columns of whole numbers: the input of
the list scheduler.

A *visit* is a micro-batch at one hop of its route. A *group* is the workers of a hop, which compute
its visits in step. Owns the columns, and whether all routes follow one order of the workers. Must
not know the order of compute.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hop, HopTicks, Route


@dataclass(slots=True, eq=False, kw_only=True)
class Visits:
    """Columns of the visits. A micro-batch's visits are contiguous, by hops; micro-batches are
    ordered by their numbers.

    Lists of one length are columns: of visits, of micro-batches or of groups, as marked.
    """

    # ---- by group
    #: Positions in `workers`.
    members: list[tuple[int, ...]]
    #: Groups that have a worker in common with it, itself included.
    overlaps: list[list[int]]
    # ---- by worker
    workers: list[WorkerId]
    room: list[int]
    # ---- of all
    #: True if there is an order of the workers that each route's hops follow.
    ordered: bool
    hops: list[Hop] = field(default_factory=list)
    # ---- by visit
    group: list[int] = field(default_factory=list)
    forward: list[int] = field(default_factory=list)
    #: The whole backward, or only its input part where it is split.
    backward: list[int] = field(default_factory=list)
    #: The rest of a split backward.
    weight: list[int] = field(default_factory=list)
    splits: list[bool] = field(default_factory=list)
    #: Message between this hop and the next one.
    message: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    deferred: list[int] = field(default_factory=list)
    #: True if it is at the first hop, and at the last one, of its route.
    first: list[bool] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)
    #: Position in `hops`.
    hop: list[int] = field(default_factory=list)
    #: Its micro-batch, counted from 0 among those of the visits.
    owner: list[int] = field(default_factory=list)
    # ---- by micro-batch
    #: Its number in the global batch.
    number: list[int] = field(default_factory=list)
    #: Its visits.
    path: list[range] = field(default_factory=list)
    #: Number of its route, its place among the route's micro-batches, and their count.
    route: list[int] = field(default_factory=list)
    place: list[int] = field(default_factory=list)
    mates: list[int] = field(default_factory=list)


def visits_of(
    plan: Plan,
    ticks: Callable[[Hop], HopTicks],
    room: Mapping[WorkerId, int],
    *,
    split: bool,
    routes: tuple[int, ...],
) -> Visits:
    """Build the visits of those `routes` (positions in the plan). Raises PlanInfeasible where a
    worker has no room for one micro-batch."""
    groups: dict[tuple[WorkerId, ...], int] = {}
    chosen = [plan.routes[index] for index in routes]
    for route in chosen:
        for hop in route.hops:
            groups.setdefault(hop.workers, len(groups))
    workers = sorted({worker for members in groups for worker in members})
    index = {worker: position for position, worker in enumerate(workers)}
    members = [tuple(index[worker] for worker in group) for group in groups]
    found = Visits(
        members=members,
        overlaps=_overlaps(members),
        workers=workers,
        room=[room[worker] for worker in workers],
        ordered=_follow_one_order(chosen),
    )
    known: dict[Hop, HopTicks] = {}
    for position, route in zip(routes, chosen, strict=True):
        for hop in route.hops:
            if hop not in known:
                known[hop] = ticks(hop)
        _check_room(route, known, room)
        _add(found, route, position, plan.shares[position], groups, known, split)
    return found


def _add(
    visits: Visits,
    route: Route,
    position: int,
    share: range,
    groups: Mapping[tuple[WorkerId, ...], int],
    known: Mapping[Hop, HopTicks],
    split: bool,
) -> None:
    count, depth = route.microbatches, len(route.hops)
    taken = [known[hop] for hop in route.hops]
    # No hop waits for the input gradient of the first hop: its backward stays whole.
    splits = [split and number > 0 for number in range(depth)]
    later = [hop.backward_weight if two else 0 for hop, two in zip(taken, splits, strict=True)]
    wholes = [hop.backward_input + hop.backward_weight for hop in taken]
    visits.group += [groups[hop.workers] for hop in route.hops] * count
    visits.forward += [hop.forward for hop in taken] * count
    visits.backward += [w - rest for w, rest in zip(wholes, later, strict=True)] * count
    visits.weight += later * count
    visits.splits += splits * count
    visits.message += [hop.message for hop in taken] * count
    visits.kept += [hop.kept_bytes for hop in taken] * count
    visits.deferred += [hop.deferred_bytes for hop in taken] * count
    visits.first += [number == 0 for number in range(depth)] * count
    visits.last += [number == depth - 1 for number in range(depth)] * count
    visits.hop += list(range(len(visits.hops), len(visits.hops) + depth)) * count
    visits.hops += route.hops
    for place, microbatch in enumerate(share):
        begin = len(visits.owner)
        visits.owner += [len(visits.number)] * depth
        visits.number.append(microbatch)
        visits.path.append(range(begin, begin + depth))
        visits.route.append(position)
        visits.place.append(place)
        visits.mates.append(count)


def _check_room(route: Route, known: Mapping[Hop, HopTicks], room: Mapping[WorkerId, int]) -> None:
    need: dict[WorkerId, int] = {}
    for hop in route.hops:
        for worker in hop.workers:
            need[worker] = need.get(worker, 0) + known[hop].kept_bytes
    for worker, kept_bytes in need.items():
        if kept_bytes > room[worker]:
            raise PlanInfeasible(
                f"{worker} has room for {room[worker]} bytes of activations and one micro-batch "
                f"needs {kept_bytes}: take smaller micro-batches or fewer layers"
            )


def _overlaps(members: list[tuple[int, ...]]) -> list[list[int]]:
    by_worker: dict[int, list[int]] = {}
    for group, own in enumerate(members):
        for worker in own:
            by_worker.setdefault(worker, []).append(group)
    return [sorted({other for worker in own for other in by_worker[worker]}) for own in members]


def _follow_one_order(routes: list[Route]) -> bool:
    after: dict[WorkerId, set[WorkerId]] = {}
    for workers in {tuple(hop.workers for hop in route.hops) for route in routes}:
        for number, group in enumerate(workers):
            later = workers[number + 1] if number + 1 < len(workers) else ()
            for worker in group:
                after.setdefault(worker, set()).update(later)
    left = dict.fromkeys(after, 0)
    for others in after.values():
        for other in others:
            left[other] += 1
    free = [worker for worker, count in left.items() if count == 0]
    for worker in free:
        for other in after[worker]:
            left[other] -= 1
            if left[other] == 0:
                free.append(other)
    return len(free) == len(after)
