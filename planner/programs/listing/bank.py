"""The banker's algorithm, for list scheduling where routes follow no common order of the workers.

A state is *safe* if the micro-batches on their way can come through one after the other, each in
what is free by then: what through ones keep becomes free without anybody's room (`passes`). At
first none is on its way. A forward begins only if the state after it is safe. That is so if its own
micro-batch comes through, at once or after some others: the rest can then as before. In a safe
state with nothing left to run, the first of the sequence can begin its next forward, and the state
stays safe. So memory never sticks.
"""

from heapq import heapify

from oobleck.planner.programs.listing.visits import Visits


class Bank:
    """Which forwards leave a safe state."""

    def __init__(self, visits: Visits) -> None:
        self._visits = visits
        #: By micro-batch on its way: the visit that comes next.
        self._next: dict[int, int] = {}
        #: By worker: what those on their way leave of its room.
        self._spare = list(visits.room)
        #: Visits that would leave no safe state. They may only after somebody came through: a
        #: forward that begins takes of the spare what its micro-batch needed all the same.
        self._refused: set[int] = set()
        self.came_through = False
        #: By hop: what is needed from there on, by worker.
        self._needs: dict[int, tuple[tuple[int, int], ...]] = {}

    def take(self, heap: list[int], free: list[int]) -> int:
        """Take the first visit whose forward may begin off the heap; -1: none may."""
        count = len(self._visits.owner)
        for key in sorted(heap):
            if self._allows(key % count, free):
                heap.remove(key)
                heapify(heap)
                self._begin(key % count)
                return key % count
        return -1

    def _begin(self, visit: int) -> None:
        visits, owner = self._visits, self._visits.owner[visit]
        self._keep(visit, 1)
        self._next[owner] = visit + 1
        if visits.last[visit]:
            self._refused.clear()
            self.came_through = True
            del self._next[owner]
            for own in visits.path[owner]:
                self._keep(own, -1)

    def _allows(self, visit: int, free: list[int]) -> bool:
        visits, owner = self._visits, self._visits.owner[visit]
        members, kept = visits.members[visits.group[visit]], visits.kept[visit]
        if visit in self._refused or any(kept > free[worker] for worker in members):
            return False
        spare = list(self._spare)
        if self._comes_through(visit, spare):
            return True
        for worker in members:
            spare[worker] -= kept
        left = {**self._next, owner: visit + 1}
        while owner in left:
            through = [m for m, following in left.items() if self._passes(m, following, spare)]
            if not through:
                self._refused.add(visit)
                return False
            for microbatch in through:
                del left[microbatch]
        return True

    def _passes(self, microbatch: int, following: int, spare: list[int]) -> bool:
        """Whether it can come through; if so, what it keeps becomes spare."""
        if not self._comes_through(following, spare):
            return False
        for visit in range(self._visits.path[microbatch].start, following):
            for worker in self._visits.members[self._visits.group[visit]]:
                spare[worker] += self._visits.kept[visit]
        return True

    def _comes_through(self, visit: int, spare: list[int]) -> bool:
        """Whether all from this visit of a micro-batch on fit."""
        visits = self._visits
        if visits.hop[visit] not in self._needs:
            need: dict[int, int] = {}
            for own in range(visit, visits.path[visits.owner[visit]].stop):
                for worker in visits.members[visits.group[own]]:
                    need[worker] = need.get(worker, 0) + visits.kept[own]
            self._needs[visits.hop[visit]] = tuple(need.items())
        return all(kept <= spare[worker] for worker, kept in self._needs[visits.hop[visit]])

    def _keep(self, visit: int, sign: int) -> None:
        for worker in self._visits.members[self._visits.group[visit]]:
            self._spare[worker] -= sign * self._visits.kept[visit]
