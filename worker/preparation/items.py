"""Items that a source of state sends to a worker of a coming plan, ahead of the plan.

They form a stream: each item has a head. If it is a piece of state or of a gradient, its numbers
follow, cut into frames. Must not know where items come from, nor how they are used.
"""

from collections.abc import Mapping
from fractions import Fraction

import msgspec
import torch

from oobleck.core.ids import Generation
from oobleck.worker.transport.links.wire import Kind, Label

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
