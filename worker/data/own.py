"""The user's data set, as every worker sees it: the samples of a step, and who reads them.

`samples` defines what a sample may be.
"""

import hashlib
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from oobleck.core.job.code import Code
from oobleck.host.data.token_file import DataError
from oobleck.worker.data.loaders import Loaders
from oobleck.worker.data.order import Order
from oobleck.worker.data.samples import Reader, Samples

#: Samples whose content shows whether nodes have the same data.
_FINGERPRINTED = 16


#: Lock of all reads in this process, of any data set. An evaluation reads while the next step is
#: prefetched, and both may move the position of one open file.
_READING = threading.Lock()


class OwnDataset:
    """Data set that the job's function returned, as every worker sees it."""

    def __init__(
        self,
        source: Code,
        *,
        wide: bool,
        held_out: float = 0.0,
        key: str = "data",
        loaders: Loaders | None = None,
    ) -> None:
        """Open the data set.

        `wide`: floats become float64, as the weights are. `held_out`: share of the samples, at
        least one, that are not for training. `key`: key in the job file. `loaders`: processes that
        read the samples; None: this process reads them. Raise DataError, JobError or NodeError.
        """
        self._loaders = loaders
        self._reader = Reader(source, wide=wide, key=key)
        size = self._reader.size
        self._reader.read(0)
        self.order = Order.of(size, held_out)
        if held_out < 1.0 and not self.order.trained:
            raise DataError(
                f"{key}: has {size} samples, too few to hold out a share of {held_out} and train "
                "on the others; give more"
            )
        #: 32 bytes; nodes with equal ones train on the same samples of equal data.
        self.fingerprint = self._fingerprint()

    @property
    def form(self) -> str:
        """Form of its samples, as text."""
        return self._reader.form

    def sample(self, number: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of one sample, without rows."""
        return self._reader.read(number)

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Samples:
        """Return the samples of `step` (from 1) at `positions` of its batch.

        With loader processes, it may be called from any thread. Raise DataError, JobError or
        NodeError.
        """
        return self._stacked(self.order.of_step(seed, step, positions, global_batch))

    def held_out_rows(self, positions: Sequence[int]) -> Samples:
        """Return the held-out samples at `positions` among those held out."""
        return self._stacked(self.order.of_held_out(positions))

    def close(self) -> None:
        if self._loaders is not None:
            self._loaders.close()

    def _stacked(self, numbers: Iterable[np.uint64 | int]) -> Samples:
        wanted = [int(number) for number in numbers]
        if self._loaders is not None:
            return self._loaders.stacked(wanted, self._reader.form)
        with _READING:
            return self._reader.stacked(wanted)

    def _fingerprint(self) -> bytes:
        found = hashlib.sha256(f"{self.order}\0{self._reader.form}".encode())
        size = self.order.samples
        count = min(size, _FINGERPRINTED)
        numbers = sorted({i * (size - 1) // max(1, count - 1) for i in range(count)})
        for digest in self._stacked(numbers).digests:
            found.update(digest)
        return found.digest()
