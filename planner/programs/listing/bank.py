"""The banker's algorithm, for list scheduling where routes follow no common order of the workers.

A state is *safe* if the micro-batches on their way can come through one after the other in the
memory that is free by then. Memory of those already through (`passes`) becomes free unaided. At
first none is on its way. A forward begins only if the state after it is safe.

The next state is safe if the forward's own micro-batch comes through, at once or after some others:
the rest can then as before. In a safe state with nothing left to run, the first of the sequence can
begin its next forward, and the state stays safe. So memory never deadlocks.
"""

from heapq import heappop

from oobleck.planner.programs.listing.visits import Visits

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
        #: Hops whose visits would leave no safe state. Only a micro-batch that comes through can
        #: change that: a forward that begins takes only memory that its micro-batch needed anyway.
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
