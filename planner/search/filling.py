"""Filling of workers with further layers so that enough nodes hold each: within their room, and
evenly.

A sweep along the layers and around the workers hands them out; what just fits and a sweep misses is
searched for. Must not know plans, nor where room comes from.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.routes import ShardTable

#: Workers that the search for room asks, some 10 ms: all there is to ask of a dozen layers.
_EFFORT = 50_000
#: For more shadows than these it ends before it begins.
_MOST_SEARCHED = 128
#: The most that is held beside is known to one part in so many.
_FINENESS = 16
#: The layers that workers get.
Given = dict[WorkerId, frozenset[int]]
#: Layers in a row that the same nodes lack.
_Run = Sequence[int]


def whole_layers(held: ShardTable, worker: WorkerId) -> frozenset[int]:
    return frozenset(shard.layer for shard in held.get(worker, ()) if shard.parts == 1)


class _Filling:
    """State of a filling: who has got what so far."""

    def __init__(self, gap: "Gap") -> None:
        self._gap = gap
        self.bytes: Counter[WorkerId] = Counter(gap.had)
        self.layers: dict[WorkerId, set[int]] = {}
        #: How many more nodes each layer needs, and who has it.
        self.copies = list(gap.copies)
        self.nodes = [set(have) for have in gap.nodes]

    def give(self, worker: WorkerId, layer: int) -> None:
        self.bytes[worker] += self._gap.sizes[layer]
        self.layers.setdefault(worker, set()).add(layer)
        self.copies[layer] -= 1
        self.nodes[layer].add(worker.node)

    def take_back(self, worker: WorkerId, layer: int) -> None:
        self.bytes[worker] -= self._gap.sizes[layer]
        self.layers[worker].remove(layer)
        self.copies[layer] += 1
        self.nodes[layer].remove(worker.node)

    def fits(self, worker: WorkerId, size: int, most: int) -> bool:
        """Return whether the worker can have so much more, with `most` in all."""
        return self.bytes[worker] + size <= min(most, self._gap.room[worker])

    @property
    def given(self) -> Given:
        return {worker: frozenset(own) for worker, own in self.layers.items() if own}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Gap to be filled before a number of nodes can be lost."""

    #: Bytes of a shadow of each layer; the nodes that hold it, and how many more it needs.
    sizes: tuple[int, ...]
    nodes: tuple[frozenset[NodeName], ...]
    copies: tuple[int, ...]
    #: In the order in which layers are handed out: neighbours of a pipeline side by side.
    room: Mapping[WorkerId, int]
    #: Of that, bytes of shadows that are there.
    had: Mapping[WorkerId, int]

    def filled(self, held: ShardTable) -> Given | None:
        """Fill the gap. Shadows that are `held` stay in their place if that can be, and the most
        that any worker gets is as little as a sweep finds it. Returns None where nothing is
        found."""
        if any(
            copies > len({worker.node for worker in self.room} - have)
            for copies, have in zip(self.copies, self.nodes, strict=True)
        ):
            return None
        for table in (held, {}) if held else ({},):
            found = self._swept(table) or self._searched(table)
            if found is not None:
                return found
        return None

    def _start(self, held: ShardTable) -> _Filling:
        """Start with each missing layer where it is `held`, first on the workers that have
        least."""
        filling = _Filling(self)
        having: dict[int, list[WorkerId]] = {}
        for worker in self.room if held else ():
            for layer in whole_layers(held, worker):
                having.setdefault(layer, []).append(worker)
        for layer in sorted(having):
            workers = sorted(having[layer], key=lambda worker: (filling.bytes[worker], worker))
            for worker in workers:
                if (
                    filling.copies[layer]
                    and worker.node not in filling.nodes[layer]
                    and filling.fits(worker, self.sizes[layer], self.room[worker])
                ):
                    filling.give(worker, layer)
        return filling

    # ---- evenly, by sweeps

    def _swept(self, held: ShardTable) -> Given | None:
        """The least that a sweep succeeds with, as `_FINENESS` tells it; whole runs of layers where
        nobody gets more so."""
        least = -(-self._needed // len(self.room))
        step = least // _FINENESS + 1
        low, high = least - 1, least
        while (found := self._sweep(held, high, whole=False)) is None:
            if high > self._needed:
                return None
            low, high = high, high + step
            step *= 2
        while high - low > least // _FINENESS + 1:
            middle = (low + high) // 2
            better = self._sweep(held, middle, whole=False)
            if better is None:
                low = middle
            else:
                found, high = better, middle
        # A few bytes more are worth fewer holds, and so fewer sums.
        return self._sweep(held, high + high // _FINENESS, whole=True) or found

    @cached_property
    def _needed(self) -> int:
        more = sum(c * size for c, size in zip(self.copies, self.sizes, strict=True))
        return more + sum(self.had.values())

    def _sweep(self, held: ShardTable, most: int, *, whole: bool) -> Given | None:
        """Go along the layers and around the workers: each gets what comes, up to so many bytes,
        and then the next one, which does not hold it. None: something is left over."""
        filling = self._start(held)
        for _ in range(max(self.copies)):
            ring = deque(self.room)
            left = self._runs(filling, whole=whole)
            if left:
                # The neighbour of who holds the first layers begins with them.
                while ring[0].node not in self.nodes[left[0][0]]:
                    ring.rotate(-1)
                while ring[0].node in filling.nodes[left[0][0]]:
                    ring.rotate(-1)
            for run in left:
                if not self._hand_out(filling, run, ring, most):
                    return None
        return filling.given

    def _runs(self, filling: _Filling, *, whole: bool) -> list[_Run]:
        """The layers that need a further node: those in a row of the same nodes together, if
        `whole`, else one by one."""
        wanted = [layer for layer, copies in enumerate(filling.copies) if copies]
        if not whole:
            return [[layer] for layer in wanted]
        keyed = groupby(
            enumerate(wanted), lambda each: (each[1] - each[0], sorted(filling.nodes[each[1]]))
        )
        return [[layer for _, layer in run] for _, run in keyed]

    def _hand_out(self, filling: _Filling, run: _Run, ring: deque[WorkerId], most: int) -> bool:
        """Give the run to the first of the ring that can have it, who then is the first. Workers
        that hold it come last; full ones come no more."""
        size = sum(self.sizes[layer] for layer in run)
        holding: list[WorkerId] = []
        while ring:
            worker = ring[0]
            if worker.node in filling.nodes[run[0]]:
                holding.append(ring.popleft())
            elif not filling.fits(worker, size, most):
                ring.popleft()
            else:
                for layer in run:
                    filling.give(worker, layer)
                ring.extend(holding)
                return True
        return False

    # ---- at all, by a search

    def _searched(self, held: ShardTable) -> Given | None:
        """Anywhere, biggest layers first; sweeps can miss what just fits. Exact for few layers and
        nodes, and given up where it takes long."""
        filling = self._start(held)
        wanted = [layer for layer, copies in enumerate(filling.copies) for _ in range(copies)]
        if self._needed > sum(self.room.values()) or len(wanted) > _MOST_SEARCHED:
            return None
        wanted.sort(key=lambda layer: (-self.sizes[layer], layer))
        return filling.given if self._place(filling, wanted, 0, [_EFFORT]) else None

    def _place(self, filling: _Filling, wanted: _Run, number: int, effort: list[int]) -> bool:
        """Place all of `wanted` from `number` on, first where it leaves the least room; return
        whether all fit."""
        if number == len(wanted):
            return True
        layer = wanted[number]
        effort[0] -= len(self.room)
        tried: set[tuple[NodeName, int]] = set()
        fitting = sorted(
            (self.room[worker] - filling.bytes[worker], order, worker)
            for order, worker in enumerate(self.room)
            if worker.node not in filling.nodes[layer]
            and filling.fits(worker, self.sizes[layer], self.room[worker])
        )
        for left, _, worker in fitting:
            if effort[0] < 0:
                return False
            if (worker.node, left) in tried:  # another worker of the node, with as much room
                continue
            tried.add((worker.node, left))
            filling.give(worker, layer)
            if self._place(filling, wanted, number + 1, effort):
                return True
            filling.take_back(worker, layer)
        return False
