"""Sums of host tensors over links, in chunks, each of which goes up a tree and comes back down.

In a small group a chunk's tree has one member that adds it and sends the sum to all others. The
chunks of a large tensor are spread over the members, so each sends and adds its share of the work
(reduce-scatter, then all-gather). A small tensor is one chunk. In a large group, where not all have
links with each other, all chunks take the same tree (`tree.sum_places`), one after the other.

A member adds those below it in the order of the ranks, so a sum is the same to the bit on all, and
in every run.
"""

import contextlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming, Outgoing, fresh_memory
from oobleck.worker.transport.links.wire import MOST_BYTES, Kind, Label, bytes_of
from oobleck.worker.transport.tree import Place, sum_places

#: Least bytes of a chunk: below it, messages cost more than bytes.
_LEAST_BYTES = 64 << 10
#: A member's share of the sum is cut into chunks, so that some are sent while others arrive: no
#: smaller than this, and usually so many.
_CUT_BYTES = 512 << 10
_CUTS = 4
#: Most pieces of one frame's content; the kernel takes 1,024.
_MOST_PIECES = 64
#: Most bytes of added shares whose memory is reused.
_MOST_SPARE_BYTES = 64 << 20


class SpareBuffers:
    """Memory of shares that have been added, by size."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[memoryview]] = defaultdict(list)
        self._bytes = 0

    def take(self, size: int) -> memoryview:
        if not self._free[size]:
            return fresh_memory(size)
        self._bytes -= size
        return self._free[size].pop()

    def give(self, buffer: memoryview) -> None:
        if self._bytes + len(buffer) <= _MOST_SPARE_BYTES:
            self._bytes += len(buffer)
            self._free[len(buffer)].append(buffer)


class _Share(Incoming):
    """Share of a chunk that one member adds, with those below it."""

    def __init__(self, chunk: "_Chunk", index: int, member: bytes) -> None:
        self._chunk = chunk
        self._index = index
        self._member = member
        self.buffer = memoryview(b"")
        #: Its memory, if it is to be reused.
        self.spare: memoryview | None = None

    def room(self, size: int) -> memoryview:
        _check_size(size, self._chunk.own.nbytes)
        self.buffer = self.spare = self._chunk.spare.take(size)
        return self.buffer

    def take_over(self, content: memoryview) -> None:
        # Not reused: early content has new memory each time, so the spare buffers would only grow.
        _check_size(len(content), self._chunk.own.nbytes)
        self.buffer = content
        self.arrived()

    def arrived(self) -> None:
        self._chunk.paid(self._member)
        self._chunk.take(self._index, self)


class _Total(Incoming):
    """Sum of a chunk, from the member that sends it to this one."""

    def __init__(self, chunk: "_Chunk", member: bytes) -> None:
        self._chunk = chunk
        self._member = member

    def room(self, size: int) -> memoryview:
        _check_size(size, self._chunk.own.nbytes)
        return bytes_of(self._chunk.own)

    def arrived(self) -> None:
        self._chunk.paid(self._member)
        self._chunk.whole()


class _Chunk:
    """Chunk at this member's place in its tree."""

    def __init__(
        self,
        sum_: "LinkSum",
        part: int,
        own: torch.Tensor,
        share: Sequence[torch.Tensor],
        place: Place,
    ) -> None:
        """Make it. `own`: memory for the sum; `share`: this member's share, in pieces."""
        self.own = own
        self.spare = sum_.spare
        self.paid = sum_.paid
        self._share = share
        self._sum = sum_
        self._part = part
        self._above = place.above
        self._below = sorted(place.below)
        #: This member's own place among those below it, in the order of adding.
        self._at = bisect_left(self._below, sum_.rank)
        #: By that place, shares that arrived before their turn.
        self._ahead: dict[int, _Share] = {}
        self._next = 0
        #: Sum of the places before the next one, and its memory if that is a share's.
        self._total: torch.Tensor | None = None
        self._borrowed: memoryview | None = None

    def begin(self) -> None:
        for index, rank in enumerate(self._below):
            at = index if index < self._at else index + 1
            self._sum.expect(rank, Kind.SHARE, self._part, partial(_Share, self, at))
        if self._above is not None:
            self._sum.expect(self._above, Kind.TOTAL, self._part, partial(_Total, self))
            if not self._below:  # sent from its place
                pieces = self._share if len(self._share) <= _MOST_PIECES else [self._own_values()]
                self._sum.send(self._above, Kind.SHARE, self._part, *pieces)
                return
        if not self._at:  # otherwise the first share begins it
            self._add_those_there()

    def take(self, index: int, share: _Share) -> None:
        self._ahead[index] = share
        if index == self._next:
            self._add_those_there()

    def _add_those_there(self) -> None:
        while True:
            if self._next == self._at:
                self._add(self._own_values(), None)
            elif (share := self._ahead.pop(self._next, None)) is not None:
                self._add(self._values(share), share.spare)
            else:
                break
            self._next += 1
        if self._next <= len(self._below):
            return
        if self._above is None:
            self.whole()
        else:
            self._sum.send(self._above, Kind.SHARE, self._part, self.own)

    def _add(self, values: torch.Tensor, memory: memoryview | None) -> None:
        """Add `values` to the total. `memory`: that of the values, if it is to be reused."""
        if self._total is None:
            self._total, self._borrowed = values, memory
            return
        if self._next < self._at:
            self._total += values
        else:
            self._total = torch.add(self._total, values, out=self.own)
            self._give(self._borrowed)
            self._borrowed = None
        self._give(memory)

    def _give(self, memory: memoryview | None) -> None:
        if memory is not None:
            self.spare.give(memory)

    def _own_values(self) -> torch.Tensor:
        if len(self._share) == 1:
            return self._share[0]
        return torch.cat(list(self._share), out=self.own)

    def _values(self, share: _Share) -> torch.Tensor:
        own = self.own
        return torch.frombuffer(share.buffer, dtype=own.dtype, count=own.numel())

    def whole(self) -> None:
        """Send the complete sum to those below, and count the chunk as whole."""
        for rank in self._below:
            self._sum.send(rank, Kind.TOTAL, self._part, self.own)
        self._sum.whole()


class LinkSum:
    """Sum under way. All methods are called with the links' lock held."""

    def __init__(
        self,
        links: Links,
        tensor: torch.Tensor,
        shares: Sequence[torch.Tensor],
        members: tuple[bytes, ...],
        rank: int,
        key: int,
        turn: int,
        spare: SpareBuffers,
    ) -> None:
        """Begin the sum.

        `shares`: as in `Transport.all_reduce`; `members`: identities, in rank order; `rank`: this
        one's place there; `key`: the same on all, and unique in this meeting; `turn`: counts the
        group's sums.
        """
        self.rank = rank
        self.spare = spare
        self._links = links
        self._members = members
        self._key = key
        self._sends: list[tuple[bytes, Outgoing]] = []
        flat = tensor.view(-1)
        size = -(-_chunk_bytes(tensor.nbytes, len(members)) // flat.itemsize)
        chunks = torch.split(flat, size)
        shares_of = _cut(shares, size) if shares else [[chunk] for chunk in chunks]
        self._left = len(chunks)
        #: Number of frames still to come, by sender.
        self.owing: Counter[bytes] = Counter()
        links.press(+1)
        places = sum_places(rank, len(members), len(chunks), turn)
        for part, each in enumerate(zip(chunks, shares_of, places, strict=True)):
            _Chunk(self, part, *each).begin()

    def expect(
        self, rank: int, kind: Kind, part: int, incoming: Callable[[bytes], Incoming]
    ) -> None:
        member = self._members[rank]
        self.owing[member] += 1
        self._links.post(member, Label(kind, self._key, part), incoming(member))

    def send(self, rank: int, kind: Kind, part: int, *values: torch.Tensor) -> None:
        member, label = self._members[rank], Label(kind, self._key, part)
        # A peer that is gone has ended the meeting, which waits detect, or has left it.
        with contextlib.suppress(TransportError):
            self._sends.append((member, self._links.send(member, label, *map(bytes_of, values))))

    def paid(self, member: bytes) -> None:
        """Count one frame that `member` owed as received."""
        self.owing[member] -= 1
        if not self.owing[member]:
            del self.owing[member]

    def whole(self) -> None:
        """Count one more chunk as whole."""
        self._left -= 1
        if not self._left:
            self._links.press(-1)

    @property
    def done(self) -> bool:
        """True if the sum is complete, and the others have all that they need of this worker. A
        worker that has left needs nothing any more, and may never take it."""
        while self._sends:
            member, send = self._sends[-1]
            if not (send.done or self._links.has_left(member)):
                break
            self._sends.pop()
        return not self._left and not self._sends


def _chunk_bytes(size: int, members: int) -> int:
    """Return a chunk size that lets each member add equally many chunks, if each has several."""
    each = max(-(-size // members), _LEAST_BYTES)
    most = min(max(each // _CUTS, _CUT_BYTES), MOST_BYTES)
    return -(-each // -(-each // most))


def _cut(shares: Sequence[torch.Tensor], size: int) -> list[list[torch.Tensor]]:
    """Cut the consecutive `shares` after every `size` numbers."""
    cuts: list[list[torch.Tensor]] = [[]]
    left = size
    for share in shares:
        while share.numel():
            if not left:
                cuts.append([])
                left = size
            cuts[-1].append(share[:left])
            share = share[left:]
            left -= cuts[-1][-1].numel()
    return cuts


def _check_size(size: int, expected: int) -> None:
    if size != expected:
        raise ConnectionError(f"sent {size} bytes where {expected} were expected")
