"""The transport of host tensors: messages, sums and gatherings over the links between workers.

A tree, whose root is rank 0, gathers what all have to say and tells it to all; it is as flat as the
root has hands, so up to 64 workers it is a star. Must not know programs, layers or plans.
"""

import hmac
import itertools
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from hashlib import blake2b

import torch

from oobleck.planner.ids import Generation
from oobleck.worker.runtime.errors import CalledOff, Superseded, TransportError, Unreached
from oobleck.worker.transport.links.door import Card
from oobleck.worker.transport.links.frame import Kind, Label, bytes_of
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Incoming, Outgoing
from oobleck.worker.transport.links.silence import NO_WAY
from oobleck.worker.transport.sums import LinkSum, SpareBuffers
from oobleck.worker.transport.transport import Group, Pending

_MEETING_BITS = 16
#: No gathering's number.
_MEETING = -1
#: How many a worker of the tree gathers from.
_HANDS = 64
#: Messages beyond this do not fit into the kernel's buffers, and come in while others compute.
_LARGE_BYTES = 256 << 10
#: How long another one's call is waited for.
PATIENCE_S = 5.0
#: How long a wait for others' links may last before it looks whether it is still wanted.
_POLL_S = 0.05
#: Rank, and bytes that follow.
_WORD = struct.Struct("!IQ")

_HAS_LEFT = "a peer has left"

#: Called with why, once, from another thread than that which uses the transport.
OnLost = Callable[[str], None]


def _nobody_asks(why: str) -> None:
    pass


class _Done:
    def wait(self) -> None:
        pass


class _Arrival(Incoming):
    """A message, into a tensor."""

    def __init__(self, transport: "LinkTransport", tensor: torch.Tensor, peer: bytes) -> None:
        self._transport = transport
        self._tensor = tensor
        self._peer = peer
        self._pressing = tensor.nbytes > _LARGE_BYTES
        self.done = False
        if self._pressing:
            transport.links.press(+1)

    def room(self, size: int) -> memoryview:
        room = bytes_of(self._tensor)
        assert len(room) == size, f"{size} bytes came for a tensor of {len(room)}"
        return room

    def arrived(self) -> None:
        self.done = True
        if self._pressing:
            self._transport.links.press(-1)

    def wait(self) -> None:
        if not self.done:
            self._transport.wait(lambda: self.done, [self._peer])


class _Departure:
    """A message on its way out; keeps its tensor."""

    def __init__(
        self, transport: "LinkTransport", tensor: torch.Tensor, peer: bytes, frame: Outgoing
    ) -> None:
        self._transport = transport
        self._tensor = tensor
        self._peer = peer
        self._frame = frame

    def wait(self) -> None:
        if not self._frame.done:
            self._transport.wait(lambda: self._frame.done, [self._peer])


class _Reducing:
    """A sum under way."""

    def __init__(self, transport: "LinkTransport", reduction: LinkSum) -> None:
        self._transport = transport
        self._sum = reduction

    def wait(self) -> None:
        self._transport.wait(lambda: self._sum.done, self._sum.owing)


class _Words(Incoming):
    """What several have to say."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.done = False

    def room(self, size: int) -> memoryview:
        self.content = bytearray(size)
        return memoryview(self.content)

    def arrived(self) -> None:
        self.done = True

    def is_there(self) -> bool:
        return self.done


class LinkTransport:
    """One meeting's use of this process's links."""

    def __init__(
        self,
        links: Links,
        epoch: int,
        secret: bytes,
        rank: int,
        size: int,
        *,
        on_lost: OnLost = _nobody_asks,
    ) -> None:
        """Enter the meeting `epoch`, so that the others of it are let in from now on.

        Nobody can be talked to before `meet`. `on_lost` is called at the loss of one of them.
        """
        self.links = links
        self.rank = rank
        self.size = size
        self._epoch = epoch
        self._cards: Sequence[Card] = ()
        self._peers: Sequence[bytes] = ()
        self.others: Collection[bytes] = ()
        self._on_lost = on_lost
        #: Why nothing can be waited for any more.
        self._over: TransportError | None = None
        #: The first end of another one's link.
        self._lost: str | None = None
        self._gatherings = itertools.count()
        self._sums: dict[Group, int] = {}
        self._spare = SpareBuffers()
        #: Of those who have come, where this worker hosts the meeting.
        self._standings: dict[bytes, bytes] = {}
        links.enter(epoch, secret, self)

    # ---- meeting

    def meet(
        self, host: Card, near: Collection[int], word: bytes, check_newest: Callable[[], None]
    ) -> list[bytes]:
        """Return what all have to say, by rank, once all have come and this worker has links to the
        ranks `near`; each of two is near to the other. `host`: the card of the member that all tell
        that they have come; `word`: what this one says, the same to all.

        Raises TransportError; CalledOff where a newer meeting is wanted, as somebody else knows;
        and what `check_newest` raises, which is asked again and again until all have come.
        """
        card = self.links.card.text.encode()
        said = _WORD.pack(self.rank, len(card)) + card + word
        try:
            told = (
                self._host_meeting(said, check_newest)
                if host.identity == self.links.identity
                else self._come_to(host, said, check_newest)
            )
        except (Superseded, CalledOff):
            self.links.leave(self._epoch, Kind.CALLED_OFF)
            raise
        cards, words = [], []
        for standing in told:
            _, length = _WORD.unpack_from(standing)
            end = _WORD.size + length
            cards.append(_read_card(standing[_WORD.size : end]))
            words.append(standing[end:])
        self._connect(cards, near)
        return words

    def heard(self, peer: bytes, standing: bytes) -> None:
        self._standings[peer] = standing
        self.others = frozenset(self._standings) - {self.links.identity}

    def _host_meeting(self, said: bytes, check_newest: Callable[[], None]) -> list[bytes]:
        with self.links.lock:
            self.heard(self.links.identity, said)
        self._wait_wanted(lambda: len(self._standings) == self.size, check_newest)
        with self.links.lock:
            self._check_all_there()
            standings = sorted(self._standings.values())  # begin with the rank
            table = b"".join(_WORD.pack(0, len(each)) + each for each in standings)
            label = Label(Kind.TABLE, _MEETING, 0)
            sends = [self.links.send(each, label, memoryview(table)) for each in self.others]
        self.wait(lambda: all(send.done for send in sends), self.others)
        return standings

    def _come_to(self, host: Card, said: bytes, check_newest: Callable[[], None]) -> list[bytes]:
        with self.links.lock:
            self.others = frozenset({host.identity})
        self.links.connect([host])
        self._wait_wanted(lambda: self._called(host), check_newest)
        table = _Words()
        with self.links.lock:
            self._check()
            self.links.post(host.identity, Label(Kind.TABLE, _MEETING, 0), table)
            standing = memoryview(said)
            self.links.send(host.identity, Label(Kind.STANDING, 0, 0), standing)
        self._wait_wanted(table.is_there, check_newest)
        return _split(table.content)

    def _wait_wanted(self, done: Callable[[], bool], check_newest: Callable[[], None]) -> None:
        """Until `done`; nobody who has come may have left again."""

        def asked() -> bool:
            if done():
                return True
            self._check_all_there()
            return False

        while not self.links.wait(asked, time.monotonic() + _POLL_S):
            check_newest()

    def _check_all_there(self, *, but: Collection[Kind] = ()) -> None:
        """Nobody may have left, `but` in these ways."""
        if how := self.links.how_left(self.others).difference(but):
            self.left(Kind.CALLED_OFF if Kind.CALLED_OFF in how else Kind.GIVEN_UP)
        self._check()

    def _connect(self, cards: Sequence[Card], near: Collection[int]) -> None:
        """The one with the larger identity calls. One that is waited for in vain is called all the
        same: whoever has no way to the other learns it then."""
        own = self.links.identity
        with self.links.lock:
            self._cards, self._peers = cards, tuple(card.identity for card in cards)
            self.others = frozenset(self._peers) - {own}
            self._check_all_there(but=[Kind.GOODBYE])
        missing = {peer for peer in near if not self.links.linked(self._peers[peer])}
        self.links.connect([cards[peer] for peer in missing if own > self._peers[peer]])
        patient_until = time.monotonic() + PATIENCE_S

        def asked() -> bool:
            if self._linked(missing):
                return True
            self._check_all_there()
            return False

        while missing and not self.links.wait(asked, time.monotonic() + _POLL_S):
            if time.monotonic() > patient_until:
                self.links.connect([cards[peer] for peer in missing])

    def _linked(self, missing: set[int]) -> bool:
        self._check()
        for peer in tuple(missing):
            if self._called(self._cards[peer], peer):
                missing.discard(peer)
        return not missing

    def _called(self, card: Card, rank: int | None = None) -> bool:
        """Whether there is a link to that one. Raises TransportError where a call has failed."""
        if self.links.linked(card.identity):
            return True
        call = self.links.call_to(card.identity)
        if call is not None and (problem := call.problem) is not None:
            if isinstance(problem, TimeoutError) or problem.errno in NO_WAY:
                raise Unreached(f"{card.host} does not answer: {problem}", rank)
            raise TransportError(f"{card.host} does not take a connection: {problem}")
        return False

    def _reach(self, peer: int) -> bytes:
        """The identity of `peer`, to whom there is a link from now on."""
        identity = self._peers[peer]
        self._check()
        if not self.links.linked(identity):
            self._check_there(identity)
            self.links.connect([self._cards[peer]])
            missing = {peer}
            self.links.wait(lambda: self._linked(missing))
        return identity

    # ---- messages

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        identity = self._reach(peer)
        content = tensor.contiguous()
        with self.links.lock:
            self._check()
            frame = self.links.send(identity, Label(Kind.MESSAGE, tag, 0), bytes_of(content))
        return _Departure(self, content, identity, frame)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        """Into `tensor`, which is contiguous; of those with the same tag the oldest comes first."""
        identity = self._reach(peer)
        with self.links.lock:
            self._check()
            arrival = _Arrival(self, tensor, identity)
            self.links.post(identity, Label(Kind.MESSAGE, tag, 0), arrival)
        return arrival

    # ---- sums

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> Pending:
        if len(group) == 1 or not tensor.numel():
            return _Done()
        for peer in group:
            if peer != self.rank:
                self._reach(peer)
        turn = self._sums.get(group, 0)
        self._sums[group] = turn + 1
        members = tuple(self._peers[peer] for peer in group)
        with self.links.lock:
            self._check()
            reduction = LinkSum(
                self.links,
                tensor,
                members,
                group.index(self.rank),
                _key_of(group, turn),
                turn,
                self._spare,
            )
        return _Reducing(self, reduction)

    # ---- gatherings

    def gather(self, word: bytes) -> list[bytes]:
        """What all have to say, by rank. All call this in the same order."""
        key = next(self._gatherings)
        if self.size == 1:
            return [word]
        up = Label(Kind.WORDS, key, 0)
        below = _below(self.rank, self.size)
        told = [_WORD.pack(self.rank, len(word)) + word]
        told += self._hear(below, up)
        table, down = b"".join(told), Label(Kind.TABLE, key, 0)
        if self.rank:
            above = [_above(self.rank)]
            # Who tells what all have said has heard what was said to it.
            self._say(above, up, table)
            (table,) = self._hear(above, down)
        if below:
            self._await_gone(below, self._say(below, down, table))
        return _read_table(table, self.size)

    def _hear(self, peers: Collection[int], label: Label) -> list[bytes]:
        identities = [self._reach(peer) for peer in peers]
        words = [_Words() for _ in peers]
        with self.links.lock:
            self._check()  # else what waits here after an abort takes the next meeting's words
            for identity, each in zip(identities, words, strict=True):
                self.links.post(identity, label, each)
        for identity, each in zip(identities, words, strict=True):
            self.wait(each.is_there, [identity])
        return [bytes(each.content) for each in words]

    def _say(self, peers: Collection[int], label: Label, table: bytes) -> list[Outgoing]:
        identities = [self._reach(peer) for peer in peers]
        with self.links.lock:
            self._check()
            return [self.links.send(each, label, memoryview(table)) for each in identities]

    def _await_gone(self, peers: Collection[int], sends: Sequence[Outgoing]) -> None:
        identities = [self._peers[peer] for peer in peers]
        self.wait(lambda: all(send.done for send in sends), identities)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = []
        for told in self.gather(bytes(bytes_of(tensor.contiguous()))):
            part = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            bytes_of(part)[:] = told
            parts.append(part)
        return parts

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        word = bytes(bytes_of(tensor)) if self.rank == root else b""
        bytes_of(tensor)[:] = self.gather(word)[root]

    def complete(self) -> None:
        """Nothing: waits end with the operation."""

    # ---- ends

    def wait(self, done: Callable[[], bool], owing: Collection[bytes] = ()) -> None:
        """Until `done`, for which something has to come from those in `owing`, which may change
        meanwhile, or to be taken by them. Raises TransportError."""

        def asked() -> bool:
            if done():
                return True
            self._check()
            for peer in owing:
                self._check_there(peer)
            return False

        self.links.wait(asked)

    def _check(self) -> None:
        if self._over is not None:
            raise type(self._over)(*self._over.args)  # each raise has a traceback of its own

    def _check_there(self, peer: bytes) -> None:
        if self.links.has_left(peer):
            raise TransportError(_HAS_LEFT)

    def left(self, kind: Kind) -> None:
        if kind == Kind.CALLED_OFF:
            self._end(CalledOff("the meeting was called off"))
        else:
            self._end(TransportError(_HAS_LEFT))

    def lost(self, why: str) -> None:
        self._lost = self._lost or why
        self._end(TransportError(why))

    def _end(self, why: TransportError) -> None:
        self._over = self._over or why

    def tell_lost(self) -> None:
        assert self._lost is not None, "only a loss is told"
        self._on_lost(self._lost)

    def silent(self) -> list[int]:
        """Ranks of those whose hosts give no sign of life."""
        silent = self.links.silent()
        return [rank for rank, peer in enumerate(self._peers) if peer in silent]

    def stand_down(self) -> None:
        """The end of this worker is no loss to the others any more, nor theirs to it."""
        self.links.leave(self._epoch, Kind.GOODBYE)

    def abort(self) -> None:
        with self.links.lock:
            self._end(TransportError("an operation was given up"))
            self.links.leave(self._epoch, Kind.GIVEN_UP)
            self.links.wake()

    def dispose(self) -> None:
        """Leave in order. The links stay, for the next meeting."""
        self.stand_down()


def _above(rank: int) -> int:
    return (rank - 1) // _HANDS


def _below(rank: int, size: int) -> range:
    first = rank * _HANDS + 1
    return range(first, max(first, min(first + _HANDS, size)))


def tree_neighbours(rank: int, size: int) -> set[int]:
    """With whom a worker exchanges what is gathered from all."""
    return {*_below(rank, size), *([_above(rank)] if rank else [])}


def ring_neighbours(rank: int, size: int) -> set[int]:
    return {(rank - 1) % size, (rank + 1) % size}


def epoch_of(generation: Generation, meeting: int) -> int:
    """Meetings of a worker follow each other: those of a generation, and of the generations."""
    return generation << _MEETING_BITS | meeting


def secret_of(prefix: str) -> bytes:
    """32 bytes that only the workers of a meeting have, from what the master tells them alone."""
    return hmac.digest(prefix.encode(), b"links", "sha256")


def _key_of(group: Group, turn: int) -> int:
    """Tells apart the sums of a meeting; 63 bits of a digest, so none are the same by chance."""
    text = f"{turn}:{','.join(map(str, group))}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1


def _read_table(table: bytes, size: int) -> list[bytes]:
    words: list[bytes] = [b""] * size
    for rank, word in _entries(table):
        words[rank] = word
    return words


def _split(table: bytes | bytearray) -> list[bytes]:
    return [word for _, word in _entries(table)]


def _entries(table: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(table):
        rank, length = _WORD.unpack_from(table, at)
        at += _WORD.size
        yield rank, bytes(table[at : at + length])
        at += length


def _read_card(text: bytes) -> Card:
    try:
        return Card.read(text.decode())
    except ValueError as error:
        raise TransportError(f"a member's card cannot be read: {error}") from None
