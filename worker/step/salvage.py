"""Decision on a step that was cut off: which gradients count, and what must be redone. Pure.

A survivor's gradient of a layer is a sum over micro-batches, so it counts as a whole or not at all.
It counts if its worker holds the same share of that layer in the new plan, and no micro-batch of it
is in another sum that counts. The sums of workers that share a layer count together. Every worker
computes the same `Salvage` from the same table of `Contribution`, with each (layer, micro-batch)
once.
"""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold
from oobleck.planner.programs.compiler.compile import Work, spread

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Work of one worker on the step that it has begun and not committed, as sent to the others.
    Micro-batches are bits, the first one first."""

    #: By layer: micro-batches wholly in its gradient. Layers without any are omitted.
    added: Mapping[int, bytes]
    losses: bytes
    digests: bytes

    @classmethod
    def of(
        cls,
        added: Mapping[int, Iterable[int]],
        losses: Iterable[int],
        digests: Iterable[int],
        microbatches: int,
    ) -> "Attempt":
        """Return the attempt with these numbers of micro-batches."""

        def bits(numbers: Iterable[int]) -> bytes:
            found = np.zeros(microbatches, dtype=np.bool_)
            found[list(numbers)] = True
            return np.packbits(found).tobytes()

        return cls(
            added={layer: bits(numbers) for layer, numbers in sorted(added.items()) if numbers},
            losses=bits(losses),
            digests=bits(digests),
        )


#: Attempt of a worker that has begun no step, or committed all that it has begun.
NO_ATTEMPT = Attempt(added={}, losses=b"", digests=b"")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """Part of one worker's attempt at the step that counts."""

    #: (layers, microbatches): micro-batches wholly in its gradient of each layer. Only layers count
    #: that it holds in the state before the step, in the share of the new plan.
    added: Bools
    #: (microbatches): whose loss it knows, and whose token row digests.
    losses: Bools
    digests: Bools

    @classmethod
    def nothing(cls, layers: int, microbatches: int) -> "Contribution":
        return cls(
            added=np.zeros((layers, microbatches), dtype=np.bool_),
            losses=np.zeros(microbatches, dtype=np.bool_),
            digests=np.zeros(microbatches, dtype=np.bool_),
        )

    @classmethod
    def of(
        cls, attempt: Attempt, counting: Container[int], layers: int, microbatches: int
    ) -> "Contribution":
        """Return the part of `attempt` that counts. `counting`: layers whose sums may count, of
        `layers`. Raises ValueError where the attempt has another number of micro-batches."""
        found = cls.nothing(layers, microbatches)
        for layer, bits in attempt.added.items():
            if layer in counting:
                found.added[layer] = _bools(bits, microbatches)
        found.losses[:] = _bools(attempt.losses, microbatches)
        found.digests[:] = _bools(attempt.digests, microbatches)
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Salvage:
    """Decision on a step that was cut off: the gradients that count on each worker, and the
    remaining work."""

    #: Layers whose gradients count; all others are cleared.
    counted: Mapping[WorkerId, frozenset[int]]
    #: (layers, microbatches): what these gradients cover.
    covered: Bools
    #: For each micro-batch that is not redone: the worker that votes its loss, and the one that
    #: votes its row digests.
    loss_holder: Mapping[int, WorkerId]
    digest_holder: Mapping[int, WorkerId]
    work: Work

    @property
    def microbatches(self) -> int:
        """Number of micro-batches that are not redone."""
        return len(self.loss_holder)

    def adding(self, microbatch: int, layers: range) -> frozenset[int]:
        """Return those of `layers` whose gradients lack `microbatch`."""
        lacking = np.flatnonzero(~self.covered[layers.start : layers.stop, microbatch])
        return frozenset((lacking + layers.start).tolist())


def _bools(bits: bytes, count: int) -> Bools:
    if len(bits) != -(-count // 8):
        raise ValueError(f"{len(bits)} bytes are not the bits of {count} micro-batches")
    return np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=count).astype(np.bool_)


def plan_salvage(contributions: Mapping[WorkerId, Contribution], plan: Plan) -> Salvage:
    """Decide which gradients count and what is redone. `contributions`: of all workers of
    `plan`.
    """
    counted, covered = _count(contributions, plan)
    workers = plan.workers
    losses = {worker: contributions[worker].losses for worker in workers}
    digests = {worker: contributions[worker].digests for worker in workers}
    known = np.logical_or.reduce(list(losses.values()))
    known &= np.logical_or.reduce(list(digests.values()))
    again = ~(covered.all(axis=0) & known)
    redone = np.flatnonzero(again).tolist()
    # For each micro-batch, the first layer that lacks it; the number of layers if none does.
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
    """Return the sums that count, with micro-batches. The larger of overlapping sums counts."""
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
    """Return the micro-batches that the workers of the hold have summed for `layer`, or None."""
    first, *others = (contributions[worker].added[layer] for worker in hold.workers)
    if any(not np.array_equal(other, first) for other in others):
        return None
    return first if first.any() else None


def _holders(known: Mapping[WorkerId, Bools], wanted: Bools) -> Mapping[int, WorkerId]:
    """Return, for each wanted micro-batch, the first worker that knows it."""
    holders: dict[int, WorkerId] = {}
    left = wanted.copy()
    for worker, own in known.items():
        for microbatch in np.flatnonzero(left & own).tolist():
            holders[microbatch] = worker
        left &= ~own
    return holders
