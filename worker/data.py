"""Training data: which token rows a step uses, and reading them.

A row is `sequence_length` + 1 tokens: inputs and, moved by one, targets. The corpus is cut into
such windows, one token overlapping, and every epoch goes through all of them in an order that is a
stateless permutation of (seed, epoch), so that any worker finds any sample of any step by itself.

Documents are packed: a window may hold the end of one and the beginning of others, with what
separates them in between, and attention goes over all of it, as is usual for GPT.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from oobleck.host.tokenfile import DataError
from oobleck.planner.job import DataSpec
from oobleck.worker.corpus import Corpus
from oobleck.worker.random import derive

Tokens = NDArray[np.int64]

_FEISTEL_ROUNDS = 6


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
        self, spec: DataSpec, sequence_length: int, vocabulary: int, key: str = "data"
    ) -> None:
        """`key`: what the job file calls `spec`. Raises DataError."""
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
        #: 32 bytes, equal on nodes with equal data.
        self.fingerprint = self._corpus.fingerprint

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Tokens:
        """The rows (n, sequence_length + 1) of step `step` (from 1) at `positions` of its batch."""
        samples = (step - 1) * global_batch + np.asarray(positions, dtype=np.int64)
        windows = np.empty(len(samples), dtype=np.uint64)
        epochs, order = np.divmod(samples, self.windows)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            windows[chosen] = permute(
                order[chosen].astype(np.uint64), self.windows, seed=seed, epoch=int(epoch)
            )
        rows = [self._window(int(window)) for window in windows]
        return np.stack(rows) if rows else np.empty((0, self._length + 1), dtype=np.int64)

    def _window(self, window: int) -> Tokens:
        return self._corpus.read(window * self._length, self._length + 1).astype(np.int64)
