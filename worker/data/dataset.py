"""Training data: which token rows a step uses, and reading them.

A row is `sequence_length` + 1 tokens: inputs and, moved by one, targets. The corpus is cut into
such windows, one token overlapping. Which of them a step uses is `order`'s.
Documents are packed: attention goes over all that a window holds, as is usual for GPT.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from oobleck.core.job.spec import DataSpec
from oobleck.host.data.token_file import DataError
from oobleck.worker.data.corpus import Corpus
from oobleck.worker.data.order import Order

Tokens = NDArray[np.int64]


def row_digest(row: Tokens) -> bytes:
    """SHA-256 of a row's tokens as little-endian 32-bit integers."""
    return hashlib.sha256(row.astype("<i4").tobytes()).digest()


def samples_digest(row_digests: Iterable[bytes]) -> str:
    """A step's digest: SHA-256 (hex) over its rows' digests in global sample order."""
    return hashlib.sha256(b"".join(row_digests)).hexdigest()


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
        self.order = Order.of((tokens - 1) // sequence_length, held_out)
        if held_out < 1.0 and not self.order.trained:
            raise DataError(
                f"{key}: has {self.order.samples} rows of {sequence_length + 1} tokens, too few to "
                f"hold out a share of {held_out} and train on the others; give more text or lower "
                "model.sequence_length"
            )
        #: 32 bytes, equal on nodes with equal data, of which they train on the same windows.
        self.fingerprint = self._corpus.fingerprint
        if self.order.held_out:
            split = self.fingerprint + self.order.held_out.to_bytes(8, "little")
            self.fingerprint = hashlib.sha256(split).digest()

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Tokens:
        """The rows (n, sequence_length + 1) of step `step` (from 1) at `positions` of its batch."""
        return self._windows(self.order.of_step(seed, step, positions, global_batch))

    def held_out_rows(self, positions: Sequence[int]) -> Tokens:
        """The rows (n, sequence_length + 1) at `positions` of those held out."""
        return self._windows(self.order.of_held_out(positions))

    def _windows(self, windows: NDArray[np.uint64]) -> Tokens:
        rows = [
            self._corpus.read(int(window) * self._length, self._length + 1) for window in windows
        ]
        if not rows:
            return np.empty((0, self._length + 1), dtype=np.int64)
        return np.stack(rows).astype(np.int64)
