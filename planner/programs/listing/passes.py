"""Pass of list scheduling over the visits of micro-batches: a schedule for given ranks of these.

A *visit* is a micro-batch at one hop of its route. A *group* is the workers of a hop, which compute
its visits in step. Visits are columns of whole numbers.

An idle group begins its ready work: backwards that a hop before waits for, or forwards whose bytes
fit, else weight gradients. The micro-batch of least rank is first. Backwards go first, or else
forwards up to so many in flight, which keeps a step as even as 1F1B is. A pass takes time
proportional to the number of visits, apart from heaps.

Memory never deadlocks. A micro-batch is *through* once its last forward has begun: its backward
needs no more memory, so its bytes become free. The others that have begun are *on their way*.

- If all routes follow one order of the workers (as with equal cuts), a forward begins wherever it
  fits and few enough are in flight. Suppose nothing can begin. Then every one that is through is
  done. If some are on their way, take the last worker in the order that has computed for one of
  them. The workers of that one's next hop come later in the order, so they keep nothing and have
  none in flight. Each micro-batch fits on an empty worker, so the forward that is ready there can
  begin. If none is on its way, all workers are empty, and any micro-batch can begin.
- Else a forward begins only where the bank finds that all on their way can still come through.

Must not know the origin of the ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

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


# ---- The banker's algorithm, for list scheduling where routes follow no common order of the
# workers.
#
# A state is *safe* if the micro-batches on their way can come through one after the other in the
# memory that is free by then. Memory of those already through (`passes`) becomes free unaided. At
# first none is on its way. A forward begins only if the state after it is safe.
#
# The next state is safe if the forward's own micro-batch comes through, at once or after some
# others: the rest can then as before. In a safe state with nothing left to run, the first of the
# sequence can begin its next forward, and the state stays safe. So memory never deadlocks.


#: Bytes by worker, without zeros.
_Bytes = tuple[tuple[int, int], ...]


class Bank:
    """Bank that decides which forwards leave a safe state.

    Micro-batches whose next hop is the same are alike: they have kept as much and need as much. One
    of each kind is asked for all, so work does not grow with the number that wait.
    """

    def __init__(self, visits: Visits) -> None:
        self._visits = visits
        #: By hop: visits whose forward is ready.
        self.ready: list[list[int]] = [[] for _ in visits.hops]
        #: By next hop: how many are on their way, without zeros.
        self._on_way: dict[int, int] = {}
        #: By worker: room that those on their way leave free.
        self._spare = list(visits.room)
        #: Hops at which a forward would leave no safe state. This holds until a micro-batch comes
        #: through: a forward that begins takes only memory that its micro-batch needed anyway.
        self._refused: set[int] = set()
        self.came_through = False
        #: By hop: bytes kept there, before it, and from it on.
        self._kept: list[_Bytes] = [()] * len(visits.hops)
        self._before: list[_Bytes] = [()] * len(visits.hops)
        self._needs: list[_Bytes] = [()] * len(visits.hops)
        for place, path in zip(visits.place, visits.path, strict=True):
            if place == 0:
                self._add(path)

    def _add(self, path: range) -> None:
        """Add the hops of a route, from its first micro-batch."""
        visits = self._visits
        for visit in path:
            hop = visits.hop[visit]
            self._kept[hop] = self._bytes(range(visit, visit + 1))
            self._before[hop] = self._bytes(range(path.start, visit))
            self._needs[hop] = self._bytes(range(visit, path.stop))

    def _bytes(self, some: range) -> _Bytes:
        found: dict[int, int] = {}
        for visit in some:
            for worker in self._visits.members[self._visits.group[visit]]:
                found[worker] = found.get(worker, 0) + self._visits.kept[visit]
        return tuple(found.items())

    def take(self, hops: list[int], free: list[int]) -> int:
        """Take the first visit of these hops whose forward may begin; -1: none may."""
        for key, hop in sorted((self.ready[hop][0], hop) for hop in hops if self.ready[hop]):
            if self._allows(hop, free):
                heappop(self.ready[hop])
                visit = key % len(self._visits.owner)
                self._begin(visit, hop)
                return visit
        return -1

    def _begin(self, visit: int, hop: int) -> None:
        for worker, kept in self._kept[hop]:
            self._spare[worker] -= kept
        if not self._visits.first[visit]:
            _count(self._on_way, hop, -1)
        if not self._visits.last[visit]:
            _count(self._on_way, hop + 1, 1)
            return
        self._refused.clear()
        self.came_through = True
        for worker, kept in (*self._before[hop], *self._kept[hop]):
            self._spare[worker] += kept

    def _allows(self, hop: int, free: list[int]) -> bool:
        if hop in self._refused or any(kept > free[worker] for worker, kept in self._kept[hop]):
            return False
        spare = list(self._spare)
        if self._comes_through(hop, spare):
            return True
        for worker, kept in self._kept[hop]:
            spare[worker] -= kept
        left = self._on_way.copy()
        if hop in left:  # no micro-batch is on its way to a first hop
            _count(left, hop, -1)
        _count(left, hop + 1, 1)
        while hop + 1 in left:
            through = [following for following in left if self._comes_through(following, spare)]
            if not through:
                self._refused.add(hop)
                return False
            for following in through:
                # Their kept bytes become spare.
                count = left.pop(following)
                for worker, kept in self._before[following]:
                    spare[worker] += count * kept
        return True

    def _comes_through(self, hop: int, spare: list[int]) -> bool:
        """Return whether a micro-batch fits at every hop from this one on."""
        return all(kept <= spare[worker] for worker, kept in self._needs[hop])


def _count(counts: dict[int, int], hop: int, by: int) -> None:
    counts[hop] = counts.get(hop, 0) + by
    if not counts[hop]:
        del counts[hop]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """Result of one pass.

    Work is kind * number of visits + visit. Kind is 0 for a forward, 1 for a backward or its first
    part, 2 for weight gradients.
    """

    makespan: int
    #: Begin and work, in order.
    begun: list[tuple[int, int]]
    #: Most bytes that each worker keeps at a time.
    peak_bytes: list[int]


def run_pass(visits: Visits, rank: list[int], spare: int | None) -> Pass:
    """Schedule all visits with distinct ranks of micro-batches.

    `spare`: forwards go first, with so many more micro-batches in flight at each hop than 1F1B has;
    None: backwards go first. It is one loop over local names, since it runs several times per
    visit.
    """
    count, groups = len(visits.owner), len(visits.members)
    group_of, members, overlaps = visits.group, visits.members, visits.overlaps
    kept, deferred, splits, message = visits.kept, visits.deferred, visits.splits, visits.message
    first, last = visits.first, visits.last
    ticks = visits.forward + visits.backward + visits.weight
    # Heap key of a visit: its micro-batch's rank, then the visit's number.
    key = [rank[owner] * count + visit for visit, owner in enumerate(visits.owner)]
    bank = None if visits.ordered else Bank(visits)
    # By group: visits that are ready. Backwards that can wait are among the weight gradients. With
    # a bank, the bank has the forwards, and a group has its hops.
    forwards: list[list[int]] = [[] for _ in range(groups)]
    forwards_at = [forwards[group] for group in group_of]
    if bank is not None:
        forwards_at = [bank.ready[hop] for hop in visits.hop]
        for hop, group in dict(zip(visits.hop, group_of, strict=True)).items():
            forwards[group].append(hop)
    backwards: list[list[int]] = [[] for _ in range(groups)]
    weights: list[list[int]] = [[] for _ in range(groups)]
    # No hop waits for the backward of a first hop.
    backwards_at = [weights if entry else backwards for entry in first]
    turns = (backwards, forwards) if spare is None else (forwards, backwards)
    # By group: forwards whose backward has not ended, and their limit.
    flying, most_flying = [0] * groups, _limits(visits, spare)
    # By group: number of overlapping groups that compute now.
    blocked = [0] * groups
    free, least_free = list(visits.room), list(visits.room)
    # Kinds of codes: compute that ends (the rest are weight gradients), and messages that arrive.
    forward_ends, backward_ends, output_arrives, gradient_arrives = 0, 1, 3, 4
    # Time * codes + kind * count + visit.
    queue: list[int] = []
    codes = 5 * count
    begun: list[tuple[int, int]] = []
    for path in visits.path:
        heappush(forwards_at[path[0]], key[path[0]])
    now = start = 0
    touched = list(range(groups))
    while True:
        for ready in (*turns, weights):
            for group in touched:
                if not ready[group] or blocked[group]:
                    continue
                if ready is forwards:
                    if flying[group] == most_flying[group]:
                        continue
                    work = _take(forwards[group], count, kept, members[group], free, bank)
                    if work < 0:
                        continue
                    flying[group] += 1
                    for worker in members[group]:
                        free[worker] -= kept[work]
                        if free[worker] < least_free[worker]:
                            least_free[worker] = free[worker]
                else:
                    work = count + heappop(ready[group]) % count
                    if ready is weights and splits[work - count]:
                        work += count
                for other in overlaps[group]:
                    blocked[other] += 1
                begun.append((now, work))
                heappush(queue, start + ticks[work] * codes + work)
        if not queue:
            break
        now = queue[0] // codes
        start = now * codes
        stop = start + codes
        touched = []
        while queue and queue[0] < stop:
            kind, visit = divmod(heappop(queue) - start, count)
            group = group_of[visit]
            if kind == output_arrives:
                heappush(forwards_at[visit], key[visit])
                touched.append(group)
                continue
            if kind == gradient_arrives:
                heappush(backwards_at[visit][group], key[visit])
                touched.append(group)
                continue
            for other in overlaps[group]:
                blocked[other] -= 1
                touched.append(other)
            if kind == forward_ends:
                if last[visit]:
                    heappush(backwards_at[visit][group], key[visit])
                elif message[visit]:
                    arrival = output_arrives * count + visit + 1
                    heappush(queue, start + message[visit] * codes + arrival)
                else:
                    heappush(forwards_at[visit + 1], key[visit + 1])
                    touched.append(group_of[visit + 1])
                continue
            back = deferred[visit]
            if kind == backward_ends:
                flying[group] -= 1
                back = kept[visit]
                if splits[visit]:
                    back -= deferred[visit]
                    heappush(weights[group], key[visit])
                if not first[visit]:
                    before = visit - 1
                    if message[before]:
                        arrival = gradient_arrives * count + before
                        heappush(queue, start + message[before] * codes + arrival)
                    else:
                        heappush(backwards_at[before][group_of[before]], key[before])
                        touched.append(group_of[before])
            for worker in members[group]:
                free[worker] += back
        if bank is not None and bank.came_through:
            # The freed memory may let any group begin.
            bank.came_through = False
            touched = list(range(groups))
    assert len(begun) == 2 * count + sum(splits), "memory stuck"
    peaks = [room - least for room, least in zip(visits.room, least_free, strict=True)]
    return Pass(makespan=now, begun=begun, peak_bytes=peaks)


def _take(
    heap: list[int],
    count: int,
    kept: list[int],
    members: tuple[int, ...],
    free: list[int],
    bank: Bank | None,
) -> int:
    """Take the visit whose forward may begin off the heap; -1: none may."""
    if bank is not None:
        return bank.take(heap, free)
    visit = heap[0] % count
    for worker in members:
        if kept[visit] > free[worker]:
            return -1
    heappop(heap)
    return visit


def _limits(visits: Visits, spare: int | None) -> list[int]:
    """Return the most micro-batches in flight of each group: one for each hop from there to the end
    of the route, as under 1F1B, plus `spare`."""
    if spare is None or not visits.ordered:
        return [len(visits.owner)] * len(visits.members)
    limits = [0] * len(visits.members)
    for path in visits.path:
        for visit in path:
            group = visits.group[visit]
            limits[group] = max(limits[group], path.stop - visit + spare)
    return limits
