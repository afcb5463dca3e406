"""Transfers of layers' state between workers before a new plan can start.

Every worker computes the same list from the same table, so none needs to be sent it. A stage of d
workers keeps its layers' state (parameters, gradients, moments) in shards. Worker p of d holds part
p of d of each layer's flat state. When the grouping changes, 2 workers to 1 or 3 to 2, missing
pieces come from their holders. Owns the missing pieces and their holders;
`oobleck.planner.programs.balance` chooses the senders. Must not know how state travels.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost, Shard, ShardTable
from oobleck.planner.programs.balance import Task, balance

#: Unit of the cuts: shares of a layer's numbers begin at multiples of it.
#:
#: Vectorised kernels round the last few numbers of a tensor, fewer than these, unlike the others.
#: With such cuts an update gives the same result to the last bit however the layer is cut, and
#: copies of it in different cuts stay equal.
CUT_NUMBERS = 16


def cut(share: Fraction, count: int) -> int:
    """Return where the first `share` of `count` numbers ends."""
    return min(count, share.numerator * -(-count // CUT_NUMBERS) // share.denominator * CUT_NUMBERS)


#: Layers whose whole state each reachable worker holds, all at the same committed step.
LayerTable = Mapping[WorkerId, frozenset[int]]


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Transfer:
    """Transfer of the state of `layer` (parameters and moments) from source to destination.

    It is all of the state, or the piece from `start` to `stop` of the flat state. In its tied part
    and in its own part, each of n numbers, a piece is those from cut(start, n) to cut(stop, n) - 1.
    """

    layer: int
    source: WorkerId
    destination: WorkerId
    start: Fraction = Fraction(0)
    stop: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= 1:
            raise ValueError(f"a piece from {self.start} to {self.stop} of a layer is not one")


def plan_transfers(
    held: LayerTable | ShardTable, plan: Plan, *, state_bytes: Sequence[int]
) -> tuple[Transfer, ...]:
    """List all transfers after which every worker of `plan` holds its layers, or its parts, sorted.

    A piece that a worker of the destination's node holds comes from there. The rest is spread over
    its holders so that the largest load of a sender is as small as possible
    (`oobleck.planner.programs.balance`). A worker receives exactly what it lacks, from any sender.
    Raises LayerLost.
    """
    table = {worker: _shards(held[worker]) for worker in sorted(held, key=_key)}
    wanted = [
        (worker, shard)
        for worker, shards in sorted(plan.shards.items(), key=lambda item: _key(item[0]))
        for shard in sorted(shards - table.get(worker, frozenset()), key=_place)
    ]
    holders: dict[int, list[tuple[WorkerId, Shard]]] = {shard.layer: [] for _, shard in wanted}
    for worker, shards in table.items():
        for shard in shards:
            if shard.layer in holders:
                holders[shard.layer].append((worker, shard))
    held_pieces = {s: _cut(s, holders[s.layer]) for s in dict.fromkeys(s for _, s in wanted)}
    pieces = [
        _Piece(layer=shard.layer, start=start, stop=stop, destination=worker, holders=having)
        for worker, shard in wanted
        for start, stop, having in held_pieces[shard]
        if worker not in having
    ]
    if lost := {piece.layer for piece in pieces if not piece.holders}:
        raise LayerLost(lost)

    sources = balance(
        [
            Task(
                size=_bytes(piece, state_bytes[piece.layer]),
                near=tuple(w for w in piece.holders if w.node == piece.destination.node),
                far=tuple(piece.holders),
            )
            for piece in pieces
        ]
    )
    return tuple(sorted(_joined(zip(pieces, sources, strict=True)), key=_order))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Piece of state that `destination` lacks, and the workers that hold all of it."""

    layer: int
    start: Fraction
    stop: Fraction
    destination: WorkerId
    holders: dict[WorkerId, None]


def _shards(held: frozenset[int] | frozenset[Shard]) -> frozenset[Shard]:
    return frozenset(item if isinstance(item, Shard) else Shard(item) for item in held)


def _cut(
    shard: Shard, holders: Sequence[tuple[WorkerId, Shard]]
) -> list[tuple[Fraction, Fraction, dict[WorkerId, None]]]:
    """Return the pieces of `shard`, cut where the set of their holders changes, each with its
    holders.
    """
    others = dict.fromkeys(other for _, other in holders)
    cuts = {shard.start, shard.stop}
    for other in others:
        cuts.update(cut for cut in (other.start, other.stop) if shard.start < cut < shard.stop)
    pieces = []
    for start, stop in pairwise(sorted(cuts)):
        inside = {other for other in others if other.start <= start and stop <= other.stop}
        pieces.append((start, stop, dict.fromkeys(w for w, other in holders if other in inside)))
    return pieces


def _bytes(piece: _Piece, count: int) -> int:
    return int(piece.stop * count) - int(piece.start * count)


def _joined(pieces: Iterable[tuple[_Piece, WorkerId]]) -> Iterator[Transfer]:
    """Yield transfers, with adjacent pieces of one layer, source and destination merged."""
    last: Transfer | None = None
    for piece, source in pieces:
        transfer = Transfer(
            layer=piece.layer,
            source=source,
            destination=piece.destination,
            start=piece.start,
            stop=piece.stop,
        )
        if last is not None and (last.layer, last.source, last.destination, last.stop) == (
            transfer.layer,
            transfer.source,
            transfer.destination,
            transfer.start,
        ):
            last = Transfer(
                layer=last.layer,
                source=last.source,
                destination=last.destination,
                start=last.start,
                stop=transfer.stop,
            )
            continue
        if last is not None:
            yield last
        last = transfer
    if last is not None:
        yield last


def _key(worker: WorkerId) -> tuple[str, int]:
    # Tuples compare faster than dataclasses, by the same order.
    return worker.node, worker.slot


def _place(shard: Shard) -> tuple[int, int, int]:
    return shard.layer, shard.part, shard.parts


def _order(transfer: Transfer) -> tuple[object, ...]:
    return (
        transfer.layer,
        *_key(transfer.source),
        *_key(transfer.destination),
        transfer.start,
        transfer.stop,
    )
