"""Messages of a step between this worker and neighbouring hops, each packed as one tensor.

Receives are posted ahead, so that a message travels while the worker computes. A sent tensor is
released when a later message of the same peer proves that it has arrived. Nothing waits for a send
before the end of the step. The order follows from the programs. Must not know the content of
messages beyond its shape.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from oobleck.core import instructions as ops
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Content, Instruction, Message, Share
from oobleck.core.job.description import TensorSketch, TreeSketch, packed_bytes, travels_plain
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.models.tree import TENSOR, Tree, flatten, structure, unflatten
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.precision import stream_dtype
from oobleck.worker.transport.transport import Pending, Transport

# ---- Conversion of values between layers, and of their gradients, to one tensor for sending.
#
# A single float tensor is sent as it is. Anything else is packed row by row into bytes, so that
# any message can be cut by rows. The tensors that have a gradient are known beforehand, the same
# on both sides.


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


Receive = ops.ReceiveActivation | ops.ReceiveGradient
Send = ops.SendActivation | ops.SendGradient
#: Other end of a message, and its identity.
_Key = tuple[WorkerId, Content]

#: Receives from one peer that are posted before they are needed: one arrives while the compute uses
#: another. They are posted in the order in which the peer sends, which NCCL needs.
AHEAD = 2


class Mailbox:
    """Messages of one worker, step after step of the same programs."""

    def __init__(
        self,
        own: OwnProgram,
        transport: Transport,
        *,
        rank: Mapping[WorkerId, int],
        layers: int,
        rows: Callable[[int], int],
        wire: Callable[[int], Wire],
        shares: Mapping[int, Share],
        device: torch.device,
    ) -> None:
        """Find the messages to receive. Messages without a row are neither sent nor received.

        `layers`: number of layers in the model; `rows`: row count of a micro-batch; `wire`:
        conversion after a layer; `shares`: this worker's rows of a micro-batch, by layer; `device`:
        device of received tensors.
        """
        self._layers = layers
        self._shares = shares
        self._transport = transport
        self._rank = rank
        self._rows_of = rows
        self._device = device
        self._receives = [s for s in self._messages(own.program) if isinstance(s, Receive)]
        self._peers = sorted({step.peer for step in self._receives})
        received = {_boundary(step) for step in own.program if isinstance(step, Receive)}
        self._wires = {layer: wire(layer) for layer in received}
        #: By received message: what the peer had received from this worker before it sent it.
        self._arrived_by = {
            (peer, content): sends
            for peer in self._peers
            for content, sends in acknowledged(self._messages(own.peers[peer]))
        }
        self._sends: dict[_Key, Pending] = {}
        self._posted: dict[_Key, tuple[torch.Tensor, Pending]] = {}
        self._due: dict[WorkerId, deque[Receive]] = {}

    def begin(self) -> None:
        """Begin a step and post its first receives."""
        for peer in self._peers:
            self._due[peer] = deque(step for step in self._receives if step.peer == peer)
            for _ in range(AHEAD):
                self._post(self._due[peer])

    def send(self, step: Send, tensor: torch.Tensor) -> bool:
        """Start sending the message's share of `tensor`, which has this worker's rows. Return
        whether it was the last share of these rows."""
        own, rows = self._shares[step.first_layer], self._rows_of(step.microbatch)
        if wanted := step.share.of_rows(rows):
            start = wanted.start - own.of_rows(rows).start
            piece = tensor[start : start + len(wanted)].contiguous()
            pending = self._transport.send(piece, self._rank[step.peer], self._tag(step))
            self._sends[step.peer, step.content] = pending
        return step.share.stop * own.of == own.stop * step.share.of

    def receive(self, step: Receive) -> torch.Tensor:
        """Wait for the message. Receives from one peer follow the order of the program."""
        if not self._rows(step):
            return self._room(step)
        key = step.peer, step.content
        tensor, pending = self._posted.pop(key)
        pending.wait()
        self._post(self._due[step.peer])
        for content in self._arrived_by[key]:
            self._sends.pop((step.peer, content)).wait()
        return tensor

    def finish(self) -> None:
        """Wait for the sends whose arrival no message has proved."""
        for pending in self._sends.values():
            pending.wait()
        self._sends.clear()

    def _post(self, due: deque[Receive]) -> None:
        if not due:
            return
        step = due.popleft()
        tensor = self._room(step)
        pending = self._transport.receive(tensor, self._rank[step.peer], self._tag(step))
        self._posted[step.peer, step.content] = (tensor, pending)

    def _room(self, step: Receive) -> torch.Tensor:
        """Return a tensor to receive the message into."""
        kind = self._packing(step)
        shape = (self._rows(step), *kind.shape)
        return torch.empty(shape, dtype=kind.dtype, device=self._device)

    def _packing(self, step: Receive) -> Packing:
        between = self._wires[_boundary(step)]
        return between.gradients if isinstance(step, ops.ReceiveGradient) else between.values

    def _rows(self, step: Message) -> int:
        return len(step.share.of_rows(self._rows_of(step.microbatch)))

    def _messages(self, program: Iterable[Instruction | Message]) -> Iterator[Message]:
        return (s for s in program if isinstance(s, Message) and self._rows(s))

    def _tag(self, step: Message) -> int:
        # Unique among the messages of a step between two workers; steps cannot overlap, since every
        # worker passes the vote only after its receives.
        backward, microbatch, boundary, _ = step.content
        return (microbatch * self._layers + boundary) * 2 + int(backward)


def _boundary(step: Message) -> int:
    """Return the layer whose output, or whose output's gradient, the message carries."""
    _, _, layer, _ = step.content
    return layer


def acknowledged(messages: Iterable[Message]) -> Iterator[tuple[Content, tuple[Content, ...]]]:
    """Yield each message that a peer sends to a worker, with what the peer received from it since
    its previous message. `messages`: those of the two, in the peer's order."""
    arrived: list[Content] = []
    for step in messages:
        if isinstance(step, Receive):
            arrived.append(step.content)
        else:
            yield step.content, tuple(arrived)
            arrived.clear()


def joined(pieces: Mapping[Share, torch.Tensor]) -> torch.Tensor | None:
    """Join the rows of one micro-batch that arrived in several messages; None if there are none."""
    if len(pieces) < 2:
        return next(iter(pieces.values()), None)
    return torch.cat([pieces[share] for share in sorted(pieces)])
