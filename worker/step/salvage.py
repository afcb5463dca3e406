"""What counts of a step that was cut off, and what must be done again. Pure.

A survivor's gradient of a layer is a sum over micro-batches, so it counts as a whole or not at all:
if its worker holds the same share of that layer in the new plan, and no micro-batch of it is in
another sum that counts. The sums of workers that share a layer count together. From the same table
of `Contribution` every worker draws the same `Salvage`, with each (layer, micro-batch) once.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.ids import WorkerId
from oobleck.planner.programs.plan import Plan
from oobleck.planner.programs.routes import Hold
from oobleck.planner.programs.work import Work, spread

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """What one worker has of the step."""

    #: (layers, microbatches): which micro-batches are wholly in its gradient of each layer, of
    #: those that it holds in the state before the step, in the share that the new plan gives it.
    added: Bools
    #: (microbatches): whose loss it knows, and of whose token rows the digests.
    losses: Bools
    digests: Bools

    @classmethod
    def nothing(cls, layers: int, microbatches: int) -> "Contribution":
        return cls(
            added=np.zeros((layers, microbatches), dtype=np.bool_),
            losses=np.zeros(microbatches, dtype=np.bool_),
            digests=np.zeros(microbatches, dtype=np.bool_),
        )

    def to_row(self) -> NDArray[np.uint8]:
        return np.packbits(np.concatenate([self.added.ravel(), self.losses, self.digests]))

    @classmethod
    def from_row(cls, row: NDArray[np.uint8], layers: int, microbatches: int) -> "Contribution":
        count = layers * microbatches
        bits = np.unpackbits(row, count=count + 2 * microbatches).astype(np.bool_)
        added, losses, digests = np.split(bits, [count, count + microbatches])
        return cls(added=added.reshape(layers, microbatches), losses=losses, digests=digests)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Salvage:
    """What every worker does with what it has, and the work that is left."""

    #: The layers whose gradients count; all others are cleared.
    counted: Mapping[WorkerId, frozenset[int]]
    #: (layers, microbatches): what is in one of those.
    covered: Bools
    #: Of each micro-batch that is not done again: who puts its loss, and who the digests of its
    #: rows, into the vote.
    loss_holder: Mapping[int, WorkerId]
    digest_holder: Mapping[int, WorkerId]
    work: Work

    @property
    def microbatches(self) -> int:
        """How many are not done again."""
        return len(self.loss_holder)

    def adding(self, microbatch: int, layers: range) -> frozenset[int]:
        """The layers of `layers` whose gradients lack `microbatch`."""
        lacking = np.flatnonzero(~self.covered[layers.start : layers.stop, microbatch])
        return frozenset((lacking + layers.start).tolist())


def plan_salvage(contributions: Mapping[WorkerId, Contribution], plan: Plan) -> Salvage:
    """`contributions`: of all workers of `plan`."""
    counted, covered = _count(contributions, plan)
    workers = plan.workers
    losses = {worker: contributions[worker].losses for worker in workers}
    digests = {worker: contributions[worker].digests for worker in workers}
    known = np.logical_or.reduce(list(losses.values()))
    known &= np.logical_or.reduce(list(digests.values()))
    again = ~(covered.all(axis=0) & known)
    redone = np.flatnonzero(again).tolist()
    # The first layer that lacks it; all but the lacking ones are covered.
    lowest = np.where(covered.all(axis=0), len(covered), covered.argmin(axis=0))
    return Salvage(
        counted=counted,
        covered=covered,
        loss_holder=_holders(losses, ~again),
        digest_holder=_holders(digests, ~again),
        work=Work(
            microbatches=spread(redone, plan),
            lowest={microbatch: int(lowest[microbatch]) for microbatch in redone},
        ),
    )


def _count(
    contributions: Mapping[WorkerId, Contribution], plan: Plan
) -> tuple[Mapping[WorkerId, frozenset[int]], Bools]:
    """The sums that count, and what is in them. Of those that overlap the larger one counts."""
    some = next(iter(contributions.values()))
    covered = np.zeros_like(some.added)
    counted: dict[WorkerId, set[int]] = {worker: set() for worker in plan.workers}
    for layer in range(len(covered)):
        found = [
            (hold.workers, added)
            for hold in plan.holds
            if layer in hold.layers
            if (added := _common(hold, layer, contributions)) is not None
        ]
        for workers, added in sorted(found, key=lambda sum_: (-int(sum_[1].sum()), sum_[0])):
            if not (covered[layer] & added).any():
                covered[layer] |= added
                for worker in workers:
                    counted[worker].add(layer)
    return {worker: frozenset(layers) for worker, layers in counted.items()}, covered


def _common(hold: Hold, layer: int, contributions: Mapping[WorkerId, Contribution]) -> Bools | None:
    """The micro-batches that the workers of the hold have summed for `layer`; None for none."""
    first, *others = (contributions[worker].added[layer] for worker in hold.workers)
    if any(not np.array_equal(other, first) for other in others):
        return None
    return first if first.any() else None


def _holders(known: Mapping[WorkerId, Bools], wanted: Bools) -> Mapping[int, WorkerId]:
    """For each micro-batch that is wanted, the first worker that knows it."""
    holders: dict[int, WorkerId] = {}
    left = wanted.copy()
    for worker, own in known.items():
        for microbatch in np.flatnonzero(left & own).tolist():
            holders[microbatch] = worker
        left &= ~own
    return holders
