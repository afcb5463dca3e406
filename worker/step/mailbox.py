"""Messages of a step between this worker and the workers of neighbouring hops.

Receives are posted ahead, so that a message travels while the worker computes. A sent tensor is
released when a later message of the same peer proves that it has arrived. Nothing waits for a send
before the end of the step. The order follows from the programs. Must not know the content of
messages beyond its shape.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from oobleck.core import instructions as ops
from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Content, Instruction, Message, Share
from oobleck.planner.programs.compiler.own import OwnProgram
from oobleck.worker.step.wire import Packing, Wire
from oobleck.worker.transport.transport import Pending, Transport

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
        """Start sending the message's share of `tensor`, which has this worker's rows, and return
        at once whether it was their last share."""
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
