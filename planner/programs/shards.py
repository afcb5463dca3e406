"""Parts of a layer's state, and whether some of them make up all of a model.

Must not know plans.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fractions import Fraction

from oobleck.planner.errors import LayerLost
from oobleck.planner.ids import WorkerId


@dataclass(frozen=True, slots=True, order=True)
class Shard:
    """Part `part` of `parts` equal ones of a layer's flat state (see `cut`)."""

    layer: int
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.part < self.parts:
            raise ValueError(f"part {self.part} of {self.parts}; parts count from 0")

    @property
    def start(self) -> Fraction:
        return Fraction(self.part, self.parts)

    @property
    def stop(self) -> Fraction:
        return Fraction(self.part + 1, self.parts)


#: What each worker holds.
ShardTable = Mapping[WorkerId, frozenset[Shard]]


def require_holders(held: ShardTable, layer_count: int) -> None:
    """Raises LayerLost where a layer, or a part of one, is with nobody."""
    spans: dict[int, set[Shard]] = {layer: set() for layer in range(layer_count)}
    for shards in set(held.values()):
        for shard in shards:
            spans[shard.layer].add(shard)
    if lost := {layer for layer, shards in spans.items() if not _cover(shards)}:
        raise LayerLost(lost)


def _cover(shards: Collection[Shard]) -> bool:
    """Return whether the shards make up the whole layer."""
    if any(shard.parts == 1 for shard in shards):
        return True
    reached = Fraction(0)
    for shard in sorted(shards, key=lambda shard: shard.start):
        if shard.start > reached:
            return False
        reached = max(reached, shard.stop)
    return reached == 1
