"""Sender of layers, ahead of a coming plan, to one worker that will hold them.

A layer is copied at a step boundary and sent in the background. The applied gradients of each later
step follow, so that the taker replays the same updates. Also owns the items that both ends
exchange. Used by the training thread. Must not know how the taker uses them.
"""

import logging
import time
from collections import deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import msgspec
import torch

from oobleck.core.ids import Generation
from oobleck.planner.programs.transfer import Transfer
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import NO_OMISSIONS, Omissions, TrainingProgress
from oobleck.worker.transport.links.hub import Feeding, Links
from oobleck.worker.transport.links.link import Outgoing
from oobleck.worker.transport.links.wire import Kind, Label, bytes_of

# ---- Items that a source of state sends to a worker of a coming plan, ahead of the plan.
#
# They form a stream: each item has a head. If it is a piece of state or of a gradient, its
# numbers follow, cut into frames.


#: Size of a frame of numbers; an urgent frame waits for at most one of these.
FRAME_BYTES = 128 << 10
HEAD = Label(Kind.FEED, 0, 0)
NUMBERS = Label(Kind.FEED, 0, 1)
#: Answers of a taker: the step that it has reached, and that it accepts no more.
ACKNOWLEDGED = Label(Kind.FED, 0, 0)
REFUSED = Label(Kind.FED, 0, 1)


class Offered(msgspec.Struct, frozen=True, kw_only=True, tag="offered"):
    """Offer of the source, which has pieces to send.

    A taker that knows the plan acknowledges step 0.
    """


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag="copied"):
    """Piece of a layer's state after `version` steps; (1 + moments, count) numbers follow."""

    #: Number by which later items refer to the piece.
    piece: int
    layer: int
    #: Bounds of the piece in the layer's flat state, as numerators and denominators.
    start: tuple[int, int]
    stop: tuple[int, int]
    version: int
    count: int

    @property
    def span(self) -> tuple[Fraction, Fraction]:
        return Fraction(*self.start), Fraction(*self.stop)


class Reduced(msgspec.Struct, frozen=True, kw_only=True, tag="reduced"):
    """Gradient that `step` applies to a piece, before its scale; `count` numbers follow.

    The step is committed once its `Applied` arrives.
    """

    piece: int
    step: int
    count: int


class Applied(msgspec.Struct, frozen=True, kw_only=True, tag="applied"):
    """Commit of a step by the source. All pieces sent before it are at that step then."""

    step: int
    #: Scale of the gradients; None: the step was skipped.
    scale: float | None
    #: As in `Omissions`: parameters that the step left out, and the earlier counts.
    unused: frozenset[str] = frozenset()
    missed: Mapping[str, int] = {}


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """End of a piece's feeding: the piece is fetched when the plan is entered."""

    piece: int


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """End of the stream: the source has left the previous plan, and its pieces no longer change.

    It sends nothing that was still unsent by then.
    """

    step: int
    lineage: int
    skipped: int
    generation: Generation
    #: As `Position.missed`.
    missed: Mapping[str, int] = {}
    #: Result of the vote on the step, as bytes, and its generation. Empty if the taker took part in
    #: the vote or the source has no result.
    ballot: bytes = b""
    voted_generation: Generation = Generation(0)


Item = Offered | Copied | Reduced | Applied | Left | Over
decoder: "msgspec.json.Decoder[Item]" = msgspec.json.Decoder(Item)


def frames_of(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Split contiguous numbers in host memory into one tensor per frame."""
    flat = numbers.reshape(-1)
    return list(torch.split(flat, FRAME_BYTES // flat.element_size()))


log = logging.getLogger(__name__)

#: Share of a step's time for copies at its end; at least one piece is copied.
_COPYING_SHARE = 0.01
#: Longest wait for a link to the taker and for its first answer.
_PATIENCE_S = 15.0
#: Fewest offers before giving up, because steps may be long.
_LEAST_OFFERS = 3
#: A taker that is still behind so many steps, and so long, after the last copy counts as outrun:
#: gradients are made faster than the link carries them.
_OUTRUN_STEPS = 8
_OUTRUN_S = 10.0
#: Bounds on gradients that wait in the taker's memory: so many steps' or so many bytes, whichever
#: is more. Beyond it the taker counts as outrun at once. If the link keeps up with gradients,
#: copying a layer delays at most a layer's bytes: three steps' gradients with AdamW.
_MOST_BEHIND_STEPS = 3
_MOST_BEHIND_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Piece:
    number: int
    transfer: Transfer
    #: Bytes of its state; 0 before it is copied.
    size: int = 0


class Source:
    """Feeding of one other worker."""

    def __init__(
        self,
        links: Links,
        feeding: Feeding,
        state: ModelState,
        taker: bytes,
        transfers: Sequence[Transfer],
        *,
        newcomer: bool,
    ) -> None:
        """Begin without sending.

        `taker`: the worker's identity. `transfers`: what it receives from this worker. `newcomer`:
        it takes no part in the votes of the present plan.
        """
        self._links = links
        self._feeding = feeding
        self._state = state
        self._taker = taker
        self._waiting = deque(_Piece(n, transfer) for n, transfer in enumerate(transfers))
        self._fed: list[_Piece] = []
        #: Frames that may not have been sent yet, and their bytes, which occupy memory.
        self._unsent: deque[tuple[Outgoing, int]] = deque()
        self._newcomer = newcomer
        #: Gradient bytes of each step after the acknowledged one, and of the step under way.
        self._behind: deque[tuple[int, int]] = deque()
        self._gradient_bytes = 0
        self._began_at = time.monotonic()
        self._copied_at, self._copied_step = self._began_at, 0
        #: Newest step that the taker has applied to all its pieces; 0: none yet, but it accepts
        #: pieces; -1: it may not know the plan.
        self.acknowledged = -1
        #: `acknowledged` when its pieces were last halved; None: never.
        self._halved_at: int | None = None
        self._offers = 0
        #: Whether a link to the taker has ended.
        self.cut = False
        #: Whether the taker accepts no more.
        self.refused = False

    @property
    def pieces(self) -> int:
        """Number of pieces that are in flight or have arrived."""
        return len(self._fed)

    def answered(self, label: Label, content: bytes) -> None:
        """Note the taker's answer. Called with the links' lock held."""
        if label == REFUSED:
            self.refused = True
        else:
            self.acknowledged = int.from_bytes(content, "big")

    def offer(self) -> None:
        """Ask whether the taker accepts pieces, if there is a link to it. From any thread."""
        self._offers += 1
        if self._links.linked(self._taker):
            self._send(Offered())

    def reduced(self, step: int, layers: Container[int]) -> None:
        """Send the gradients that `step` will apply to `layers`, which are reduced."""
        for piece in self._fed:
            transfer = piece.transfer
            if transfer.layer not in layers:
                continue
            gradient = self._state.read_gradient(transfer.layer, transfer.start, transfer.stop)
            head = Reduced(piece=piece.number, step=step, count=gradient.numel())
            self._send(head, gradient)
            self._gradient_bytes += gradient.nbytes

    def committed(
        self, step: int, scale: float | None, step_s: float, omitted: Omissions = NO_OMISSIONS
    ) -> None:
        """Report that `step`, which took `step_s`, is committed, and copy the next pieces."""
        self._behind.append((step, self._gradient_bytes))
        self._gradient_bytes = 0
        self._check_there()
        if self._fed:
            self._leave_what_is_outrun(step)
        self._copy(step, step_s)
        if self._fed:
            applied = Applied(step=step, scale=scale, unused=omitted.unused, missed=omitted.missed)
            self._send(applied)

    def is_ready(self, committed: int) -> bool:
        """Return whether all pieces have arrived, up to the step before the current one."""
        return not self._waiting and (not self._fed or self.acknowledged >= committed)

    def end(self, progress: TrainingProgress, generation: Generation) -> None:
        """End the stream after the newest committed step.

        Unsent frames would delay workers that enter the next plan, so they are withdrawn if they
        are larger than the pieces that they complete.
        """
        self._waiting.clear()
        if self._unsent_bytes() > sum(piece.size for piece in self._fed):
            self._withdraw()
        step, ballot = progress.committed, progress.ballot
        over = Over(
            step=step,
            lineage=progress.lineage,
            skipped=progress.skipped,
            missed=progress.missed,
            generation=generation,
        )
        if self._newcomer and ballot is not None and progress.voted == step:
            over = msgspec.structs.replace(
                over,
                ballot=ballot.numpy().tobytes(),
                voted_generation=progress.voted_generation,
            )
        self._send(over)

    def _check_there(self) -> None:
        if not self._waiting and not self._fed:
            return
        linked = self._links.linked(self._taker)
        late = time.monotonic() > self._began_at + _PATIENCE_S
        heard = self.acknowledged >= 0
        if self.refused:
            self._give_up("the taker can take no more")
        elif self.cut or (not heard and late and self._offers >= _LEAST_OFFERS):
            self._give_up("the taker does not answer" if linked else "there is no link")

    def _give_up(self, why: str) -> None:
        log.info("feeding ends", extra={"why": why, "left": len(self._waiting) + len(self._fed)})
        self._waiting.clear()
        self._fed.clear()
        self._withdraw()

    def _withdraw(self) -> None:
        """Withdraw every frame that has not been sent yet."""
        self._links.withdraw(self._feeding, self._taker)
        self._unsent.clear()

    def _leave_what_is_outrun(self, step: int) -> None:
        """Halve the pieces for a taker that falls behind; stop if it then acknowledges nothing."""
        if self.acknowledged >= step - 1:
            return
        patient = (
            time.monotonic() < self._copied_at + _OUTRUN_S
            or step < self._copied_step + _OUTRUN_STEPS
        )
        if patient and not self._is_far_behind():
            return
        self._waiting.clear()
        self._behind.clear()
        self._copied_at, self._copied_step = time.monotonic(), step
        silent, self._halved_at = self.acknowledged == self._halved_at, self.acknowledged
        count = len(self._fed) if silent else -(-len(self._fed) // 2)
        log.info("gradients outrun the link", extra={"pieces": count})
        left, self._fed = self._fed[-count:], self._fed[:-count]
        if not self._fed:
            self._withdraw()
        for piece in left:
            self._send(Left(piece=piece.number))

    def _is_far_behind(self) -> bool:
        """Return whether more gradients wait at the taker than its memory should hold."""
        while self._behind and self._behind[0][0] <= self.acknowledged:
            self._behind.popleft()
        sizes = [size for _, size in self._behind]
        bound = max(_MOST_BEHIND_BYTES, _MOST_BEHIND_STEPS * max(sizes, default=0))
        return sum(sizes) > bound

    def _copy(self, step: int, step_s: float) -> None:
        """Copy the next pieces, if the taker has applied the previous ones.

        It takes a fraction of a step's time.
        """
        if not self._waiting:
            return
        if self.acknowledged < 0 or not self._links.linked(self._taker):
            self.offer()
            return
        if self._fed and self.acknowledged < step - 1:
            return
        until = time.monotonic() + step_s * _COPYING_SHARE
        while self._waiting:
            piece = self._waiting.popleft()
            transfer = piece.transfer
            layer, start, stop = transfer.layer, transfer.start, transfer.stop
            state = self._state.read(layer, self._state.share(layer, start, stop))
            numbers = state.detach().to("cpu", copy=True)
            head = Copied(
                piece=piece.number,
                layer=layer,
                start=(start.numerator, start.denominator),
                stop=(stop.numerator, stop.denominator),
                version=step,
                count=numbers.shape[1],
            )
            self._fed.append(replace(piece, size=numbers.nbytes))
            self._send(head, numbers)
            self._copied_at, self._copied_step = time.monotonic(), step
            if self._copied_at > until:
                break

    def _send(self, head: Item, numbers: torch.Tensor | None = None) -> None:
        try:
            with self._links.lock:
                self._frame(HEAD, memoryview(msgspec.json.encode(head)))
                for part in frames_of(numbers) if numbers is not None else ():
                    self._frame(NUMBERS, bytes_of(part))
        except TransportError as error:
            self._give_up(str(error))

    def _frame(self, label: Label, content: memoryview) -> None:
        while self._unsent and self._unsent[0][0].done:
            self._unsent.popleft()
        frame = self._links.send_ahead(self._feeding, self._taker, label, content)
        self._unsent.append((frame, len(content)))

    def _unsent_bytes(self) -> int:
        return sum(size for frame, size in self._unsent if not frame.done)
