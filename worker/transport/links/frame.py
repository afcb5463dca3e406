"""Frames that go over a link between two workers, each a header and its content.

Must not know sockets, nor what a content means."""

import ctypes
import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from oobleck.worker.transport.links.greeting import PROOF_BYTES


class Kind(IntEnum):
    """Purpose of a frame."""

    MESSAGE = 1
    #: A member's share of a chunk, to the one that adds the chunk up; and the sum, from there.
    SHARE = 2
    TOTAL = 3
    #: What a member and those below it in the tree have to say; and what all said, from the root.
    WORDS = 4
    TABLE = 5
    #: The sender has come to the meeting; what it has to say there, to who hosts it.
    STANDING = 8
    #: The sender has left the meeting: nothing more of it comes, and its end is no loss to it.
    GOODBYE = 6
    #: The same, and what it had not sent yet it does not send any more. No loss by itself either:
    #: whoever gives up has told of one, or was told to.
    GIVEN_UP = 7
    #: The same: a newer one is wanted, so nobody waits for this one.
    CALLED_OFF = 9
    #: State for a meeting that is still to come, piece by piece; and how far its taker is with it.
    FEED = 10
    FED = 11
    #: The sender has the secret of that meeting, in which it was not when the link was made.
    PROOF = 12
    #: How many operations of NCCL the sender is ready for; or the identifier of a group of NCCL's.
    NOTE = 13


#: These are said of a meeting that is over, so they are never dropped.
LEAVING = frozenset({Kind.GOODBYE, Kind.GIVEN_UP, Kind.CALLED_OFF})
#: These go to whoever prepares their meeting, whether or not this worker has come to it.
FEEDING = frozenset({Kind.FEED, Kind.FED, Kind.PROOF})


class Label(NamedTuple):
    """Label of a peer's frame within one meeting. Frames of the same label come in order."""

    kind: int
    key: int
    part: int


#: These are for the links themselves, and are heard whether or not this worker has come to their
#: meeting.
TOLD = frozenset({Kind.STANDING, Kind.PROOF})

#: Of a frame's content: what is urgent waits for no more than that to go out first, and where it is
#: given up no more is sent or read in vain.
MOST_BYTES = 1 << 20
#: The fewest and the most bytes of content in a frame of each kind.
SIZES: dict[int, tuple[int, int]] = {
    Kind.MESSAGE: (0, MOST_BYTES),
    Kind.SHARE: (0, MOST_BYTES),
    Kind.TOTAL: (0, MOST_BYTES),
    # One worker's words with those of all below it in the tree, and those of all.
    Kind.WORDS: (0, 64 << 20),
    Kind.TABLE: (0, 64 << 20),
    Kind.STANDING: (PROOF_BYTES, 16 << 20),
    Kind.GOODBYE: (0, 0),
    Kind.GIVEN_UP: (0, 0),
    Kind.CALLED_OFF: (0, 0),
    Kind.FEED: (0, MOST_BYTES),
    Kind.FED: (0, 8),
    Kind.PROOF: (PROOF_BYTES, PROOF_BYTES),
    Kind.NOTE: (0, MOST_BYTES),
}

#: Epoch, then the label, then the bytes of content that follow.
HEADER = struct.Struct("!QBqIQ")

#: Frames of a lower number go first.
URGENT, ORDINARY, BULK, BACKGROUND = range(4)
_PRIORITIES = {
    Kind.MESSAGE: ORDINARY,
    Kind.NOTE: URGENT,
    Kind.WORDS: URGENT,
    Kind.TABLE: URGENT,
    Kind.STANDING: URGENT,
    Kind.PROOF: URGENT,
    Kind.FEED: BACKGROUND,
    Kind.FED: URGENT,
}


def priority_of(kind: int) -> int:
    """Return the priority of a frame. Sums go behind the messages that other workers compute on, a
    leave behind all of its meeting, and what is sent ahead of a later one behind everything."""
    return _PRIORITIES.get(Kind(kind), BULK)


def check_header(kind: int, size: int) -> None:
    """Raise ConnectionError for a header that no peer of this release sends."""
    sizes = SIZES.get(kind)
    if sizes is None:
        raise ConnectionError(f"sent a frame of an unknown kind, {kind}")
    least, most = sizes
    if not least <= size <= most:
        raise ConnectionError(
            f"sent a frame of kind {Kind(kind).name} with {size} bytes of content"
        )


def pieces(content: memoryview) -> list[memoryview]:
    """Cut the content into contents of frames; one empty piece where there is no content."""
    starts = range(0, max(1, len(content)), MOST_BYTES)
    return [content[start : start + MOST_BYTES] for start in starts]


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory; writing there writes to the tensor.

    Not by way of numpy, which would keep the tensor's storage from ever being resized, as stages of
    several workers do to give memory back."""
    assert tensor.is_contiguous(), "only a contiguous tensor is one run of bytes"
    if not tensor.numel():
        return memoryview(bytearray())  # which, unlike b"", takes the nothing that comes
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    content.tensor = tensor  # type: ignore[attr-defined]  # lives as long as the view does
    return memoryview(content).cast("B")
