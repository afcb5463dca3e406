"""Conversion of what passes from a layer to the next, and of its gradients back, each to one tensor
that travels.

A single float tensor travels as it is. Anything else is packed row by row into bytes, so that a
message is cut by rows whatever is in it. Which tensors have a gradient is known beforehand, the
same on both sides. Must not know stages, peers or messages."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oobleck.core.job.description import TensorSketch, TreeSketch, packed_bytes, travels_plain
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models.tree import TENSOR, Tree, flatten, structure, unflatten
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.precision import stream_dtype


class Packing:
    """Layout by which some tensors of the same rows become one."""

    def __init__(self, tensors: Sequence[TensorSketch]) -> None:
        self.tensors = tuple(tensors)
        self.dtypes = [getattr(torch, one.dtype) for one in tensors]
        #: Whether the only tensor is what travels.
        self.plain = travels_plain(tensors)
        #: Where each one's bytes are in a row.
        self._places: list[range] = []
        end = 0
        sizes = packed_bytes(tensors)
        for one, size in zip(tensors, sizes, strict=False):
            self._places.append(range(end, end + one.row_bytes))
            end += size
        #: Of one row of what travels.
        self.shape: tuple[int, ...] = tensors[0].shape if self.plain else (sum(sizes),)
        self.dtype: torch.dtype = self.dtypes[0] if self.plain else torch.uint8

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the packed tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pack(self, tensors: Sequence[Tensor | None], rows: int, device: torch.device) -> Tensor:
        """Pack the tensors (rows, ...) into one; zeros where there is None. They must be as
        sketched."""
        if self.plain and (only := tensors[0]) is not None:
            return only
        # Zeros between the tensors too: what was in memory before is nobody's business.
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
        """`name`: of the layer that gives it, for errors."""
        self._structure = sketch.structure
        self._name = name
        self._has_gradient = [one.gradient for one in sketch.tensors]
        self.values = Packing(sketch.tensors)
        self.gradients = Packing([one for one in sketch.tensors if one.gradient])
        #: Whether a tree is one tensor, which travels as it is, with its gradient.
        self._single = self._structure == TENSOR and self.values.plain and self._has_gradient[0]

    def pack(self, tree: Tree, rows: int, device: torch.device) -> Tensor:
        """Pack the tensors that travel forwards, cut off from autograd. Raises JobError where the
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
        """Return those tensors of a tree that a gradient comes back for."""
        if self._single and isinstance(tree, Tensor):
            return [tree]
        tensors = self._tensors(tree)
        return [one for one, has in zip(tensors, self._has_gradient, strict=True) if has]

    def cut(self, tree: Tree) -> tuple[Tree, list[Tensor]]:
        """Cut the tree off from what made it. Return it, and those of its tensors that gather
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
    """Between the layers `boundary` and `boundary` + 1 of the job's model."""
    return Wire(_sketch(job, boundary), f"layer {boundary} of the model")


def _sketch(job: JobSpec, boundary: int) -> TreeSketch:
    model = job.model
    if isinstance(model, OwnModelSpec):
        return model.description.input_of(boundary + 1)
    assert isinstance(model, ModelSpec), "there are two kinds"
    name = str(stream_dtype(job)).removeprefix("torch.")
    hidden = TensorSketch(shape=(model.sequence_length, model.hidden), dtype=name, gradient=True)
    return TreeSketch(tensors=(hidden,), structure=TENSOR)
