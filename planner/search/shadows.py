"""Shadows: layers that nodes hold beside those that they run, so that more nodes can be lost.

In Bamboo (Thorpe et al., NSDI 2023) each node holds its successor's layers too. Here any node may,
whole layers to one worker, and layers on the fewest nodes get further holders. No worker computes
with a shadow: it takes part in its layer's gradient sums and updates, which keep it equal. Owns the
choice of holders. Must not know how state moves.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from msgspec import structs

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hold, ShardTable
from oobleck.core.units import runs
from oobleck.planner.cost.estimate import shadow_bytes, worker_peak_bytes
from oobleck.planner.cost.listed import listed_bytes
from oobleck.planner.cost.stages import idle_bytes

# ---- Filling of workers with further layers so that enough nodes hold each: within their memory,
# and evenly.
#
# A sweep along the layers and around the workers hands them out. A search follows for tight fits
# that the sweep misses.


#: Workers that the search may try, some 10 ms: an exhaustive search of a dozen layers.
_EFFORT = 50_000
#: Most shadows to place for which the search runs.
_MOST_SEARCHED = 128
#: Resolution of the largest load, as a part of it.
_FINENESS = 16
#: Layers that workers get.
Given = dict[WorkerId, frozenset[int]]
#: Consecutive layers that the same nodes lack.
_Run = Sequence[int]


def whole_layers(held: ShardTable, worker: WorkerId) -> frozenset[int]:
    return frozenset(shard.layer for shard in held.get(worker, ()) if shard.parts == 1)


class _Filling:
    """State of a filling: the layers handed out so far."""

    def __init__(self, gap: "Gap") -> None:
        self._gap = gap
        self.bytes: Counter[WorkerId] = Counter(gap.had)
        self.layers: dict[WorkerId, set[int]] = {}
        #: Number of nodes that each layer still needs, and the nodes that have it.
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
        """Return whether the worker can take so many more bytes, with at most `most` in all."""
        return self.bytes[worker] + size <= min(most, self._gap.room[worker])

    @property
    def given(self) -> Given:
        return {worker: frozenset(own) for worker, own in self.layers.items() if own}


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Gap to fill before a number of nodes can be lost."""

    #: By layer: bytes of a shadow, nodes that hold it, and number of nodes it still needs.
    sizes: tuple[int, ...]
    nodes: tuple[frozenset[NodeName], ...]
    copies: tuple[int, ...]
    #: Free bytes of workers, in the order in which layers are handed out: neighbours of a pipeline
    #: are adjacent.
    room: Mapping[WorkerId, int]
    #: Bytes of existing shadows, a part of `room`.
    had: Mapping[WorkerId, int]

    def filled(self, held: ShardTable, *, thorough: bool) -> Given | None:
        """Fill the gap. Shadows that are `held` stay if possible, and a sweep keeps the largest
        load of a worker low; a search follows if `thorough`. Return None where nothing is found."""
        if any(
            copies > len({worker.node for worker in self.room} - have)
            for copies, have in zip(self.copies, self.nodes, strict=True)
        ):
            return None
        for table in (held, {}) if held else ({},):
            filling = self._swept(table)
            if filling is None and thorough:
                filling = self._searched(table)
            if filling is not None:
                return filling
        return None

    def _start(self, held: ShardTable) -> _Filling:
        """Start a filling: each missing layer stays where it is `held`, first on the workers that
        have least."""
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
        """Return a filling with about the least load by which a sweep succeeds, to one part in
        `_FINENESS`; whole runs of layers where that adds little load."""
        least = -(-self._needed // len(self.room))
        step = least // _FINENESS + 1
        low, high = least - 1, least
        while (filling := self._sweep(held, high, whole=False)) is None:
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
                filling, high = better, middle
        # Accept a few bytes more for fewer holds, and so fewer sums.
        return self._sweep(held, high + high // _FINENESS, whole=True) or filling

    @cached_property
    def _needed(self) -> int:
        more = sum(c * size for c, size in zip(self.copies, self.sizes, strict=True))
        return more + sum(self.had.values())

    def _sweep(self, held: ShardTable, most: int, *, whole: bool) -> Given | None:
        """Go along the layers and around the workers: each worker without the layer gets layers up
        to so many bytes, then the next one. Return None if a layer is left over."""
        filling = self._start(held)
        for _ in range(max(self.copies)):
            ring = deque(self.room)
            left = self._runs(filling, whole=whole)
            if left:
                # Begin the ring behind a holder of the first layers.
                while ring[0].node not in self.nodes[left[0][0]]:
                    ring.rotate(-1)
                while ring[0].node in filling.nodes[left[0][0]]:
                    ring.rotate(-1)
            for run in left:
                if not self._hand_out(filling, run, ring, most):
                    return None
        return filling.given

    def _runs(self, filling: _Filling, *, whole: bool) -> list[_Run]:
        """Return the layers that need a further node: runs of layers that the same nodes have if
        `whole`, else single ones."""
        wanted = [layer for layer, copies in enumerate(filling.copies) if copies]
        if not whole:
            return [[layer] for layer in wanted]
        keyed = groupby(
            enumerate(wanted), lambda each: (each[1] - each[0], sorted(filling.nodes[each[1]]))
        )
        return [[layer for _, layer in run] for _, run in keyed]

    def _hand_out(self, filling: _Filling, run: _Run, ring: deque[WorkerId], most: int) -> bool:
        """Give the run to the first worker of the ring that can take it, which moves to the front.
        Workers that hold it move to the end; full ones leave the ring."""
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
        """Search any placement, biggest layers first, since sweeps can miss tight fits. It is exact
        for few layers and nodes, and stops where it takes long."""
        filling = self._start(held)
        wanted = [layer for layer, copies in enumerate(filling.copies) for _ in range(copies)]
        if self._needed > sum(self.room.values()) or len(wanted) > _MOST_SEARCHED:
            return None
        wanted.sort(key=lambda layer: (-self.sizes[layer], layer))
        return filling.given if self._place(filling, wanted, 0, [_EFFORT]) else None

    def _place(self, filling: _Filling, wanted: _Run, number: int, effort: list[int]) -> bool:
        """Place all of `wanted` from `number` on, first where it leaves the least memory; return
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
            if (worker.node, left) in tried:  # equal to a tried worker of the node
                continue
            tried.add((worker.node, left))
            filling.give(worker, layer)
            if self._place(filling, wanted, number + 1, effort):
                return True
            filling.take_back(worker, layer)
        return False


def with_shadows(
    plan: Plan,
    profile: Profile,
    *,
    fault_tolerance: int,
    held: ShardTable | None = None,
    moving: bool = True,
    kept: float = 1.0,
    thorough: bool = True,
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
        bare = replace(
            plan, holds=tuple(structs.replace(hold, resident=False) for hold in plan.holds)
        )
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
        given = gap.filled(held or {}, thorough=thorough)
        if given is not None:
            break
    else:
        return plan
    if not moving:
        given = {w: layers & whole_layers(held or {}, w) for w, layers in given.items()}
    more = tuple(hold for worker in sorted(given) for hold in _holds(worker, given[worker]))
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
