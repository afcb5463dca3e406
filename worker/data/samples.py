"""Samples of a data set of the user's: `len(data)` of them, `data[i]` of (inputs, targets).

Owns what a sample may be, and that all are alike. Which of them are read, and by which process, is
`oobleck.worker.data.own`'s.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oobleck.host.data.token_file import DataError
from oobleck.planner.job.code import Code
from oobleck.worker.models.tree import flatten, map_tensors, shown, structure, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError


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


def joined(parts: Sequence[Samples]) -> Samples:
    """The rows of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        inputs=_over(torch.cat, [part.inputs for part in parts]),
        targets=_over(torch.cat, [part.targets for part in parts]),
        digests=tuple(digest for part in parts for digest in part.digests),
    )


def _over(join: Any, trees: Sequence[Any]) -> Any:
    """One tree, of what `join` makes of the tensors that `trees` have at each place."""
    columns = zip(*map(flatten, trees), strict=True)
    return unflatten(structure(trees[0]), [join(column) for column in columns])


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


class Reader:
    """What the job's function returned, in this process."""

    def __init__(self, source: Code, *, wide: bool, key: str) -> None:
        """`wide`: floats become float64, as the weights are; `key`: of the job file. Raises
        DataError, JobError, NodeError."""
        self._key = key
        self._wide = wide
        self._items = code.call(source, key)
        try:
            self.size = len(self._items)
        except TypeError as error:
            raise JobError(
                f"{key}: {source.name} gave {type(self._items).__name__}, which has no length; "
                "return a map-style data set, with __len__ and __getitem__"
            ) from error
        if not self.size:
            raise DataError(f"{key}: {source.name} gave no samples on this node")
        #: What all samples must look like, as people read it; empty: it is not known yet.
        self.form = ""

    def read(self, number: int) -> tuple[Any, Any]:
        """(inputs, targets) of one sample, without rows. Raises DataError, JobError."""
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
        form = " -> ".join(map(shown, (inputs, targets)))
        if self.form and form != self.form:
            raise JobError(
                f"{self._key}: sample {number} is {form}, and sample 0 is {self.form}; make all "
                "samples alike: cut and pad them to one length"
            )
        self.form = form
        return inputs, targets

    def stacked(self, numbers: Sequence[int]) -> Samples:
        """Those samples, in this order. Raises DataError, JobError."""
        samples = [self.read(number) for number in numbers]
        inputs, targets = (
            _over(self._stack, [sample[side] for sample in samples]) for side in (0, 1)
        )
        return Samples(inputs=inputs, targets=targets, digests=tuple(map(digest, samples)))

    def _stack(self, column: Sequence[Tensor]) -> Tensor:
        tensor = torch.stack(tuple(column))
        return tensor.double() if self._wide and tensor.is_floating_point() else tensor
