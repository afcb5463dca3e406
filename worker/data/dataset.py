"""Training data: which token rows a step uses, and reading them.

A row is `sequence_length` + 1 tokens: inputs and, moved by one, targets. The corpus is cut into
such windows, one token overlapping. Every epoch goes through all of them in an order that is a
stateless permutation of (seed, epoch), so any worker finds any sample of any step by itself.
Documents are packed: attention goes over all that a window holds, as is usual for GPT.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from oobleck.host.data.token_file import DataError
from oobleck.planner.job.spec import DataSpec
from oobleck.worker.data.corpus import Corpus
from oobleck.worker.runtime.random import derive

Tokens = NDArray[np.int64]

_FEISTEL_ROUNDS = 6
#: No epoch: the order of windows of which the last ones are held out, whatever the job's seed.
_SPLIT = -1


def row_digest(row: Tokens) -> bytes:
    """SHA-256 of a row's tokens as little-endian 32-bit integers."""
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()


def samples_digest(row_digests: Iterable[bytes]) -> str:
    """A step's digest: SHA-256 (hex) over its rows' digests in global sample order."""
    return hashlib.sha256(b"".join(row_digests)).hexdigest()


def permute(values: NDArray[np.uint64], size: int, *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Where a shuffle of range(`size`) that (seed, epoch) names puts each of `values`.

    A Feistel network permutes the next power of four; values that fall outside of `size` walk on
    through it until they are inside (Black and Rogaway 2002), less than four rounds on average.
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
    """The finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Dataset:
    """The corpus of a job in windows, as every worker sees it."""

    def __init__(
        self,
        spec: DataSpec,
        sequence_length: int,
        vocabulary: int,
        *,
        held_out: float = 0.0,
        key: str = "data",
    ) -> None:
        """`held_out`: share of the windows, one at least, that are not for training; `key`: what
        the job file calls `spec`. Raises DataError."""
        self._length = sequence_length
        self._corpus = Corpus(spec, vocabulary, key)
        tokens = self._corpus.tokens
        if tokens <= sequence_length:
            what = spec.tokens if spec.tokens is not None else ", ".join(spec.text)
            raise DataError(
                f"{key}: {what} holds {tokens} tokens, too few for one row of "
                f"{sequence_length + 1}; give more text or lower model.sequence_length"
            )
        self.windows = (tokens - 1) // sequence_length
        #: Of these; the others are trained on.
        self.held_out = max(1, round(held_out * self.windows)) if held_out else 0
        self._trained = self.windows - self.held_out
        if held_out < 1.0 and not self._trained:
            raise DataError(
                f"{key}: has {self.windows} rows of {sequence_length + 1} tokens, too few to hold "
                f"out a share of {held_out} and train on the others; give more text or lower "
                "model.sequence_length"
            )
        #: 32 bytes, equal on nodes with equal data, of which they train on the same windows.
        self.fingerprint = self._corpus.fingerprint
        if self.held_out:
            split = self.fingerprint + self.held_out.to_bytes(8, "little")
            self.fingerprint = hashlib.sha256(split).digest()

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Tokens:
        """The rows (n, sequence_length + 1) of step `step` (from 1) at `positions` of its batch."""
        samples = (step - 1) * global_batch + np.asarray(positions, dtype=np.int64)
        order = np.empty(len(samples), dtype=np.uint64)
        epochs, places = np.divmod(samples, self._trained)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order[chosen] = permute(
                places[chosen].astype(np.uint64), self._trained, seed=seed, epoch=int(epoch)
            )
        return self._windows(order)

    def held_out_rows(self, positions: Sequence[int]) -> Tokens:
        """The rows (n, sequence_length + 1) at `positions` of those held out, below `held_out`.

        Which windows they are is a function of the corpus and the share alone.
        """
        return self._windows(np.asarray(positions, dtype=np.uint64) + np.uint64(self._trained))

    def _windows(self, places: NDArray[np.uint64]) -> Tokens:
        """The rows at `places` of the order of all windows: first those that are trained on."""
        if self.held_out:
            places = permute(places, self.windows, seed=0, epoch=_SPLIT)
        rows = [
            self._corpus.read(int(window) * self._length, self._length + 1) for window in places
        ]
        if not rows:
            return np.empty((0, self._length + 1), dtype=np.int64)
        return np.stack(rows).astype(np.int64)
