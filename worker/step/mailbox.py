"""A step's messages between this worker and its neighbour stages.

Receives are posted ahead, so that a message travels while the worker computes. A sent tensor is
released when a later message of the same peer shows that it has arrived; nothing waits for a send
before the end of the step. The order follows from the programs. Must not know what is sent.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from oobleck.planner.ids import WorkerId
from oobleck.planner.programs import instructions as ops
from oobleck.planner.programs.instructions import Message, Program, Share
from oobleck.worker.transport.transport import Pending, Transport

Receive = ops.ReceiveActivation | ops.ReceiveGradient
Send = ops.SendActivation | ops.SendGradient

#: Receives of one direction that are posted before they are needed: one arrives while another one
#: is computed on. Their buffers are as large as the stage's output.
AHEAD = 2


class Mailbox:
    """The messages of one worker, step after step of the same programs."""

    def __init__(
        self,
        worker: WorkerId,
        programs: Mapping[WorkerId, Program],
        transport: Transport,
        *,
        rank: Mapping[WorkerId, int],
        stages: int,
        shape: tuple[int, ...],
        own: Share,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`shape`, `dtype` and `device`: of a whole micro-batch's message; `stages`: of the longest
        pipeline; `own`: this worker's share of each micro-batch's rows. Messages without a row are
        neither sent nor received."""
        self._own = own
        self._transport = transport
        self._rank = rank
        self._stages = stages
        self._shape = shape
        self._dtype = dtype
        self._device = device
        self._receives = [s for s in self._messages(programs[worker]) if isinstance(s, Receive)]
        peers = {step.peer for step in self._receives}
        self._arrived_by = {
            receive: sends
            for peer in sorted(peers)
            for receive, sends in acknowledged(worker, peer, self._messages(programs[peer]))
        }
        self._sends: dict[Send, Pending] = {}
        self._posted: dict[Receive, tuple[torch.Tensor, Pending]] = {}
        self._due: dict[type[Receive], deque[Receive]] = {}

    def begin(self) -> None:
        """Begin a step, whose first receives are posted."""
        for kind in (ops.ReceiveActivation, ops.ReceiveGradient):
            self._due[kind] = deque(step for step in self._receives if isinstance(step, kind))
            for _ in range(AHEAD):
                self._post(self._due[kind])

    def send(self, step: Send, tensor: torch.Tensor) -> bool:
        """Start sending the message's share of `tensor`, which has this worker's rows; returns at
        once: whether it was the last share of them."""
        wanted = step.share.of_rows(self._shape[0])
        if wanted:
            start = wanted.start - self._own.of_rows(self._shape[0]).start
            piece = tensor[start : start + len(wanted)].contiguous()
            tag = self._tag(step, step.stage)
            self._sends[step] = self._transport.send(piece, self._rank[step.peer], tag)
        return step.share.stop * self._own.of == self._own.stop * step.share.of

    def receive(self, step: Receive) -> torch.Tensor:
        """Wait for the message. Receives of one direction come in the order of the program."""
        if not self._rows(step):
            return torch.empty((0, *self._shape[1:]), dtype=self._dtype, device=self._device)
        tensor, pending = self._posted.pop(step)
        pending.wait()
        self._post(self._due[type(step)])
        for send in self._arrived_by[step]:
            self._sends.pop(send).wait()
        return tensor

    def finish(self) -> None:
        """Wait for the sends that nothing has shown to have arrived."""
        for pending in self._sends.values():
            pending.wait()
        self._sends.clear()

    def _post(self, due: deque[Receive]) -> None:
        if not due:
            return
        step = due.popleft()
        shape = (self._rows(step), *self._shape[1:])
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        sender_stage = step.stage + (1 if isinstance(step, ops.ReceiveGradient) else -1)
        tag = self._tag(step, sender_stage)
        pending = self._transport.receive(tensor, self._rank[step.peer], tag)
        self._posted[step] = (tensor, pending)

    def _rows(self, step: Message) -> int:
        return len(step.share.of_rows(self._shape[0]))

    def _messages(self, program: Program) -> Iterator[Message]:
        return (s for s in program if isinstance(s, Message) and self._rows(s))

    def _tag(self, step: Message, sender_stage: int) -> int:
        # Unique among the messages of a step between two workers; steps cannot overlap, since
        # every worker passes the vote only after its receives.
        backward = isinstance(step, ops.SendGradient | ops.ReceiveGradient)
        return (step.microbatch * self._stages + sender_stage) * 2 + int(backward)


def acknowledged(
    worker: WorkerId, peer: WorkerId, program: Iterable[Message]
) -> Iterator[tuple[Receive, tuple[Send, ...]]]:
    """For each message that `peer` sends to `worker`: what it must have received from it before,
    since its message before that."""
    arrived: list[Send] = []
    for step in program:
        match step:
            case ops.ReceiveActivation(peer=sender) | ops.ReceiveGradient(peer=sender):
                if sender == worker:
                    arrived.append(_other_end(step, peer))
            case ops.SendActivation(peer=receiver) | ops.SendGradient(peer=receiver):
                if receiver == worker:
                    yield _other_end(step, peer), tuple(arrived)
                    arrived.clear()
            case _:
                pass


def _other_end(step: Send | Receive, peer: WorkerId) -> Any:
    """The instruction of `peer`'s neighbour that goes with `step` of `peer`."""
    kind, stages = _OTHER_END[type(step)]
    return kind(
        pipeline=step.pipeline,
        stage=step.stage + stages,
        microbatch=step.microbatch,
        peer=peer,
        share=step.share,
    )


#: For each kind the one that it is paired with, and how many stages on that is.
_OTHER_END: Mapping[type[Message], tuple[type[Message], int]] = {
    ops.ReceiveActivation: (ops.SendActivation, -1),
    ops.SendActivation: (ops.ReceiveActivation, 1),
    ops.ReceiveGradient: (ops.SendGradient, 1),
    ops.SendGradient: (ops.ReceiveGradient, -1),
}


def joined(pieces: list[torch.Tensor]) -> torch.Tensor | None:
    """The rows of one micro-batch that came in several messages; None: there is none."""
    if len(pieces) < 2:
        return pieces[0] if pieces else None
    return torch.cat(pieces)
