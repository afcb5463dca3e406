"""A data set of the user's: `len(data)` samples, `data[i]` of (inputs, targets), on every worker.

Owns what a sample may be, and that all are alike. Which samples a step uses is `order`'s.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oobleck.host.data.token_file import DataError
from oobleck.planner.job.code import Code
from oobleck.worker.data.order import Order
from oobleck.worker.models.tree import flatten, map_tensors, shown, structure, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError

#: Samples whose content says whether nodes have the same data.
_FINGERPRINTED = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Samples, stacked: a tensor, tuple, list or dict of tensors each, with rows first."""

    inputs: Any
    targets: Any
    #: SHA-256 of each sample.
    digests: tuple[bytes, ...]

    def __getitem__(self, rows: slice) -> "Samples":
        return Samples(
            inputs=map_tensors(lambda tensor: tensor[rows], self.inputs),
            targets=map_tensors(lambda tensor: tensor[rows], self.targets),
            digests=self.digests[rows],
        )


def as_tensors(value: Any) -> Any:
    """`value` with numbers and arrays as tensors. Raises TypeError."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, np.ndarray | np.generic):
        return torch.from_numpy(np.array(value))
    if isinstance(value, bool | int | float):
        return torch.tensor(value)
    if type(value) in (tuple, list):
        return type(value)(map(as_tensors, value))
    if isinstance(value, dict):
        return {name: as_tensors(item) for name, item in value.items()}
    raise TypeError(
        f"{type(value).__name__} is no tensor, array or number, nor a tuple, list or dict of such"
    )


def digest(sample: tuple[Any, Any]) -> bytes:
    """SHA-256 over type, shape and numbers of a sample's tensors, in order."""
    found = hashlib.sha256()
    for tensor in [*flatten(sample[0]), *flatten(sample[1])]:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


class OwnDataset:
    """What the job's function returned, as every worker sees it."""

    def __init__(
        self, source: Code, *, wide: bool, held_out: float = 0.0, key: str = "data"
    ) -> None:
        """`wide`: floats become float64, as the weights are; `held_out`: share of the samples, one
        at least, that are not for training; `key`: of the job file. Raises DataError, JobError,
        NodeError."""
        self._key = key
        self._wide = wide
        self._items = code.call(source, key)
        try:
            size = len(self._items)
        except TypeError as error:
            raise JobError(
                f"{key}: {source.name} gave {type(self._items).__name__}, which has no length; "
                "return a map-style data set, with __len__ and __getitem__"
            ) from error
        if not size:
            raise DataError(f"{key}: {source.name} gave no samples on this node")
        #: What all samples must look like.
        self._form = ""
        self._form = self._form_of(self._read(0))
        self.order = Order.of(size, held_out)
        if held_out < 1.0 and not self.order.trained:
            raise DataError(
                f"{key}: has {size} samples, too few to hold out a share of {held_out} and train "
                "on the others; give more"
            )
        #: 32 bytes, equal on nodes with equal data, of which they train on the same samples.
        self.fingerprint = self._fingerprint()

    def sample(self, number: int) -> tuple[Any, Any]:
        """(inputs, targets) of one sample, without rows."""
        return self._read(number)

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Samples:
        """Those of step `step` (from 1) at `positions` of its batch. Raises DataError, JobError."""
        return self._stacked(self.order.of_step(seed, step, positions, global_batch))

    def held_out_rows(self, positions: Sequence[int]) -> Samples:
        """Those at `positions` of the ones held out."""
        return self._stacked(self.order.of_held_out(positions))

    def _stacked(self, numbers: NDArray[np.uint64]) -> Samples:
        samples = [self._read(int(number)) for number in numbers]
        inputs, targets = (self._stack([sample[side] for sample in samples]) for side in (0, 1))
        return Samples(inputs=inputs, targets=targets, digests=tuple(map(digest, samples)))

    def _stack(self, trees: Sequence[Any]) -> Any:
        columns = zip(*map(flatten, trees), strict=True)
        stacked = [self._widened(torch.stack(column)) for column in columns]
        return unflatten(structure(trees[0]), stacked)

    def _widened(self, tensor: Tensor) -> Tensor:
        return tensor.double() if self._wide and tensor.is_floating_point() else tensor

    def _read(self, number: int) -> tuple[Any, Any]:
        try:
            sample = self._items[number]
        except OSError as error:
            raise DataError(f"{self._key}: sample {number}: {code.described(error)}") from error
        except Exception as error:
            raise JobError(f"{self._key}: sample {number}: {code.described(error)}") from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise JobError(
                f"{self._key}: sample {number} is {type(sample).__name__}, and must be "
                "(inputs, targets)"
            )
        try:
            inputs, targets = map(as_tensors, sample)
        except TypeError as error:
            raise JobError(f"{self._key}: sample {number}: {error}") from error
        form = self._form_of((inputs, targets))
        if self._form and form != self._form:
            raise JobError(
                f"{self._key}: sample {number} is {form}, and sample 0 is {self._form}; make all "
                "samples alike: cut and pad them to one length"
            )
        return inputs, targets

    def _form_of(self, sample: tuple[Any, Any]) -> str:
        """Structure, shapes and types, for people to read and to compare."""
        return " -> ".join(map(shown, sample))

    def _fingerprint(self) -> bytes:
        found = hashlib.sha256(f"{self.order}\0{self._form}".encode())
        size = self.order.samples
        count = min(size, _FINGERPRINTED)
        for number in sorted({i * (size - 1) // max(1, count - 1) for i in range(count)}):
            found.update(digest(self._read(number)))
        return found.digest()
