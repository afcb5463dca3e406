"""Meetings as one worker takes part in them: it arrives, exchanges a word with all, and leaves.

The words are gathered and distributed along a tree: each member sends its own word and those of the
members below it to the one above. The root then sends all words down the tree. So N workers need
2(N - 1) messages, and no worker sends more than 65. If only the root's card is known, all send to
the root. Must not know the meaning of words.
"""

import hmac
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from oobleck.core.ids import Generation
from oobleck.worker.runtime.errors import CalledOff, Released, Superseded, TransportError, Unreached
from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.silence import NO_WAY
from oobleck.worker.transport.links.wire import Kind, Label
from oobleck.worker.transport.tree import Words, entry, place_of, words_of_all

_MEETING_BITS = 16
#: Number of the exchange of words; gatherings count from 0.
_MEETING = -1
#: Longest wait for another member's call.
PATIENCE_S = 5.0
#: Interval at which a wait for others' links checks whether it is still wanted.
_POLL_S = 0.05
#: Bytes of the card that follows.
_CARD = struct.Struct("!H")
#: Time after which all waits end once a member has given up.
_GRACE_S = 0.1

#: Called once with the reason, from another thread than the transport's user.
OnLost = Callable[[str], None]
#: Raises if the meeting is no longer wanted.
CheckNewest = Callable[[], None]


def nobody_asks(why: str) -> None:
    pass


class _Place(NamedTuple):
    """Place of a worker in the tree: the member to send its arrival to, and those that send theirs
    to it."""

    #: None: it is the root.
    above: Card | None
    #: None: the member above is the host, or there is none.
    above_rank: int | None
    #: Number of members below, and their identities as far as known.
    below_count: int
    below: frozenset[bytes]


class Meeting:
    """Use of this process's links by one meeting."""

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
        """Enter the meeting `epoch`, which admits its other members from now on.

        Messages are possible only after `meet`. `on_lost` is called at the loss of a member;
        `names`: their names for that, by identity.
        """
        self.links = links
        self.rank = rank
        self.size = size
        self.epoch = epoch
        self._secret = secret
        self._cards: Sequence[Card] = ()
        self._peers: Sequence[bytes] = ()
        #: Members that have arrived as far as this worker knows; in the end all.
        self.others: Collection[bytes] = frozenset()
        self._on_lost = on_lost
        self._names = names
        #: Reason why waits have ended.
        self._over: TransportError | None = None
        #: True if a member has given up, so that the meeting ends soon.
        self._ending = False
        #: First end of another member's link.
        self._lost: str | None = None
        #: Words of the members below, each with those below it.
        self._standings: dict[bytes, bytes] = {}
        links.enter(epoch, secret, self)

    # ---- coming

    def meet(
        self,
        host: Card,
        near: Collection[int],
        word: bytes,
        check_newest: CheckNewest,
        cards: Mapping[int, Card] | None = None,
    ) -> list[bytes]:
        """Return the words of all, by rank, once all have arrived and this worker has links to the
        ranks `near`; nearness is mutual.

        `host`: card of the member that is the root; `word`: this member's, the same to all;
        `cards`: those of all members by rank, if they are known, the same on all.

        Raises TransportError; CalledOff if another member wants a newer meeting; and the errors of
        `check_newest`, which is called repeatedly until all have arrived.
        """
        card = self.links.card.text.encode()
        own_entry = entry(self.rank, _CARD.pack(len(card)) + card + word)
        try:
            table = self._exchange(self._place(host, cards or {}), own_entry, check_newest)
        except (Superseded, CalledOff):
            self.links.leave(self.epoch, Kind.CALLED_OFF)
            raise
        met, words = [], []
        for each in words_of_all(table, self.size):
            if len(each) < _CARD.size:
                raise TransportError(f"a member has come with {len(each)} bytes")
            end = _CARD.size + _CARD.unpack_from(each)[0]
            met.append(Card.read(each[_CARD.size : end].decode(errors="replace")))
            words.append(each[end:])
        self._connect(met, near)
        return words

    def _place(self, host: Card, cards: Mapping[int, Card]) -> _Place:
        root = next((rank for rank, card in cards.items() if card.identity == host.identity), None)
        if root is None or len(cards) < self.size:
            if host.identity == self.links.identity:
                return _Place(None, None, self.size - 1, frozenset())
            return _Place(host, None, 0, frozenset())
        above, below = place_of(self.rank, self.size, root)
        identities = frozenset(cards[rank].identity for rank in below)
        if above is None:
            return _Place(None, None, len(below), identities)
        return _Place(cards[above], None if above == root else above, len(below), identities)

    def heard(self, peer: bytes, standing: bytes) -> None:
        proof, entries = standing[: greeting.PROOF_BYTES], standing[greeting.PROOF_BYTES :]
        own = self.links.identity
        if not hmac.compare_digest(proof, self._proof(peer, own, entries)):
            return  # the peer lacks the secret: its link is from an earlier meeting
        self._standings[peer] = entries
        self.others = frozenset({*self.others, peer})

    def _proof(self, of: bytes, to: bytes, entries: bytes) -> bytes:
        return greeting.prove_member(self._secret, self.epoch, of, to, entries)

    def _exchange(self, place: _Place, own_entry: bytes, check_newest: CheckNewest) -> bytes:
        """Exchange words, and return those of all."""
        above, label = place.above, Label(Kind.TABLE, _MEETING, 0)
        if above is not None:
            with self.links.lock:
                self.others = frozenset({*self.others, above.identity})
            self.links.connect([above])

        def all_below() -> bool:
            is_above_linked = above is None or self._called(above, place.above_rank)
            return is_above_linked and len(self._standings) == place.below_count

        self._wait_wanted(all_below, check_newest, place.below)
        words = Words()
        with self.links.lock:
            self._check_all_there()
            below = sorted(self._standings)
            table = own_entry + b"".join(self._standings.values())
            self._standings.clear()
            if above is not None:
                self.links.post(above.identity, label, words)
                message = self._proof(self.links.identity, above.identity, table) + table
                self.links.send(above.identity, Label(Kind.STANDING, 0, 0), memoryview(message))
        if above is not None:
            self._wait_wanted(words.is_there, check_newest, place.below)
            table = bytes(words.content)
        if below:
            with self.links.lock:
                self.check()
                sends = [self.links.send(each, label, memoryview(table)) for each in below]
            self.wait(lambda: all(send.done for send in sends), below)
        return table

    def _wait_wanted(
        self, done: Callable[[], bool], check_newest: CheckNewest, coming: Collection[bytes]
    ) -> None:
        """Wait until `done`. Raise TransportError if a worker that has arrived leaves, or one that
        is still `coming`."""

        def is_done() -> bool:
            if done():
                return True
            self._check_all_there(coming)
            return False

        while not self.links.wait(is_done, time.monotonic() + _POLL_S):
            check_newest()

    def _check_all_there(
        self, coming: Collection[bytes] = (), *, but: Collection[Kind] = ()
    ) -> None:
        """Raise TransportError if a worker has left, except in the ways of `but`."""
        how = self.links.how_left(self.others) | self.links.how_left(coming)
        if how := how.difference(but):
            self.left(Kind.CALLED_OFF if Kind.CALLED_OFF in how else Kind.GIVEN_UP)
        self.check()

    # ---- links to the others

    def _connect(self, cards: Sequence[Card], near: Collection[int]) -> None:
        """Connect to the ranks `near`. Of two workers the one with the larger identity calls. If
        its call does not arrive, the other one calls too, to detect an unreachable peer."""
        own = self.links.identity
        with self.links.lock:
            self._cards, self._peers = cards, tuple(card.identity for card in cards)
            self.others = frozenset(self._peers) - {own}
            self.links.keep_to(cards)
            # A member without work here may have left in order already.
            self._check_all_there(but=[Kind.GOODBYE])
        missing = {peer for peer in near if not self.links.linked(self._peers[peer])}
        self.links.connect([cards[peer] for peer in missing if own > self._peers[peer]])
        patient_until = time.monotonic() + PATIENCE_S

        def is_done() -> bool:
            if self._linked(missing):
                return True
            self._check_all_there(but=[Kind.GOODBYE])
            return False

        while missing and not self.links.wait(is_done, time.monotonic() + _POLL_S):
            if time.monotonic() > patient_until:
                self.links.connect([cards[peer] for peer in missing])

    def _linked(self, missing: set[int]) -> bool:
        self.check()
        for peer in tuple(missing):
            if self.links.has_left(self._peers[peer]) or self._called(self._cards[peer], peer):
                missing.discard(peer)
        return not missing

    def _called(self, card: Card, rank: int | None = None) -> bool:
        """Return whether there is a link to that process. Raises TransportError where a call has
        failed."""
        if self.links.linked(card.identity):
            return True
        call = self.links.call_to(card.identity)
        if call is None or call.epoch != self.epoch:  # another meeting's call proves nothing here
            return False
        if (problem := call.problem) is not None:
            if isinstance(problem, TimeoutError) or problem.errno in NO_WAY:
                raise Unreached(f"{card.host} does not answer: {problem}", rank)
            raise TransportError(f"{card.host} does not take a connection: {problem}")
        return False

    def identities(self, ranks: Iterable[int]) -> tuple[bytes, ...]:
        """Return the identities of the processes with these ranks."""
        return tuple(self._peers[rank] for rank in ranks)

    def reach(self, peer: int) -> bytes:
        """Return the identity of `peer`, after connecting to it if there is no link."""
        self.reach_all([peer])
        return self._peers[peer]

    def reach_all(self, peers: Iterable[int]) -> None:
        """Connect to each of `peers`. Peers without a link are called all at once."""
        self.check()
        called = [peer for peer in peers if not self.links.linked(self._peers[peer])]
        if not called:
            return
        self.check_there(called)
        self.links.connect([self._cards[peer] for peer in called])
        missing = set(called)
        self.links.wait(lambda: self._linked(missing))
        self.check_there(called)

    # ---- waiting

    def wait(self, done: Callable[[], bool], owing: Collection[bytes] = ()) -> None:
        """Wait until `done`. Raises TransportError, also if a peer in `owing` leaves: those that
        must still send or receive something. The collection may change meanwhile."""

        def is_done() -> bool:
            if done():
                return True
            self.check()
            for peer in owing:
                self._check_there(peer)
            return False

        self.links.wait(is_done)

    def check(self) -> None:
        if self._over is not None:
            raise type(self._over)(*self._over.args)  # each raise has a traceback of its own

    def _check_there(self, peer: bytes) -> None:
        if self.links.has_left(peer):
            raise self._left_by(peer)

    def _left_by(self, peer: bytes) -> TransportError:
        return TransportError(f"{self._name(peer)} has left")

    def check_there(self, peers: Iterable[int]) -> None:
        """Raise TransportError where the meeting is over, or one of them has left it."""
        self.links.check_sound()
        self.check()
        for peer in peers:
            self._check_there(self._peers[peer])

    def any_left(self, peers: Iterable[int]) -> bool:
        """Return whether one of `peers` has left the meeting."""
        return any(self.links.has_left(self._peers[peer]) for peer in peers)

    # ---- ends

    def left(self, kind: Kind, peer: bytes = b"") -> None:
        if kind == Kind.CALLED_OFF:
            self._end(CalledOff("the meeting was called off"))
        elif not self._peers:  # not all have arrived
            self._end(self._left_by(peer))
        elif not self._ending:
            self._ending = True
            # Wait a moment: frames that others sent before they knew of it may still arrive.
            timer = threading.Timer(_GRACE_S, self._end_late, (peer,))
            timer.daemon = True
            timer.start()

    def _end_late(self, peer: bytes) -> None:
        with self.links.lock:
            self._end(self._left_by(peer))
        self.links.wake()

    def lost(self, peer: bytes, why: str) -> None:
        reason = f"{self._name(peer)}: {why}"
        self._lost = self._lost or reason
        self._end(TransportError(reason))

    def _name(self, peer: bytes) -> str:
        if peer in self._peers:
            return self._names.get(peer, f"rank {self._peers.index(peer)}")
        return self._names.get(peer, "a peer")

    def _end(self, why: TransportError) -> None:
        self._over = self._over or why

    def tell_lost(self) -> None:
        assert self._lost is not None, "only a loss is reported"
        self._on_lost(self._lost)

    def silent(self) -> list[int]:
        """Return the ranks whose hosts give no sign of life."""
        silent = self.links.silent()
        return [rank for rank, peer in enumerate(self._peers) if peer in silent]

    def stand_down(self) -> None:
        """Leave the meeting. From now on no end of a link counts as a loss, here or at others."""
        self.links.leave(self.epoch, Kind.GOODBYE)

    def abort(self) -> None:
        with self.links.lock:
            self._end(Released("an operation was given up"))
            self.links.leave(self.epoch, Kind.GIVEN_UP)
            self.links.wake()

    def dispose(self) -> None:
        """Leave in order. The links stay, for the next meeting."""
        self.stand_down()


def epoch_of(generation: Generation, meeting: int) -> int:
    """Return the epoch of a meeting. A worker's meetings are ordered by generation, and within it
    by `meeting`."""
    return generation << _MEETING_BITS | meeting


def secret_of(prefix: str) -> bytes:
    """Return 32 bytes that only the workers of a meeting have, derived from the master's
    message."""
    return hmac.digest(prefix.encode(), b"links", "sha256")
