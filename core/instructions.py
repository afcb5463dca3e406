"""Instructions: what one worker does in one training step, as data.

A program is a tuple of instructions for one worker. It says everything that the executor needs
to know about *who* and *when*; shapes and tensors are the worker's. Each instruction names the
micro-batch and the layers that it acts on and, where it talks, the peer worker. So a worker may
compute a part of the layers that it holds, for any micro-batches, and one of them in two parts.

Sends are asynchronous (the executor starts them and goes on); receives, which the executor posts
ahead, `SyncGradient`'s end and `Vote` wait. Micro-batches are numbered over the global batch.
"""

from dataclasses import dataclass
from typing import Literal

from oobleck.core.ids import WorkerId


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Base of all micro-batch instructions, which name a hop of the micro-batch's route by its
    layers."""

    microbatch: int
    first_layer: int
    #: Inclusive.
    last_layer: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.last_layer + 1)

    @property
    def visit(self) -> "Visit":
        """The micro-batch at this hop: all instructions of it there have the same."""
        return self.microbatch, self.first_layer


#: A micro-batch, and the first layer of a hop that it passes.
Visit = tuple[int, int]
#: What travels in a message, the same for both of its ends: whether it is a gradient, micro-batch,
#: the layer whose output it is or is the gradient of, rows.
Content = tuple[bool, int, int, Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Action):
    """Base of all instructions that talk to the hop before or after."""

    peer: WorkerId
    #: The rows of the micro-batch that travel: all, except between hops of several workers, where
    #: worker i of d has the i-th d-th of the rows.
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
    """Get the micro-batch's token rows; for the first layer as input, for the last as targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveActivation(Message):
    """Wait for the output of the hop before; paired with the peer's `SendActivation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Action):
    """Run the layers; after the last one of the model also the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation(Message):
    """Hand the output to the hop after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGradient(Message):
    """Wait for the gradient of the output; paired with the peer's `SendGradient`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Action):
    """Run the layers' backward, adding to their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput(Action):
    """The part of the backward that others wait for: the gradient of the input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight(Action):
    """The rest of the micro-batch's backward: what is still missing of the layers' gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient(Message):
    """Hand the gradient of the input to the hop before."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class LayerPart:
    """A piece of a layer's parameters that is reduced over one set of workers.

    `own` is everything that no other layer shares; `tied` is the part that the layer shares with
    others (such as the token embedding of layer 0 and of a tied head).
    """

    layer: int
    part: Literal["own", "tied"]
    #: The whole part, except where several workers of a node hold the layer: worker p of d owns the
    #: p-th d-th of it.
    share: Share = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGradient:
    """Sum of gradients: by here those of `parts` are being summed over `owners`; `Vote` waits for
    it. A sum starts as soon as its own layers have their last micro-batch, while others are
    computed.

    Every owner has this instruction with the same `owners` and `bucket`, in the same order among
    those of the same owners. `parts` are those parts of the bucket that this worker holds: the
    same on all owners, except for tied parts, where each holds its own layer's (a worker that
    holds several tied layers first adds them up). With one owner there is nothing to send.
    """

    bucket: int
    parts: tuple[LayerPart, ...]
    owners: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Vote:
    """Wait for every gradient sum, then one all-reduce over all workers: the commit point."""

    #: Parts whose squared gradient norm this worker contributes; each part of the model is
    #: counted by exactly one worker.
    norm_parts: tuple[LayerPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """Apply the reduced gradients to every layer held; needs no peer."""


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

#: What occupies a worker's device.
Compute = Forward | Backward | BackwardInput | BackwardWeight
