"""Instructions: the work of one worker in one training step, as data.

A program is a tuple of instructions for one worker. It determines all peers and all orders; shapes
and tensors are the worker's. Each instruction names its micro-batch, its layers and, for a message,
the peer worker. So a worker may compute a part of the layers that it holds, for any micro-batches,
and one of them in two parts.

Sends are asynchronous: the executor starts them and continues. Receives, which the executor posts
ahead, the end of `SyncGradient`, and `Vote` wait. Micro-batches are numbered over the global batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from oobleck.core.ids import WorkerId
from oobleck.core.routes import Hop


@dataclass(frozen=True, slots=True, order=True)
class Share:
    """Pieces start .. stop - 1 of something cut into `of` equal pieces."""

    start: int
    stop: int
    of: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop <= self.of:
            raise ValueError(f"a share is {self.start}:{self.stop}/{self.of}; it must not be empty")

    def of_bytes(self, count: int) -> int:
        """Return the share's part of `count` bytes, rounded up."""
        return -(-count * (self.stop - self.start) // self.of)

    def of_rows(self, count: int) -> range:
        """Return the share's part of `count` rows; it may be empty."""
        return range(self.start * count // self.of, self.stop * count // self.of)


WHOLE = Share(0, 1, 1)


def rows_in_common(hop: Hop, neighbour: Hop, member: int) -> Iterator[tuple[WorkerId, Share]]:
    """Yield the workers of `neighbour` that have rows of worker `member` of `hop`, and
    those rows."""
    workers, own = neighbour.workers, len(hop.workers)
    if own == len(workers):
        yield workers[member], WHOLE if own == 1 else Share(member, member + 1, own)
        return
    of = math.lcm(own, len(workers))
    start, stop = member * of // own, (member + 1) * of // own
    width = of // len(workers)
    cuts = sorted({start, stop, *(cut for cut in range(0, of, width) if start < cut < stop)})
    for begin, end in pairwise(cuts):
        yield workers[begin // width], Share(begin, end, of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all micro-batch instructions; the layers name a hop of the micro-batch's route."""

    microbatch: int
    first_layer: int
    #: Inclusive.
    last_layer: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)

    @property
    def visit(self) -> "Visit":
        """Micro-batch at this hop; all its instructions there have the same."""
        return self.microbatch, self.first_layer


#: Micro-batch, and the first layer of a hop that it passes.
Visit = tuple[int, int]
#: Identity of a message, the same at both ends. It has: whether it is a gradient, the micro-batch,
#: the layer whose output (or gradient of it) it is, and the rows.
Content = tuple[bool, int, int, Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Action):
    """Base of all instructions that exchange data with the hop before or after."""

    peer: WorkerId
    #: Rows of the micro-batch in the message. Between hops of several workers, worker i of d has
    #: the i-th d-th of the rows.
    share: Share = WHOLE

    @property
    def content(self) -> Content:
        """Identity of the message, unique among all messages between two workers in a step."""
        gradient = isinstance(self, ReceiveGradient | SendGradient)
        downwards = isinstance(self, ReceiveActivation | SendGradient)
        boundary = self.first_layer - 1 if downwards else self.last_layer
        return gradient, self.microbatch, boundary, self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTokens(Action):
    """Load of the micro-batch's token rows: the first layer's input, or the last layer's
    targets.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveActivation(Message):
    """Wait for the output of the hop before; paired with the peer's `SendActivation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Action):
    """Forward of the layers, with the loss after the model's last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation(Message):
    """Send of the output to the hop after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGradient(Message):
    """Wait for the gradient of the output; paired with the peer's `SendGradient`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Action):
    """Backward of the layers, added to their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput(Action):
    """First part of a backward: the gradient of the input, which the hop before waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight(Action):
    """Second part of a backward: the remaining gradients of the layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient(Message):
    """Send of the input's gradient to the hop before."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class LayerPart:
    """Piece of a layer's parameters that is reduced over one set of workers.

    `own` is everything that no other layer shares; `tied` is the part that the layer shares with
    others (such as the token embedding of layer 0 and of a tied head).
    """

    layer: int
    part: Literal["own", "tied"]
    #: The whole part, unless several workers of a node hold the layer: worker p of d then owns the
    #: p-th d-th of it.
    share: Share = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGradient:
    """Gradient sum of `parts` over `owners`, in progress from here on; `Vote` waits for it. A sum
    starts as soon as its own layers have their last micro-batch, while others are computed.

    Every owner has this instruction with the same `owners` and `bucket`, in the same order among
    those of the same owners. `parts` are those parts of the bucket that this worker holds. They are
    the same on all owners, except for tied parts, where each holds its own layer's. (A worker that
    holds several tied layers first adds them up.) With one owner there is nothing to send.
    """

    bucket: int
    parts: tuple[LayerPart, ...]
    owners: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Wait for every gradient sum, then one all-reduce over all workers: the commit point."""

    #: Parts whose squared gradient norm this worker contributes; exactly one worker counts each
    #: part of the model.
    norm_parts: tuple[LayerPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Application of the reduced gradients to every layer held; needs no peer."""


Instruction = (
    LoadTokens
    | ReceiveActivation
    | Forward
    | SendActivation
    | ReceiveGradient
    | Backward
    | BackwardInput
    | BackwardWeight
    | SendGradient
    | SyncGradient
    | Vote
    | OptimizerStep
)
Program = tuple[Instruction, ...]

#: Instructions that occupy a worker's device.
Compute = Forward | Backward | BackwardInput | BackwardWeight
