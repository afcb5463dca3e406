"""Items that a source of state sends to a worker of a coming plan, ahead of the plan.

They form a stream: each item has a head; one for a piece of state or of a gradient has its numbers
behind it, cut into frames. Must not know where items come from, nor what becomes of them."""

from collections.abc import Mapping
from fractions import Fraction

import msgspec
import torch

from oobleck.core.ids import Generation
from oobleck.worker.transport.links.frame import Kind, Label

#: Of numbers in one frame: what is urgent waits for no more than this to go out first.
FRAME_BYTES = 128 << 10
HEAD = Label(Kind.FEED, 0, 0)
NUMBERS = Label(Kind.FEED, 0, 1)
#: A taker's answers: the step that it is at, and that it takes nothing any more.
ACKNOWLEDGED = Label(Kind.FED, 0, 0)
REFUSED = Label(Kind.FED, 0, 1)


class Offered(msgspec.Struct, frozen=True, kw_only=True, tag="offered"):
    """Offer of the source, which has something to feed. A taker that has heard of the plan
    acknowledges step 0."""


class Copied(msgspec.Struct, frozen=True, kw_only=True, tag="copied"):
    """A piece of a layer's state after `version` steps; (1 + moments, count) numbers follow."""

    #: The source's number for it, from now on.
    piece: int
    layer: int
    #: Numerators and denominators: the piece of the layer's flat state.
    start: tuple[int, int]
    stop: tuple[int, int]
    version: int
    count: int

    @property
    def span(self) -> tuple[Fraction, Fraction]:
        return Fraction(*self.start), Fraction(*self.stop)


class Reduced(msgspec.Struct, frozen=True, kw_only=True, tag="reduced"):
    """Gradient that step `step` applies to a piece, before its scale; `count` numbers follow. The
    step is committed once its `Applied` comes."""

    piece: int
    step: int
    count: int


class Applied(msgspec.Struct, frozen=True, kw_only=True, tag="applied"):
    """Commit of a step by the source. All pieces that come before are at that step then."""

    step: int
    #: Of the gradients; None: the step was skipped.
    scale: float | None
    #: As in `Omissions`: the parameters that the step left out, and the earlier counts.
    unused: frozenset[str] = frozenset()
    missed: Mapping[str, int] = {}


class Left(msgspec.Struct, frozen=True, kw_only=True, tag="left"):
    """End of a piece's feeding: the piece is to be fetched when the plan is entered."""

    piece: int


class Over(msgspec.Struct, frozen=True, kw_only=True, tag="over"):
    """End of the stream: the source has left the plan before, and its pieces are as they were then.
    What it had not sent by then it does not send any more."""

    step: int
    lineage: int
    skipped: int
    generation: Generation
    #: As `Position.missed`.
    missed: Mapping[str, int] = {}
    #: What the vote on the step says, as bytes, and when it was held; none: the taker has it, or
    #: the source has not.
    ballot: bytes = b""
    voted_generation: Generation = Generation(0)


Item = Offered | Copied | Reduced | Applied | Left | Over
decoder: "msgspec.json.Decoder[Item]" = msgspec.json.Decoder(Item)


def frames_of(numbers: torch.Tensor) -> list[torch.Tensor]:
    """Split contiguous numbers in host memory into one tensor per frame."""
    flat = numbers.reshape(-1)
    return list(torch.split(flat, FRAME_BYTES // flat.element_size()))
