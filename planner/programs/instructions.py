"""Instructions: what one worker does in one training step, as data.

A program is a tuple of instructions for one worker. It says everything that the executor needs
to know about *who* and *when*; shapes and tensors are the worker's. Each instruction names the
pipeline, stage and micro-batch it acts on and, where it talks, the peer worker, so that a worker
may also execute micro-batches of another pipeline's stage whose layers it holds.

Sends are asynchronous (the executor starts them and goes on); receives, which the executor posts
ahead, `SyncGradient`'s end and `Vote` wait. Micro-batches are numbered over the global batch.
"""

from dataclasses import dataclass
from typing import Literal

from oobleck.planner.ids import WorkerId


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
        """Its part of `count` bytes, rounded up."""
        return -(-count * (self.stop - self.start) // self.of)

    def of_rows(self, count: int) -> range:
        """Which of `count` rows it is; there may be none."""
        return range(self.start * count // self.of, self.stop * count // self.of)


WHOLE = Share(0, 1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What all micro-batch instructions name."""

    pipeline: int
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Action):
    """What all instructions that talk to a neighbour stage name."""

    peer: WorkerId
    #: The rows of the micro-batch that travel: all, except between stages of several workers,
    #: where worker i of d holds the i-th d-th of the rows.
    share: Share = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTokens(Action):
    """Get the micro-batch's token rows; on the first stage as input, on the last as targets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveActivation(Message):
    """Wait for the previous stage's output; paired with the peer's `SendActivation`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Action):
    """Run the stage's layers; on the last stage also the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation(Message):
    """Hand the stage's output to the next stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGradient(Message):
    """Wait for the gradient of the stage's output; paired with the peer's `SendGradient`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Action):
    """Run the stage's backward, adding to the layers' gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput(Action):
    """The part of the backward that others wait for: the gradient of the stage's input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight(Action):
    """The rest of the micro-batch's backward: what is still missing of the layers' gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient(Message):
    """Hand the gradient of the stage's input to the previous stage."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class LayerPart:
    """A piece of a layer's parameters that is reduced over one set of workers.

    `own` is everything that no other layer shares; `tied` is the part that the layer shares with
    others (the token embedding of layer 0 and of a tied head).
    """

    layer: int
    part: Literal["own", "tied"]
    #: The whole part, except where some stage holds the layer on several workers: worker p of d
    #: owns the p-th d-th of it.
    share: Share = WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncGradient:
    """By here, the gradients of `parts` are being summed over `owners`; waited for by `Vote`. A sum
    starts as soon as its own layers have their last micro-batch, while others are computed.

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
