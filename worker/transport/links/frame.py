"""Frames of a link between two workers, each a header and its content.

Must not know sockets, nor the meaning of contents.
"""

import ctypes
import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from oobleck.worker.transport.links.greeting import PROOF_BYTES


class Kind(IntEnum):
    """Purpose of a frame."""

    MESSAGE = 1
    #: A member's share of a chunk, sent to the member that adds it; and the sum, sent back.
    SHARE = 2
    TOTAL = 3
    #: The words of a member and those below it in the tree; and the words of all, from the root.
    WORDS = 4
    TABLE = 5
    #: Arrival of the sender at the meeting, with its word for the host of the meeting.
    STANDING = 8
    #: Departure of the sender in order: it sends nothing more, and its end is no loss to the
    #: meeting.
    GOODBYE = 6
    #: Departure that also drops unsent frames. No loss by itself either: a sender that gives up has
    #: reported one, or was ordered to.
    GIVEN_UP = 7
    #: Departure because a newer meeting is wanted, so that none waits for this one.
    CALLED_OFF = 9
    #: Pieces of state for a future meeting; and the receiver's progress with it.
    FEED = 10
    FED = 11
    #: Proof that the sender has the secret of that meeting, when the link was made in another one.
    PROOF = 12
    #: Number of NCCL operations that the sender is ready for; or the identifier of an NCCL group.
    NOTE = 13


#: Words about the end of a meeting, which are never dropped.
LEAVING = frozenset({Kind.GOODBYE, Kind.GIVEN_UP, Kind.CALLED_OFF})
#: Frames for a meeting in preparation, whether or not this worker has entered it.
FEEDING = frozenset({Kind.FEED, Kind.FED, Kind.PROOF})


class Label(NamedTuple):
    """Label of a peer's frame within one meeting. Frames of the same label arrive in order."""

    kind: int
    key: int
    part: int


#: Frames for the links themselves, handled whether or not this worker has entered their meeting.
TOLD = frozenset({Kind.STANDING, Kind.PROOF})

#: Most bytes of a frame's content. It bounds the wait of urgent frames, and the bytes sent or read
#: in vain after a meeting is given up.
MOST_BYTES = 1 << 20
#: Fewest and most bytes of content in a frame of each kind.
SIZES: dict[int, tuple[int, int]] = {
    Kind.MESSAGE: (0, MOST_BYTES),
    Kind.SHARE: (0, MOST_BYTES),
    Kind.TOTAL: (0, MOST_BYTES),
    # The words of one worker and of all below it in the tree, and those of all.
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

#: Epoch, label, and the size of the content that follows.
HEADER = struct.Struct("!QBqIQ")

#: Priorities; the lowest number is sent first.
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
    """Return the priority of a frame. Sums are sent after the messages that other workers compute
    on, a departure after all of its meeting, and frames for a later meeting after everything."""
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

    numpy is avoided: it would keep the tensor's storage from being resized, which stages of several
    workers do to free memory.
    """
    assert tensor.is_contiguous(), "only a contiguous tensor is one run of bytes"
    if not tensor.numel():
        return memoryview(bytearray())  # unlike b"", it is writable
    content = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    content.tensor = tensor  # type: ignore[attr-defined]  # kept alive by the view
    return memoryview(content).cast("B")
