"""Transport of host tensors: messages, sums and gatherings over the links between workers.

A tree, whose root is rank 0, gathers the words of all and sends them to all. Must not know
programs, layers or plans.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType

import torch

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming, Outgoing
from oobleck.worker.transport.links.wire import Kind, Label, bytes_of, pieces
from oobleck.worker.transport.meeting import Meeting, OnLost, nobody_asks
from oobleck.worker.transport.sums import LinkSum, SpareBuffers
from oobleck.worker.transport.transport import Group, Pending, Transport
from oobleck.worker.transport.tree import Words, entry, place_of, sum_neighbours, words_of_all

#: Larger messages do not fit into the kernel's buffers, and are read while others compute.
_LARGE_BYTES = 256 << 10


class _Done:
    def wait(self) -> None:
        pass


class _Piece(Incoming):
    """Frame of a message."""

    def __init__(self, arrival: "_Arrival", room: memoryview) -> None:
        self._arrival = arrival
        self._room = room

    def room(self, size: int) -> memoryview:
        if size != len(self._room):
            raise ConnectionError(f"sent {size} bytes where {len(self._room)} were expected")
        return self._room

    def arrived(self) -> None:
        self._arrival.got_one()


class _Arrival:
    """Message on its way into a tensor."""

    def __init__(self, transport: "LinkTransport", tensor: torch.Tensor, peer: bytes) -> None:
        self._transport = transport
        self._peer = peer
        self._pressing = tensor.nbytes > _LARGE_BYTES
        self.pieces = [_Piece(self, room) for room in pieces(bytes_of(tensor))]
        self._left = len(self.pieces)
        if self._pressing:
            transport.links.press(+1)

    def got_one(self) -> None:
        self._left -= 1
        if not self._left:
            self.pieces.clear()  # they refer to this one and its tensor
            if self._pressing:
                self._transport.links.press(-1)

    @property
    def done(self) -> bool:
        return not self._left

    def wait(self) -> None:
        if not self.done:
            self._transport.wait(lambda: self.done, [self._peer])


class _Departure:
    """Message on its way out; keeps its tensor."""

    def __init__(
        self, transport: "LinkTransport", tensor: torch.Tensor, peer: bytes, frame: Outgoing
    ) -> None:
        """Make it. `frame`: the message's last one."""
        self._transport = transport
        self._tensor = tensor
        self._peer = peer
        self._frame = frame

    def wait(self) -> None:
        if not self._frame.done:
            self._transport.wait(lambda: self._frame.done, [self._peer])


class _Together:
    """Group of messages under way."""

    def __init__(self, messages: Sequence[Pending]) -> None:
        self._messages = messages

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


class _Reducing:
    """Sum under way."""

    def __init__(self, transport: "LinkTransport", reduction: LinkSum) -> None:
        self._transport = transport
        self._sum = reduction

    def wait(self) -> None:
        self._transport.wait(lambda: self._sum.done, self._sum.owing)


class LinkTransport(Meeting, Transport):
    """Transport among the members of a meeting, by their links."""

    def __init__(
        self,
        links: Links,
        epoch: int,
        secret: bytes,
        rank: int,
        size: int,
        *,
        on_lost: OnLost = nobody_asks,
        names: Mapping[bytes, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(links, epoch, secret, rank, size, on_lost=on_lost, names=names)
        self._gatherings = itertools.count()
        self._sums: dict[Group, int] = {}
        self._spare = SpareBuffers()

    # ---- messages

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        identity = self.reach(peer)
        content = tensor.contiguous()
        with self.links.lock:
            self.check()
            sent = [
                self.links.send(identity, Label(Kind.MESSAGE, tag, part), piece)
                for part, piece in enumerate(pieces(bytes_of(content)))
            ]
        return _Departure(self, content, identity, sent[-1])

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Receive into `tensor`, which is contiguous; messages with the same tag arrive oldest
        first.
        """
        identity = self.reach(peer)
        with self.links.lock:
            self.check()
            arrival = _Arrival(self, tensor, identity)
            for part, piece in enumerate(arrival.pieces):
                self.links.post(identity, Label(Kind.MESSAGE, tag, part), piece)
        return arrival

    def exchange(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: Group, tag: int
    ) -> Pending:
        messages: list[Pending] = []
        for peer, theirs, own in zip(group, received, sent, strict=True):
            if theirs.numel():
                messages.append(self.receive(theirs, peer, tag))
            if own.numel():
                messages.append(self.send(own, peer, tag))
        return _Together(messages)

    # ---- sums

    def all_reduce(
        self, tensor: torch.Tensor, group: Group, shares: Sequence[torch.Tensor] = ()
    ) -> Pending:
        if len(group) == 1 and shares:
            torch.cat(list(shares), out=tensor)
        if len(group) == 1 or not tensor.numel():
            return _Done()
        index = group.index(self.rank)
        self.reach_all(group[each] for each in sum_neighbours(index, len(group)))
        turn = self._sums.get(group, 0)
        self._sums[group] = turn + 1
        members = tuple(self._peers[peer] for peer in group)
        with self.links.lock:
            self.check()
            reduction = LinkSum(
                self.links,
                tensor,
                shares,
                members,
                index,
                _key_of(group, turn),
                turn,
                self._spare,
            )
        return _Reducing(self, reduction)

    # ---- gatherings

    def gather(self, word: bytes) -> list[bytes]:
        """Return the words of all members, by rank. All call this in the same order."""
        key = next(self._gatherings)
        if self.size == 1:
            return [word]
        up = Label(Kind.WORDS, key, 0)
        above, below = place_of(self.rank, self.size)
        tables = [entry(self.rank, word)]
        tables += self._receive_tables(below, up)
        table, down = b"".join(tables), Label(Kind.TABLE, key, 0)
        if above is not None:
            # A table of all words contains those of the receiver, so its own send has arrived.
            self._send_table([above], up, table)
            (table,) = self._receive_tables([above], down)
        if below:
            self._wait_until_sent(below, self._send_table(below, down, table))
        return words_of_all(table, self.size)

    def _receive_tables(self, peers: Collection[int], label: Label) -> list[bytes]:
        identities = [self.reach(peer) for peer in peers]
        words = [Words() for _ in peers]
        with self.links.lock:
            self.check()  # a wait after an abort would take the next meeting's words
            for identity, each in zip(identities, words, strict=True):
                self.links.post(identity, label, each)
        for identity, each in zip(identities, words, strict=True):
            self.wait(each.is_there, [identity])
        return [bytes(each.content) for each in words]

    def _send_table(self, peers: Collection[int], label: Label, table: bytes) -> list[Outgoing]:
        identities = [self.reach(peer) for peer in peers]
        with self.links.lock:
            self.check()
            return [self.links.send(each, label, memoryview(table)) for each in identities]

    def _wait_until_sent(self, peers: Collection[int], sends: Sequence[Outgoing]) -> None:
        identities = [self._peers[peer] for peer in peers]
        self.wait(lambda: all(send.done for send in sends), identities)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        for content in self.gather(bytes(bytes_of(tensor.contiguous()))):
            part = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            _fill(part, content)
            parts.append(part)
        return parts

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        word = bytes(bytes_of(tensor)) if self.rank == root else b""
        _fill(tensor, self.gather(word)[root])


def _fill(tensor: torch.Tensor, content: bytes) -> None:
    if len(content) != tensor.nbytes:
        raise TransportError(f"a member has sent {len(content)} bytes, and not {tensor.nbytes}")
    bytes_of(tensor)[:] = content


def _key_of(group: Group, turn: int) -> int:
    """Return a key that distinguishes the sums of a meeting: 63 bits of a digest, so that none
    collide by chance."""
    text = f"{turn}:{','.join(map(str, group))}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1
