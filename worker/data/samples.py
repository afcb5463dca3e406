"""Samples of the user's data set: `len(data)` of them, `data[i]` of (inputs, targets).

Owns what a sample may be, and the check that all are alike. `oobleck.worker.data.own` decides which
are read, and by which process.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from oobleck.core.job.code import Code
from oobleck.core.job.description import ITEM_BYTES
from oobleck.host.token_file import DataError
from oobleck.model import drawing
from oobleck.worker.models.tree import flatten, map_tensors, shown, structure, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Stacked samples: a tensor, tuple, list or dict of tensors each, with rows first."""

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
    """Return the rows of `parts`, in order."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        inputs=_over(torch.cat, [part.inputs for part in parts]),
        targets=_over(torch.cat, [part.targets for part in parts]),
        digests=tuple(digest for part in parts for digest in part.digests),
    )


def _over(join: Any, trees: Sequence[Any]) -> Any:
    """Return a tree whose tensors are `join` of the tensors at the same place in `trees`."""
    columns = zip(*map(flatten, trees), strict=True)
    return unflatten(structure(trees[0]), [join(column) for column in columns])


def as_tensors(value: Any, where: str) -> Any:
    """Return `value` with numbers and arrays as tensors.

    `where`: its place in the sample, such as inputs['mask']. Raise TypeError with that place and
    the fix.
    """
    if type(value) in (tuple, list):
        return type(value)(as_tensors(item, f"{where}[{n}]") for n, item in enumerate(value))
    if isinstance(value, dict):
        for name in value:
            if type(name) is not str:
                raise TypeError(f"{where} has the key {name!r}; use text as keys")
        return {name: as_tensors(item, f"{where}[{name!r}]") for name, item in value.items()}
    tensor = _tensor(value, where)
    if _name(tensor.dtype) not in ITEM_BYTES:
        fix = _OTHER_TYPES.get(_name(tensor.dtype), "x.float()")
        raise TypeError(f"{where} is {_name(tensor.dtype)}, which layers cannot take; give {fix}")
    return tensor


#: Types that torch can hold but hardly compute with, and the type to give instead.
_OTHER_TYPES = {
    "uint16": "int32, as x.astype(numpy.int32)",
    "uint32": "int64, as x.astype(numpy.int64)",
    "uint64": "int64, as x.astype(numpy.int64)",
    **dict.fromkeys(("qint8", "quint8", "qint32"), "x.dequantize()"),
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor):
        return _plain(value, where)
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{where} is a masked array, and a tensor has no place for its mask; give "
            "x.filled(value), and the mask as an array of its own"
        )
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "US":
        try:
            # torch accepts arrays only in the machine's byte order.
            return torch.from_numpy(np.array(value, dtype=value.dtype.newbyteorder("=")))
        except TypeError as error:
            raise TypeError(
                f"{where} is an array of {value.dtype}, which no tensor can hold; give numbers, "
                "all rows of one length, as x.astype(numpy.float32)"
            ) from error
    if isinstance(value, bool | int | float | complex):
        try:
            return torch.tensor(value)
        except (OverflowError, RuntimeError, ValueError) as error:
            raise TypeError(f"{where} is {value}, which does not fit int64") from error
    raise TypeError(f"{where} is {_described(value)}")


def _plain(tensor: Tensor, where: str) -> Tensor:
    """Return a copy of the tensor without its autograd history.

    Raise TypeError unless it is a plain, strided tensor in host memory.
    """
    if tensor.is_nested:
        raise TypeError(f"{where} is a nested tensor; pad it to one length")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{where} is a {_name_of(tensor.layout)} tensor; give x.to_dense()")
    if tensor.device.type != "cpu":
        raise TypeError(
            f"{where} is on {tensor.device}; give samples in host memory, as x.cpu(): workers move "
            "them to their devices"
        )
    if type(tensor) not in (Tensor, nn.Parameter):
        tensor = _stripped(tensor, where)
    # Copied, because a data set may reuse the memory for the next sample.
    return tensor.detach().resolve_conj().resolve_neg().clone()


def _stripped(tensor: Tensor, where: str) -> Tensor:
    """Return a tensor of a subclass as a plain one.

    Raise TypeError unless a DataLoader would make it plain too, as it does with torchvision's.
    """
    refused = TypeError(
        f"{where} is {type(tensor).__name__}, a subclass of torch.Tensor, which another worker "
        "would get as a plain one; give x.as_subclass(torch.Tensor)"
    )
    try:
        (stripped,) = torch.stack([tensor])
    except Exception as error:  # a user's class may raise anything
        raise refused from error
    if type(stripped) is not Tensor:
        raise refused
    return stripped


def _name_of(layout: torch.layout) -> str:
    return str(layout).removeprefix("torch.").removeprefix("_")


def _described(value: Any) -> str:
    """Return what `value` is, and what to give instead."""
    kind = type(value).__name__
    if value is None:
        return "None; give a number for a missing value, such as 0"
    if isinstance(value, str | bytes | np.ndarray):  # arrays of text also reach this
        return "text; give numbers for it, such as its tokens or the number of its class"
    if isinstance(value, tuple | list):
        return f"{kind}, and not a plain tuple or list; give tuple(x), or a dict"
    if dataclasses.is_dataclass(value):
        return f"{kind}, a dataclass; give a dict, as dataclasses.asdict(x)"
    if isinstance(value, Mapping):
        return f"{kind}; give a plain dict, as dict(x)"
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        return f"{kind}; give an array of it, as numpy.asarray(x)"
    return f"{kind}; give a tensor, an array or a number, or a tuple, list or dict of such"


def digest(sample: tuple[Any, Any]) -> bytes:
    """Return SHA-256 over type, shape and numbers of a sample's tensors, in order."""
    found = hashlib.sha256()
    for tensor in [*flatten(sample[0]), *flatten(sample[1])]:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def _what(sample: object) -> str:
    """Return a short description of a sample that is not a pair."""
    if isinstance(sample, tuple | list):
        return f"a {type(sample).__name__} of {len(sample)}"
    if isinstance(sample, Mapping):
        return f"a {type(sample).__name__} of {', '.join(map(str, sample))}"
    return type(sample).__name__


def _why_no_data_set(items: Any) -> str:
    """Return why a job function's result is not a data set, and the fix; empty if it is one."""
    kind = type(items)
    if isinstance(items, DataLoader):
        return (
            "which makes batches of its own; give its data set, as loader.dataset: "
            "training.microbatch, seed and data.workers say how it is read"
        )
    if isinstance(items, IterableDataset):
        return (
            "an iterable data set; samples are read by number, so give a map-style one, with "
            "__len__ and __getitem__, such as a list of its samples"
        )
    if isinstance(items, Mapping):
        return f"a mapping of {', '.join(map(str, items))}; give one of these data sets"
    if isinstance(items, tuple | list) and items and isinstance(items[0], Tensor | np.ndarray):
        return "whose items are not pairs; give torch.utils.data.TensorDataset(inputs, targets)"
    if not hasattr(kind, "__len__") or not hasattr(kind, "__getitem__"):
        return "which is not a map-style data set; give one, with __len__ and __getitem__"
    return ""


class Reader:
    """Reader of the data set that the job's function returned, in this process."""

    def __init__(self, source: Code, *, wide: bool, key: str) -> None:
        """Call the job's function.

        `wide`: floats become float64, as the weights are. `key`: key in the job file. Raise
        DataError, JobError or NodeError.
        """
        self._key = key
        self._wide = wide
        # A random split must be the same in all processes that read.
        with drawing(0, "data"):
            self._items = code.call(source, key)
        if why := _why_no_data_set(self._items):
            raise JobError(f"{key}: {source.name} gave {type(self._items).__name__}, {why}")
        try:
            with code.running(f"{key}: {source.name}", passing=(TypeError,)):
                self.size = len(self._items)
        except TypeError as error:
            raise JobError(
                f"{key}: {source.name} gave {type(self._items).__name__}, which has no length; "
                "return a map-style data set, with __len__ and __getitem__"
            ) from error
        if not self.size:
            raise DataError(f"{key}: {source.name} gave no samples on this machine")
        #: Form of the first sample, as text, which all must have; empty: unknown yet.
        self.form = ""

    def read(self, number: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of one sample, without rows. Raise DataError or JobError."""
        what = f"{self._key}: sample {number}"
        try:
            with code.running(what, "", passing=(OSError,)):
                sample = self._items[number]
        except OSError as error:
            raise DataError(f"{what}: {code.described(error)}") from error
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise JobError(
                f"{self._key}: sample {number} is {_what(sample)}, and must be (inputs, targets)"
            )
        try:
            with code.running(what, "", passing=(TypeError,)):
                inputs = as_tensors(sample[0], "inputs")
                targets = as_tensors(sample[1], "targets")
        except TypeError as error:
            raise JobError(f"{self._key}: sample {number}: {error}") from error
        for side, tree in (("inputs", inputs), ("targets", targets)):
            if not flatten(tree):
                raise JobError(
                    f"{self._key}: sample {number}: {side} have no tensor; give at least one, "
                    "such as the number 0 if there is no value"
                )
        form = " -> ".join(map(shown, (inputs, targets)))
        if self.form and form != self.form:
            raise JobError(
                f"{self._key}: sample {number} is {form}, and sample 0 is {self.form}; make all "
                "samples alike: one length (cut and pad), one type, the same keys in one order"
            )
        self.form = form
        return inputs, targets

    def stacked(self, numbers: Sequence[int]) -> Samples:
        """Read the samples `numbers` and stack them, in this order. Raise DataError or JobError."""
        samples = [self.read(number) for number in numbers]
        inputs, targets = (
            _over(self._stack, [sample[side] for sample in samples]) for side in (0, 1)
        )
        return Samples(inputs=inputs, targets=targets, digests=tuple(map(digest, samples)))

    def _stack(self, column: Sequence[Tensor]) -> Tensor:
        tensor = torch.stack(tuple(column))
        return tensor.double() if self._wide and tensor.is_floating_point() else tensor
