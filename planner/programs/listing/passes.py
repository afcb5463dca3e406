"""Pass of list scheduling: a schedule for given ranks of micro-batches.

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

from dataclasses import dataclass
from heapq import heappop, heappush

from oobleck.planner.programs.listing.bank import Bank
from oobleck.planner.programs.listing.visits import Visits


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
    # Heap key of a visit: its micro-batch's rank, then itself.
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
    # Time * codes + code: work that ends; from 3 * count on, a forward or a backward that arrives.
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
            if kind == 3:
                heappush(forwards_at[visit], key[visit])
                touched.append(group)
                continue
            if kind == 4:
                heappush(backwards_at[visit][group], key[visit])
                touched.append(group)
                continue
            for other in overlaps[group]:
                blocked[other] -= 1
                touched.append(other)
            if kind == 0:
                if last[visit]:
                    heappush(backwards_at[visit][group], key[visit])
                elif message[visit]:
                    heappush(queue, start + message[visit] * codes + 3 * count + visit + 1)
                else:
                    heappush(forwards_at[visit + 1], key[visit + 1])
                    touched.append(group_of[visit + 1])
                continue
            back = deferred[visit]
            if kind == 1:
                flying[group] -= 1
                back = kept[visit]
                if splits[visit]:
                    back -= deferred[visit]
                    heappush(weights[group], key[visit])
                if not first[visit]:
                    before = visit - 1
                    if message[before]:
                        heappush(queue, start + message[before] * codes + 4 * count + before)
                    else:
                        heappush(backwards_at[before][group_of[before]], key[before])
                        touched.append(group_of[before])
            for worker in members[group]:
                free[worker] += back
        if bank is not None and bank.came_through:
            # That may let any group begin.
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
