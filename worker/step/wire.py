"""Conversion of values between layers, and of their gradients, to one tensor for sending.

A single float tensor is sent as it is. Anything else is packed row by row into bytes, so that any
message can be cut by rows. The tensors that have a gradient are known beforehand, the same on both
sides. Must not know stages, peers or messages.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oobleck.core.job.description import TensorSketch, TreeSketch, packed_bytes, travels_plain
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models.tree import TENSOR, Tree, flatten, structure, unflatten
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.precision import stream_dtype


class Packing:
    """Layout by which tensors of the same rows become one."""

    def __init__(self, tensors: Sequence[TensorSketch]) -> None:
        self.tensors = tuple(tensors)
        self.dtypes = [getattr(torch, one.dtype) for one in tensors]
        #: True if the only tensor is sent as it is.
        self.plain = travels_plain(tensors)
        #: Place of each tensor's bytes in a row.
        self._places: list[range] = []
        end = 0
        sizes = packed_bytes(tensors)
        for one, size in zip(tensors, sizes, strict=False):
            self._places.append(range(end, end + one.row_bytes))
            end += size
        #: Shape of one row of the packed tensor.
        self.shape: tuple[int, ...] = tensors[0].shape if self.plain else (sum(sizes),)
        self.dtype: torch.dtype = self.dtypes[0] if self.plain else torch.uint8

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the packed tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pack(self, tensors: Sequence[Tensor | None], rows: int, device: torch.device) -> Tensor:
        """Pack the tensors (rows, ...) into one, with zeros for None. They must match the
        sketch."""
        if self.plain and (only := tensors[0]) is not None:
            return only
        # Zeros between the tensors too: old memory content must not leak.
        packed = self.zeros(rows, device)
        if self.plain:
            return packed
        for tensor, room in zip(tensors, self._rooms(packed), strict=True):
            if tensor is not None:
                room.copy_(tensor)
        return packed

    def unpack(self, packed: Tensor) -> list[Tensor]:
        """Return the tensors, each contiguous, as a layer would give them."""
        if self.plain:
            return [packed]
        return [room.contiguous() for room in self._rooms(packed)]

    def zeros(self, rows: int, device: torch.device) -> Tensor:
        """Return the packed form of tensors full of zeros."""
        return torch.zeros((rows, *self.shape), dtype=self.dtype, device=device)

    def _rooms(self, packed: Tensor) -> list[Tensor]:
        """Return each tensor as a view of the bytes."""
        rows = len(packed)
        return [
            packed[:, place.start : place.stop].view(dtype).view(rows, *one.shape)
            for one, dtype, place in zip(self.tensors, self.dtypes, self._places, strict=True)
        ]


class Wire:
    """Conversion at one boundary between two layers."""

    def __init__(self, sketch: TreeSketch, name: str = "a layer") -> None:
        """Make the conversion. `name`: the layer before the boundary, for errors."""
        self._structure = sketch.structure
        self._name = name
        self._has_gradient = [one.gradient for one in sketch.tensors]
        self.values = Packing(sketch.tensors)
        self.gradients = Packing([one for one in sketch.tensors if one.gradient])
        #: True if a tree is one tensor, which is sent as it is, with its gradient.
        self._single = self._structure == TENSOR and self.values.plain and self._has_gradient[0]

    def pack(self, tree: Tree, rows: int, device: torch.device) -> Tensor:
        """Pack the tensors that travel forwards, detached from autograd. Raises JobError where the
        layer's output does not match the model's description."""
        tensors = self._tensors(tree)
        for tensor, one, dtype in zip(
            tensors, self.values.tensors, self.values.dtypes, strict=True
        ):
            if tensor.dtype != dtype or tensor.shape != (rows, *one.shape):
                raise self._mismatch(
                    f"{tensor.dtype} {tuple(tensor.shape)}", f"{dtype} {(rows, *one.shape)}"
                )
        return self.values.pack([tensor.detach() for tensor in tensors], rows, device)

    def unpack(self, packed: Tensor) -> Tree:
        """Return the tree that was packed."""
        return packed if self._single else unflatten(self._structure, self.values.unpack(packed))

    def with_gradient(self, tree: Tree) -> list[Tensor]:
        """Return those tensors of a tree that get a gradient back."""
        if self._single and isinstance(tree, Tensor):
            return [tree]
        tensors = self._tensors(tree)
        return [one for one, has in zip(tensors, self._has_gradient, strict=True) if has]

    def cut(self, tree: Tree) -> tuple[Tree, list[Tensor]]:
        """Detach the tree from its graph. Return it, and those of its tensors that gather
        gradients."""
        if self._single and isinstance(tree, Tensor):
            leaf = tree.detach().requires_grad_()
            return leaf, [leaf]
        tensors = [tensor.detach() for tensor in self._tensors(tree)]
        leaves = [
            tensor.requires_grad_()
            for tensor, has in zip(tensors, self._has_gradient, strict=True)
            if has
        ]
        return unflatten(self._structure, tensors), leaves

    def _tensors(self, tree: Tree) -> list[Tensor]:
        if self._single and isinstance(tree, Tensor):
            return [tree]
        try:
            found = structure(tree)
        except TypeError as error:
            raise JobError(f"{self._name} gives {error}") from error
        if found != self._structure:
            raise self._mismatch(found, self._structure)
        return flatten(tree)

    def _mismatch(self, found: str, expected: str) -> JobError:
        return JobError(
            f"{self._name} gives {found}, where the model was described with {expected}; a layer "
            "must give the same structure, shapes and types for all rows and on all nodes"
        )


def wire(job: JobSpec, boundary: int) -> Wire:
    """Return the conversion between the layers `boundary` and `boundary` + 1 of the job's model."""
    return Wire(_sketch(job, boundary), f"layer {boundary} of the model")


def _sketch(job: JobSpec, boundary: int) -> TreeSketch:
    model = job.model
    if isinstance(model, OwnModelSpec):
        return model.description.input_of(boundary + 1)
    assert isinstance(model, ModelSpec), "there are two kinds"
    name = str(stream_dtype(job)).removeprefix("torch.")
    hidden = TensorSketch(shape=(model.sequence_length, model.hidden), dtype=name, gradient=True)
    return TreeSketch(tensors=(hidden,), structure=TENSOR)
