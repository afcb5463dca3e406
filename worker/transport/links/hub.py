"""All links of one worker process, for as long as it lives.

A thread of the hub's own watches every link for its end, greets callers, and reads and writes while
the training thread computes, where there is something that should not wait. A training thread that
waits does the reading and writing itself, so that a message is handled by the thread that wants it.
Meetings follow each other on the same links: frames say which one they belong to, and to enter the
next or to give one up closes nothing. Must not know programs, layers or plans.
"""

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Protocol

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import InvariantViolation, TransportError
from oobleck.worker.transport.links.door import Card, Dial, Door
from oobleck.worker.transport.links.frame import Kind, Label
from oobleck.worker.transport.links.greeting import IDENTITY_BYTES
from oobleck.worker.transport.links.link import Incoming, Link, Outgoing
from oobleck.worker.transport.links.sealing import Seals
from oobleck.worker.transport.links.silence import NO_WAY, Patience, answers

#: How often the clock is looked at while callers or calls are under way.
_TICK_S = 0.05
_READ = select.EPOLLIN
_END = select.EPOLLRDHUP
_NOTHING = memoryview(b"")
_GONE = "a peer is gone"
#: Without whom nothing of the meeting can go on. Who takes leave in order has done its part.
_ENDING = (Kind.GIVEN_UP, Kind.CALLED_OFF)
#: Members that come to a later meeting than the present one are remembered, so many of each.
_MOST_AHEAD = 4096


class Member(Protocol):
    """Who takes part in the present meeting, by way of the links."""

    #: The identities of all others in it.
    others: Collection[bytes]

    def heard(self, peer: bytes, standing: bytes) -> None:
        """`peer` has come to the meeting. Called with the links' lock held."""

    def left(self, kind: Kind) -> None:
        """Another member has given the meeting up or called it off: whatever waits ends, else those
        who are left might wait for each other for ever. Called with the links' lock held."""

    def lost(self, why: str) -> None:
        """The link to another member has ended: whatever waits ends. Called with the links' lock
        held."""

    def tell_lost(self) -> None:
        """Called soon after a link's end, unless the meeting was left meanwhile; from a thread of
        its own, which may take its time, and without the lock."""


class Feeding(Protocol):
    """Who prepares a meeting that is still to come."""

    epoch: int

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        """Where a frame that `peer` sends ahead of it goes; None: it is not wanted. Called with the
        links' lock held."""

    def cut(self, peer: bytes) -> None:
        """The link to `peer` has ended, and what was on it is gone. Called with the links' lock
        held."""


class Links:
    """One listener, and at most one link to each other process."""

    def __init__(self, address: str, *, silence_s: float, sealed: bool = True) -> None:
        """Listen at `address`. `silence_s`: without a sign of life for so long a peer's host is
        gone; `sealed`: what goes over all links is, else where the other end wants it. Raises
        OSError."""
        self.lock = threading.RLock()
        self.identity = secrets.token_bytes(IDENTITY_BYTES)
        self._patience = Patience(silence_s)
        self._links: dict[bytes, Link] = {}
        self._by_descriptor: dict[int, Link] = {}
        #: Of all links, for whoever reads and writes now; and for the hub's own thread, which is
        #: shown that one where it shall read and write.
        self._traffic = select.epoll()
        self._events = select.epoll()
        self._door = Door(
            address, self.identity, self._events, self._links.get, self._open, sealed=sealed
        )
        self.card: Card = self._door.card
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._own_bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._traffic.register(self._bell, _READ)
        self._events.register(self._own_bell, _READ)
        self._events.register(self._traffic, 0)
        self._shown = False
        #: Whether the training thread reads and writes.
        self._taken = False
        #: Operations that should go on while the training thread computes.
        self._pressing = 0
        #: Links on which something waits until the kernel takes it.
        self._blocked: set[int] = set()
        self._epoch = 0
        self._member: Member | None = None
        self._feeding: Feeding | None = None
        #: Who has left the present meeting, and how; and how this worker has, if so.
        self._left: dict[bytes, int] = {}
        self._leaving: Kind | None = None
        #: What those have said who have come to a later one, by epoch and then by who they are.
        self._ahead: dict[int, dict[bytes, bytes]] = {}
        #: How those have left who have left a later one already, by epoch as well.
        self._left_ahead: dict[int, dict[bytes, int]] = {}
        self._to_tell: Member | None = None
        #: When the hosts' signs of life are looked at next; who is being asked for one; and who was
        #: asked in vain.
        self._next_look = 0.0
        self._asked: set[bytes] = set()
        self._unanswered: set[bytes] = set()
        self._closed = False
        #: What nobody is to go on after, as it has ended the hub's own thread.
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="links", daemon=True)
        self._thread.start()

    # ---- meetings

    def enter(self, epoch: int, secret: bytes, member: Member) -> None:
        """Take part in the meeting `epoch`, which is later than all before; nothing of those is
        wanted any more. `secret` lets others in."""
        with self.lock:
            self._check_sound()
            assert epoch > self._epoch, "meetings follow each other"
            self._epoch = epoch
            self._member = member
            self._to_tell = None
            self._left = self._left_ahead.pop(epoch, {})
            self._left_ahead = {e: left for e, left in self._left_ahead.items() if e > epoch}
            self._leaving = None
            self._unanswered.clear()
            for link in self._links.values():
                link.raise_floor(epoch)
            self._pressing = self._feeding is not None
            self._door.admit(epoch, secret)
            ahead = self._ahead.pop(epoch, {})
            self._ahead = {later: said for later, said in self._ahead.items() if later > epoch}
            for peer, standing in ahead.items():
                member.heard(peer, standing)
            self._arm()

    def leave(self, epoch: int, kind: Kind) -> None:
        """Tell the others of `epoch` that this worker leaves it, in order or not.

        Whoever takes part in it here is told of nothing any more. May be repeated, and changes
        nothing where a later meeting has begun.
        """
        with self.lock:
            if epoch != self._epoch or self._member is None:
                return
            self._leaving = kind
            if kind != Kind.GOODBYE:
                for each in self._links.values():
                    each.raise_floor(epoch + 1)
                self._pressing = self._feeding is not None
            self._member = self._to_tell = None
            # All, since the others of a meeting may not be known yet; to the rest it says nothing.
            for link in list(self._links.values()):
                self._write(link, epoch, Label(kind, 0, 0), _NOTHING)
            self._arm()

    def connect(self, cards: Sequence[Card], epoch: int | None = None) -> None:
        """Begin to call those to whom there is no link, as one of the meeting `epoch` that is
        expected; None: of the present one."""
        with self.lock:
            for card in cards:
                if card.identity not in self._links:
                    self._door.dial(card, self._epoch if epoch is None else epoch)
            self._ring(self._own_bell)

    def expect(self, secret: bytes, feeding: Feeding) -> None:
        """Let in those of a meeting that comes after the present one too, until it is called off;
        what they send ahead of it goes to `feeding`, also while that meeting is the present one."""
        with self.lock:
            self._feeding = feeding
            self._door.expect(feeding.epoch, secret)
            self.press(+1)

    def call_off(self, feeding: Feeding) -> None:
        """Expect it no more. May be repeated."""
        with self.lock:
            if self._feeding is not feeding:
                return
            self._feeding = None
            self.press(-1)
            for link in self._links.values():
                link.stop_feeding(feeding.epoch)
            if feeding.epoch > self._epoch:
                self._door.call_off(feeding.epoch)
            self._arm()

    def _feeds(self, peer: bytes, epoch: int, label: Label) -> Incoming | None:
        feeding = self._feeding
        if feeding is None or epoch != feeding.epoch:
            return None
        return feeding.feed(peer, label)

    @property
    def peers(self) -> frozenset[bytes]:
        """The identities of those to whom there is a link."""
        with self.lock:
            return frozenset(self._links)

    def linked(self, peer: bytes) -> bool:
        return peer in self._links

    def call_to(self, peer: bytes) -> Dial | None:
        """The call of this process's own that is under way, or has failed."""
        return self._door.calls.get(peer)

    # ---- frames; all with the lock held

    def send(self, peer: bytes, label: Label, content: memoryview) -> Outgoing:
        """Raises TransportError when there is no link."""
        return self._write(self._link(peer), self._epoch, label, content)

    def send_ahead(
        self, feeding: Feeding, peer: bytes, label: Label, content: memoryview
    ) -> Outgoing:
        """For the meeting that is prepared. Raises TransportError when there is no link."""
        return self._write(self._link(peer), feeding.epoch, label, content)

    def post(self, peer: bytes, label: Label, incoming: Incoming) -> None:
        self._link(peer).post(label, incoming)

    def _link(self, peer: bytes) -> Link:
        self._check_sound()
        try:
            return self._links[peer]
        except KeyError:
            raise TransportError(_GONE) from None

    def press(self, change: int) -> None:
        """So many operations more should go on while the training thread computes."""
        self._pressing += change
        self._arm()

    def _write(self, link: Link, epoch: int, label: Label, content: memoryview) -> Outgoing:
        frame = link.send(epoch, label, content)
        self._poll_for(link)
        return frame

    def _poll_for(self, link: Link) -> None:
        wanted = _READ | _END | (select.EPOLLOUT if link.blocked else 0)
        if wanted == link.polled_for:
            return
        link.polled_for = wanted
        descriptor = link.socket.fileno()
        self._traffic.modify(descriptor, wanted)
        if link.blocked:
            self._blocked.add(descriptor)
        else:
            self._blocked.discard(descriptor)
        self._arm()

    def _arm(self) -> None:
        """Have the hub's own thread read and write where nobody else does, and somebody should."""
        shown = not self._taken and bool(self._pressing or self._blocked)
        if shown != self._shown and not self._closed:
            self._shown = shown
            self._events.modify(self._traffic, _READ if shown else 0)

    # ---- links

    def _open(
        self, peer: bytes, serial: int, connected: socket.socket, seals: Seals | None
    ) -> None:
        if (old := self._links.get(peer)) is not None:
            self._drop(old)
            if old.used_in >= self._epoch and peer not in self._left:
                # The other end was over before this one knew: frames have gone nowhere.
                self._lose(peer, "a peer has called again amid a meeting")
        link = Link(peer, serial, connected, partial(self._feeds, peer), seals)
        link.raise_floor(self._epoch)
        self._links[peer] = self._by_descriptor[connected.fileno()] = link
        link.polled_for = _READ | _END
        self._traffic.register(connected, link.polled_for)
        self._events.register(connected, _END)
        self._patience.watch(connected)
        if self._leaving is not None:  # whoever calls late would wait for this worker for ever
            self._write(link, self._epoch, Label(self._leaving, 0, 0), _NOTHING)
        self._ring(self._bell)

    def _drop(self, link: Link) -> None:
        descriptor = link.socket.fileno()
        del self._by_descriptor[descriptor]
        del self._links[link.peer]
        self._blocked.discard(descriptor)
        for poll in (self._traffic, self._events):
            poll.unregister(descriptor)
        link.socket.close()
        if self._feeding is not None:
            self._feeding.cut(link.peer)

    def _end(self, link: Link, why: OSError) -> None:
        """The connection is over."""
        if self._by_descriptor.get(link.socket.fileno()) is not link:
            return
        with contextlib.suppress(OSError):  # what it said last may be that it leaves
            link.read(partial(self._on_news, link))
        if self._by_descriptor.get(link.socket.fileno()) is not link:
            return
        self._drop(link)
        why = link.problem or why
        if isinstance(why, TimeoutError) or why.errno in NO_WAY:
            self._unanswered.add(link.peer)
        if link.peer not in self._left:
            self._lose(link.peer, str(why))

    def _lose(self, peer: bytes, why: str) -> None:
        member = self._member
        if member is None or peer not in member.others:
            return
        member.lost(why)
        self._to_tell = member
        self._ring(self._bell)
        self._ring(self._own_bell)

    def _on_news(self, link: Link, epoch: int, kind: int, content: bytes) -> None:
        if kind == Kind.STANDING and epoch > self._epoch:
            ahead = self._ahead.setdefault(epoch, {})
            if len(ahead) < _MOST_AHEAD:
                ahead[link.peer] = content
        elif epoch > self._epoch:
            left = self._left_ahead.setdefault(epoch, {})
            if len(left) < _MOST_AHEAD:
                left[link.peer] = kind
        if epoch != self._epoch:
            return
        member = self._member
        if kind != Kind.STANDING:
            self._left.setdefault(link.peer, kind)
            if member is not None and kind in _ENDING and link.peer in member.others:
                member.left(Kind(kind))
        elif member is not None:
            member.heard(link.peer, content)
        self._ring(self._bell)

    def has_left(self, peer: bytes) -> bool:
        """Whether nothing more comes from it in this meeting."""
        return peer in self._left

    def how_left(self, peers: Collection[bytes]) -> frozenset[Kind]:
        """In which ways some of them have left this meeting."""
        return frozenset(Kind(kind) for peer, kind in self._left.items() if peer in peers)

    # ---- traffic

    def wait(self, done: Callable[[], bool], until: float | None = None) -> bool:
        """Read and write until `done`, which is asked with the lock held and may raise; returns
        False where the clock is at `until` first. One thread waits at a time."""
        with self.lock:
            self._check_sound()
            if done():
                return True
            assert not self._taken, "one thread waits at a time"
            self._taken = True
            self._arm()
            try:
                while not done():
                    left_s = None if until is None else until - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return False
                    self.lock.release()
                    try:
                        with pulse.WAITING:
                            ready = self._traffic.poll(left_s)
                    finally:
                        self.lock.acquire()
                    self._check_sound()
                    self._carry(ready)
            finally:
                self._taken = False
                self._arm()
        return True

    def _carry(self, ready: Sequence[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            if descriptor == self._bell:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif (link := self._by_descriptor.get(descriptor)) is not None:
                self._advance(link, events)

    def _advance(self, link: Link, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                link.write()
            if events & ~select.EPOLLOUT:
                link.read(partial(self._on_news, link))
        except BlockingIOError:
            pass
        except OSError as error:
            self._end(link, error)
            return
        self._poll_for(link)

    def _ring(self, bell: int) -> None:
        if not self._closed:
            os.eventfd_write(bell, 1)

    def wake(self) -> None:
        """Have whoever waits look whether it is done; from any thread."""
        with self.lock:
            self._ring(self._bell)

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Nobody else sees it: whoever uses the links, now or later, raises it."""
        with self.lock:
            self._failure = error
            self._ring(self._bell)

    def _check_sound(self) -> None:
        if self._failure is not None:
            raise InvariantViolation(f"the links failed: {self._failure!r}")

    def _turn(self) -> bool:
        """Do what there is to do; whether there will be more."""
        wait_s = _TICK_S if self._door.busy else float(self._patience.every_s)
        ready = self._events.poll(wait_s)
        with self.lock:
            if self._closed:
                return False
            for descriptor, events in ready:
                self._attend(descriptor, events)
            if self._door.busy:
                self._door.tick()
                self._ring(self._bell)
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + self._patience.every_s
                self._look_for_silence()
            told, self._to_tell = self._to_tell, None
            if told is not None:
                threading.Thread(
                    target=self._tell_lost, args=(told,), name="loss", daemon=True
                ).start()
        return True

    def _tell_lost(self, member: Member) -> None:
        try:
            with self.lock:
                if member is not self._member:
                    return
            member.tell_lost()
        except BaseException as error:
            self._fail(error)
            raise

    def _attend(self, descriptor: int, events: int) -> None:
        if descriptor == self._own_bell:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._own_bell)
        elif descriptor == self._traffic.fileno():
            if not self._taken:
                self._carry(self._traffic.poll(0))
        elif (link := self._by_descriptor.get(descriptor)) is not None:
            self._advance(link, events)
            self._ring(self._bell)
        elif descriptor in self._door:
            self._door.hear(descriptor)
            self._ring(self._bell)

    # ---- silence

    def _look_for_silence(self) -> None:
        for link in self._members():
            if link.peer not in self._asked and self._patience.is_doubtful(link.socket):
                self._asked.add(link.peer)
                threading.Thread(target=self._ask, args=(link,), name="ask", daemon=True).start()

    def _ask(self, link: Link) -> None:
        """A host that is silent is asked for one more connection."""
        answered = answers(link.socket)
        with self.lock:
            self._asked.discard(link.peer)
            if not answered and self._links.get(link.peer) is link:
                self._unanswered.add(link.peer)
                silence_s = self._patience.silence_s
                self._lose(link.peer, f"a peer's host does not answer for {silence_s:.0f} s")

    def _members(self) -> Sequence[Link]:
        member = self._member
        if member is None:
            return ()
        return [self._links[peer] for peer in member.others if peer in self._links]

    def silent(self) -> set[bytes]:
        """Members of this meeting whose hosts give no sign of life."""
        with self.lock:
            members = self._members()
            return self._unanswered | {
                link.peer for link in members if self._patience.is_silent(link.socket)
            }

    # ---- end

    def close(self) -> None:
        """Close all; nobody uses the links any more. Raises InvariantViolation if they failed."""
        with self.lock:
            if self._closed:
                return
            self._ring(self._own_bell)
            self._closed = True
        self._thread.join()
        with self.lock:
            self._close_all()
            self._check_sound()

    def _close_all(self) -> None:
        for link in list(self._by_descriptor.values()):
            self._drop(link)
        self._door.close()
        self._traffic.close()
        self._events.close()
        os.close(self._bell)
        os.close(self._own_bell)
