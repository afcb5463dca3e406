"""Sums of host tensors over links, in chunks: one member adds a chunk up and tells the others.

The chunks of a large tensor are spread over the members, so each sends and adds its share of the
work (reduce-scatter, then all-gather); a small tensor is one chunk, a star. A chunk is added in the
order of the ranks, so a sum is the same to the bit on all, and in every run.
"""

import contextlib
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.frame import Kind, Label, bytes_of
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming, Outgoing

#: Of a chunk: below, messages cost more than bytes; above, one waits for the whole of the last.
_LEAST_BYTES = 64 << 10
_MOST_BYTES = 512 << 10
#: Shares on hand that wait for others, whose memory is used again.
_MOST_SPARE = 64


class SpareBuffers:
    """Memory of shares that have been added."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """At least `size` bytes."""
        if size > _MOST_BYTES or not self._free:
            return bytearray(max(size, _MOST_BYTES))
        return self._free.pop()

    def give(self, buffer: bytearray) -> None:
        if len(self._free) < _MOST_SPARE and len(buffer) == _MOST_BYTES:
            self._free.append(buffer)


class _Share(Incoming):
    """What one member adds to a chunk."""

    def __init__(self, chunk: "_Chunk", index: int, paid: Callable[[], None]) -> None:
        self._chunk = chunk
        self._index = index
        self._paid = paid
        self.buffer = bytearray()

    def room(self, size: int) -> memoryview:
        _check_size(size, self._chunk.own.nbytes)
        self.buffer = self._chunk.spare.take(size)
        return memoryview(self.buffer)[:size]

    def arrived(self) -> None:
        self._paid()
        self._chunk.take(self._index, self)


class _Chunk:
    """A chunk that this member adds up."""

    def __init__(
        self,
        own: torch.Tensor,
        rank: int,
        size: int,
        spare: SpareBuffers,
        whole: Callable[[], None],
    ) -> None:
        """`own`: this member's share, and where the sum comes; `rank` and `size`: in the group;
        `whole` is called when the sum is there."""
        self.own = own
        self.spare = spare
        self._rank = rank
        self._size = size
        self._whole = whole
        #: By rank, those that came before the ones below them.
        self._ahead: dict[int, _Share] = {}
        self._next = 0
        #: The sum of the shares below this member's own.
        self._below: _Share | None = None
        if rank == 0:
            self._next = 1

    def take(self, index: int, share: _Share) -> None:
        self._ahead[index] = share
        while (share_ := self._ahead.pop(self._next, None)) is not None:
            self._add(share_)
            self._next += 1
            if self._next == self._rank:
                self._add_own()
                self._next += 1
        if self._next == self._size:
            self._whole()

    def _add(self, share: _Share) -> None:
        if self._next > self._rank:
            self.own.add_(self._values(share))
            self.spare.give(share.buffer)
        elif self._below is None:
            self._below = share
        else:
            self._values(self._below).add_(self._values(share))
            self.spare.give(share.buffer)

    def _add_own(self) -> None:
        assert self._below is not None, "there is a rank below"
        torch.add(self._values(self._below), self.own, out=self.own)
        self.spare.give(self._below.buffer)

    def _values(self, share: _Share) -> torch.Tensor:
        own = self.own
        return torch.frombuffer(share.buffer, dtype=own.dtype, count=own.numel())


class _Total(Incoming):
    """The sum of a chunk, from who added it up."""

    def __init__(self, own: torch.Tensor, whole: Callable[[], None]) -> None:
        self._own = own
        self._whole = whole

    def room(self, size: int) -> memoryview:
        _check_size(size, self._own.nbytes)
        return bytes_of(self._own)

    def arrived(self) -> None:
        self._whole()


class LinkSum:
    """One sum under way. All methods are called with the links' lock held."""

    def __init__(
        self,
        links: Links,
        tensor: torch.Tensor,
        members: tuple[bytes, ...],
        rank: int,
        key: int,
        turn: int,
        spare: SpareBuffers,
    ) -> None:
        """`members`: identities, in rank order; `rank`: this one's place there; `key`: the same on
        all, and no other sum's of this meeting; `turn`: with whom the first chunk is."""
        self._links = links
        self._members = members
        self._rank = rank
        self._key = key
        self._sends: list[tuple[bytes, Outgoing]] = []
        flat = tensor.view(-1)
        most = max(min(_MOST_BYTES, -(-tensor.nbytes // len(members))), _LEAST_BYTES)
        chunks = torch.split(flat, max(1, most // flat.element_size()))
        self._left = len(chunks)
        #: How many frames have to come from whom yet.
        self.owing: Counter[bytes] = Counter()
        links.press(+1)
        for part, own in enumerate(chunks):
            adder = (part + turn) % len(members)
            if adder == rank:
                self._add_up(part, own, spare)
            else:
                who, share = members[adder], self._label(Kind.SHARE, part)
                self._sends.append((who, links.send(who, share, bytes_of(own))))
                self._expect(who, Kind.TOTAL, part, _Total(own, partial(self._got_total, who)))

    def _label(self, kind: Kind, part: int) -> Label:
        return Label(kind, self._key, part)

    def _add_up(self, part: int, own: torch.Tensor, spare: SpareBuffers) -> None:
        chunk = _Chunk(own, self._rank, len(self._members), spare, lambda: self._tell(part, own))
        for index, member in enumerate(self._members):
            if index != self._rank:
                share = _Share(chunk, index, partial(self._got, member))
                self._expect(member, Kind.SHARE, part, share)

    def _expect(self, member: bytes, kind: Kind, part: int, incoming: Incoming) -> None:
        self.owing[member] += 1
        self._links.post(member, self._label(kind, part), incoming)

    def _got(self, member: bytes) -> None:
        self.owing[member] -= 1
        if not self.owing[member]:
            del self.owing[member]

    def _got_total(self, member: bytes) -> None:
        self._got(member)
        self._whole()

    def _tell(self, part: int, own: torch.Tensor) -> None:
        content = bytes_of(own)
        for index, member in enumerate(self._members):
            # Who is gone has ended the meeting, which whoever waits is told, or has left it.
            with contextlib.suppress(TransportError):
                if index != self._rank:
                    send = self._links.send(member, self._label(Kind.TOTAL, part), content)
                    self._sends.append((member, send))
        self._whole()

    def _whole(self) -> None:
        self._left -= 1
        if not self._left:
            self._links.press(-1)

    @property
    def done(self) -> bool:
        """Whether the sum is there, and the others have what they need of this worker; who has left
        needs nothing any more, and may never take it."""
        while self._sends:
            member, send = self._sends[-1]
            if not (send.done or self._links.has_left(member)):
                break
            self._sends.pop()
        return not self._left and not self._sends


def _check_size(size: int, expected: int) -> None:
    assert size == expected, f"{size} bytes came where {expected} were expected"
