"""Choice of the samples that a step uses.

Every epoch goes through all of them in an order that is a stateless permutation of (seed, epoch).
So any worker can compute the samples of any step by itself. Must not know what a sample is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oobleck.core.purpose import derive

_FEISTEL_ROUNDS = 6
#: Number of the fixed shuffle whose last samples are held out; it is no epoch and ignores the seed.
_SPLIT = -1


def permute(values: NDArray[np.uint64], size: int, *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return the places of `values` in the shuffle of range(`size`) named by (seed, epoch).

    A Feistel network permutes the next power of four. A value that lands outside `size` is permuted
    again until it is inside (Black and Rogaway 2002): less than four rounds on average.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(seed, "order", epoch, i)) for i in range(_FEISTEL_ROUNDS)]
    out = values.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= np.uint64(size)]
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order in which a job's steps use its `samples`.

    The last `held_out` samples of a fixed shuffle are not trained on; every epoch shuffles the
    others anew.
    """

    samples: int
    held_out: int

    @staticmethod
    def of(samples: int, share: float) -> "Order":
        """Hold out `share` of the samples; at least one if the share is positive."""
        return Order(samples=samples, held_out=max(1, round(share * samples)) if share else 0)

    @property
    def trained(self) -> int:
        return self.samples - self.held_out

    def of_step(
        self, seed: int, step: int, positions: Sequence[int], global_batch: int
    ) -> NDArray[np.uint64]:
        """Return the samples of `step` (from 1) at `positions` of its batch."""
        wanted = (step - 1) * global_batch + np.asarray(positions, dtype=np.int64)
        order = np.empty(len(wanted), dtype=np.uint64)
        epochs, places = np.divmod(wanted, self.trained)
        for epoch in sorted(set(epochs.tolist())):  # np.unique would import numpy.ma first
            chosen = epochs == epoch
            order[chosen] = permute(
                places[chosen].astype(np.uint64), self.trained, seed=seed, epoch=epoch
            )
        return self._apart(order)

    def of_held_out(self, positions: Sequence[int]) -> NDArray[np.uint64]:
        """Return the held-out samples at `positions` among those held out.

        They depend only on the number of samples and the held-out share.
        """
        return self._apart(np.asarray(positions, dtype=np.uint64) + np.uint64(self.trained))

    def _apart(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the samples at `places` of the order that has all training samples first."""
        return permute(places, self.samples, seed=0, epoch=_SPLIT) if self.held_out else places
