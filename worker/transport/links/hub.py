"""Links of one worker process, over its whole life.

Meetings follow each other on the same links: frames carry the number of their meeting, and entering
or giving up one closes nothing. `traffic` owns reading and writing. Must not know programs, layers
or plans.
"""

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Protocol

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.attendance import Attendance
from oobleck.worker.transport.links.calls import Card, Dial
from oobleck.worker.transport.links.door import Door
from oobleck.worker.transport.links.greeting import IDENTITY_BYTES, Seals
from oobleck.worker.transport.links.link import MOST_EARLY_BYTES, Incoming, Link, Outgoing
from oobleck.worker.transport.links.silence import Watch
from oobleck.worker.transport.links.traffic import Traffic
from oobleck.worker.transport.links.wire import Kind, Label

#: Interval of looking at the clock while callers or calls are under way.
_TICK_S = 0.05
#: The same while background frames wait for little traffic.
_BACKGROUND_TICK_S = 0.002
#: Time that a link to a process outside this worker's meeting stays: it may be in the next.
OUTSIDE_S = 30.0
#: Interval of looking for such links.
_LOOK_S = 1.0
_NOTHING = memoryview(b"")
_GONE = "a peer is gone"
_ELSEWHERE = "a member has another card than the link to it"
#: Departures after which the meeting cannot continue. A departure in order is harmless: that member
#: has done its part.
_ENDING = (Kind.GIVEN_UP, Kind.CALLED_OFF)


class Member(Protocol):
    """Participant of the present meeting, as the links see it."""

    #: Identities of all others in it.
    others: Collection[bytes]

    def heard(self, peer: bytes, standing: bytes) -> None:
        """Note that `peer` has entered the meeting. Called with the links' lock held."""

    def left(self, kind: Kind, peer: bytes = b"") -> None:
        """End all waits: another member has given the meeting up or called it off, and the
        remaining ones might wait for each other for ever. Called with the links' lock held."""

    def lost(self, peer: bytes, why: str) -> None:
        """End all waits: the link to `peer`, another member, has ended. Called with the links' lock
        held."""

    def tell_lost(self) -> None:
        """Report a loss, soon after a link's end, unless the meeting was left meanwhile. Called
        without the lock from a thread of its own, so it may take time."""


class Feeding(Protocol):
    """Preparer of a future meeting."""

    epoch: int

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        """Return the place for a frame that `peer` sends ahead of the meeting; None if it is not
        wanted. Called with the links' lock held."""

    def cut(self, peer: bytes) -> None:
        """Note that the link to `peer` has ended, and its frames are lost. Called with the links'
        lock held."""


class Links:
    """Listener of this process, and at most one link to each other process."""

    def __init__(
        self,
        address: str,
        *,
        silence_s: float,
        sealed: bool = True,
        most_early_bytes: int = MOST_EARLY_BYTES,
    ) -> None:
        """Listen at `address`. Raises OSError.

        `silence_s`: silence after which a peer's host is gone; `sealed`: all links are sealed, else
        those whose other end wants it; `most_early_bytes`: most bytes, per link, of frames of the
        present meeting that are not waited for yet.
        """
        self.lock = threading.RLock()
        self.identity = secrets.token_bytes(IDENTITY_BYTES)
        self._links: dict[bytes, Link] = {}
        self._most_early_bytes = most_early_bytes
        self._traffic = Traffic(self, self.lock)
        self._watch = Watch(silence_s, self.lock, self._members, self._lose_unanswered)
        self._door = Door(
            address, self.identity, self._traffic.events, self._links.get, self._open, sealed=sealed
        )
        self.card: Card = self._door.card
        self._epoch = 0
        self._member: Member | None = None
        self._feeding: Feeding | None = None
        #: Secret of the meeting in preparation.
        self._feeding_secret = b""
        self._attendance = Attendance()
        #: Digests of the present members' cards, once they are known.
        self._places: dict[bytes, bytes] = {}
        #: Time (monotonic clock) of the next look for outside links.
        self._next_look = 0.0
        #: Kind of this worker's departure from the present meeting, if any.
        self._leaving: Kind | None = None
        self._to_tell: Member | None = None
        self._traffic.thread.start()

    # ---- meetings

    def enter(self, epoch: int, secret: bytes, member: Member) -> None:
        """Take part in the meeting `epoch`, which is later than all before; frames of those are no
        longer wanted. `secret` admits the others."""
        with self.lock:
            self._traffic.check_sound()
            assert epoch > self._epoch, "meetings follow each other"
            self._epoch = epoch
            self._member = member
            self._to_tell = None
            ahead = self._attendance.begin(epoch)
            self._places = {}
            self._leaving = None
            self._watch.begin()
            for link in self._links.values():
                link.raise_floor(epoch)
            self._traffic.press_anew(int(self._feeding is not None))
            self._door.admit(epoch, secret)
            for peer, standing in ahead.items():
                member.heard(peer, standing)
            self._traffic.arm()

    def leave(self, epoch: int, kind: Kind) -> None:
        """Tell the others of `epoch` that this worker leaves it, in order or not.

        The member here gets no further calls. May be repeated, and changes nothing if a later
        meeting has begun.
        """
        with self.lock:
            if epoch != self._epoch or self._member is None:
                return
            self._leaving = kind
            if kind != Kind.GOODBYE:
                for each in self._links.values():
                    each.raise_floor(epoch + 1)
                self._traffic.press_anew(int(self._feeding is not None))
            self._member = self._to_tell = None
            # To all links, since the others of a meeting may not be known yet; the rest ignore it.
            for link in list(self._links.values()):
                self._write(link, epoch, Label(kind, 0, 0), _NOTHING)
            self._traffic.arm()

    def favour(self, epoch: int, cards: Iterable[Card]) -> None:
        """Prefer callers from the hosts of these cards, members of that meeting, where strangers
        crowd the port."""
        with self.lock:
            self._door.favour(epoch, cards)

    def connect(self, cards: Sequence[Card], epoch: int | None = None) -> None:
        """Begin to call those without a link, for the expected meeting `epoch`; None: for the
        present one."""
        with self.lock:
            meeting = self._epoch if epoch is None else epoch
            self._door.favour(meeting, cards)
            for card in cards:
                if card.identity not in self._links:
                    self._door.dial(card, meeting)
            self._traffic.ring_own()

    def expect(self, secret: bytes, feeding: Feeding) -> None:
        """Accept members of a meeting after the present one too, until it is called off. Their
        frames ahead of it go to `feeding`, even once that meeting is the present one."""
        with self.lock:
            self._feeding, self._feeding_secret = feeding, secret
            self._door.expect(feeding.epoch, secret)
            self.press(+1)

    def call_off(self, feeding: Feeding) -> None:
        """Stop expecting that meeting. May be repeated."""
        with self.lock:
            if self._feeding is not feeding:
                return
            self._feeding = None
            self.press(-1)
            for link in self._links.values():
                link.stop_feeding(feeding.epoch)
                if link.outside_since is not None:
                    link.keep_out()  # it may have stayed only for that meeting
            if feeding.epoch > self._epoch:
                self._door.call_off(feeding.epoch)
            self._traffic.arm()

    def withdraw(self, feeding: Feeding, peer: bytes) -> None:
        """Drop the frames queued for `peer` ahead of the meeting that have not begun to be sent."""
        with self.lock:
            if (link := self._links.get(peer)) is not None:
                link.stop_feeding(feeding.epoch, (Kind.FEED,))
                self._traffic.poll_for(link)

    def _feeds(self, peer: bytes, epoch: int, label: Label) -> Incoming | None:
        feeding = self._feeding
        if feeding is None or epoch != feeding.epoch or not self._may_feed(self._links[peer]):
            return None
        return feeding.feed(peer, label)

    def _may_feed(self, link: Link) -> bool:
        """Return whether the other end has proven that it belongs to the meeting in preparation.
        Links outlive meetings, so it may be in no later plan."""
        assert self._feeding is not None, "a meeting is prepared"
        epoch = self._feeding.epoch
        if link.proven_for != epoch and link.claim is not None:
            of, to = link.peer, self.identity
            proof = greeting.prove_member(self._feeding_secret, epoch, of, to)
            if link.claim[0] == epoch and hmac.compare_digest(link.claim[1], proof):
                link.proven_for = epoch
        return link.proven_for == epoch

    @property
    def peers(self) -> frozenset[bytes]:
        """Identities of linked processes."""
        with self.lock:
            return frozenset(self._links)

    def linked(self, peer: bytes) -> bool:
        return peer in self._links

    def call_to(self, peer: bytes) -> Dial | None:
        """Return this process's call that is under way, or has failed."""
        return self._door.call_to(peer)

    # ---- frames; all with the lock held

    def send(self, peer: bytes, label: Label, *content: memoryview) -> Outgoing:
        """Send a frame to `peer`. Raises TransportError when there is no link."""
        return self._write(self._link(peer), self._epoch, label, *content)

    def send_ahead(
        self, feeding: Feeding, peer: bytes, label: Label, content: memoryview
    ) -> Outgoing:
        """Send a frame for the meeting in preparation. Raises TransportError when there is
        no link."""
        link, epoch = self._link(peer), feeding.epoch
        if link.proved_for != epoch:
            link.proved_for = epoch
            proof = greeting.prove_member(self._feeding_secret, epoch, self.identity, peer)
            self._write(link, epoch, Label(Kind.PROOF, 0, 0), memoryview(proof))
        return self._write(link, epoch, label, content)

    def keep_to(self, members: Collection[Card]) -> None:
        """Accept only `members` as members of the present meeting. Raises TransportError where the
        greeting of one was another card's."""
        self._places = {card.identity: card.digest for card in members}
        self._door.favour(self._epoch, members)
        for peer, link in self._links.items():
            if peer not in self._places:
                link.keep_out()
            elif link.place != self._places[peer]:
                raise TransportError(_ELSEWHERE)

    def post(self, peer: bytes, label: Label, incoming: Incoming) -> None:
        """Direct the peer's next frame of the present meeting with `label` there. Raises
        TransportError when there is no link."""
        link = self._link(peer)
        try:
            link.post(label, incoming)
        except OSError as error:  # an early frame was refused
            self.ended(link, error)

    def _link(self, peer: bytes) -> Link:
        self._traffic.check_sound()
        try:
            return self._links[peer]
        except KeyError:
            raise TransportError(_GONE) from None

    def press(self, change: int) -> None:
        """Add `change` to the number of operations that the links' own thread carries on while the
        training thread computes."""
        self._traffic.press(change)

    def _write(self, link: Link, epoch: int, label: Label, *content: memoryview) -> Outgoing:
        frame = link.send(epoch, label, *content)
        self._traffic.poll_for(link)
        return frame

    # ---- links

    def _open(
        self,
        peer: bytes,
        place: bytes,
        serial: int,
        connected: socket.socket,
        seals: Seals | None,
    ) -> None:
        if self._places.get(peer, place) != place:
            raise PermissionError(_ELSEWHERE)
        if (old := self._links.get(peer)) is not None:
            self._drop(old)
            if old.used_in >= self._epoch and peer not in self._attendance.left:
                # The peer had closed the old link before this end noticed, so frames were lost.
                self._lose(peer, "a peer has called again amid a meeting")
        feeds = partial(self._feeds, peer)
        link = Link(peer, place, serial, connected, feeds, seals, self._most_early_bytes)
        link.raise_floor(self._epoch)
        if self._places and peer not in self._places:
            link.keep_out()
        self._traffic.add(link)
        self._links[peer] = link
        self._watch.add(link)
        if self._leaving is not None:  # say so to a late caller, which would wait for ever
            self._write(link, self._epoch, Label(self._leaving, 0, 0), _NOTHING)
        self._traffic.ring()

    def _drop(self, link: Link) -> None:
        del self._links[link.peer]
        self._traffic.drop(link)
        if self._feeding is not None:
            self._feeding.cut(link.peer)

    def ended(self, link: Link, why: OSError) -> None:
        """Drop the link, whose connection is over. Called with the lock held."""
        if not self._traffic.holds(link):
            return
        with contextlib.suppress(OSError):  # its last word may be its departure
            self._traffic.read(link)
        if not self._traffic.holds(link):
            return
        self._drop(link)
        why = link.problem or why
        self._watch.ended(link, why)
        if link.peer not in self._attendance.left:
            self._lose(link.peer, str(why))

    def _close_outside(self) -> None:
        """Close links to processes in no present meeting, nor in one that is prepared.

        Wait before: the process may have entered a later meeting that this worker is about to
        learn of, and would report the end of its link as a loss.
        """
        now = time.monotonic()
        if self._feeding is not None or now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        for link in list(self._links.values()):
            may_follow = link.used_in > self._epoch or self._attendance.is_ahead(link.peer)
            patience_s = OUTSIDE_S * (2 if may_follow else 1)
            if link.outside_since is not None and link.outside_since + patience_s < now:
                self._drop(link)

    def _lose(self, peer: bytes, why: str) -> None:
        member = self._member
        if member is None or peer not in member.others:
            return
        member.lost(peer, why)
        self._to_tell = member
        self._traffic.ring()
        self._traffic.ring_own()

    def _lose_unanswered(self, link: Link, why: str) -> bool:
        if not self._traffic.holds(link):
            return False
        self._lose(link.peer, why)
        return True

    def on_news(self, link: Link, epoch: int, kind: int, content: bytes) -> None:
        """Handle a peer's arrival at a meeting, departure, or proof that it may feed. Called with
        the lock held."""
        if kind == Kind.PROOF:
            link.claim = epoch, content
            return
        if epoch > self._epoch:
            self._attendance.keep(link.peer, epoch, kind, content)
        if epoch != self._epoch:
            return
        member = self._member
        if kind != Kind.STANDING:
            self._attendance.left.setdefault(link.peer, kind)
            if member is not None and kind in _ENDING and link.peer in member.others:
                member.left(Kind(kind), link.peer)
        elif member is not None:
            member.heard(link.peer, content)
        self._traffic.ring()

    def has_left(self, peer: bytes) -> bool:
        """Return whether the peer has left this meeting, so that nothing more arrives from it."""
        return peer in self._attendance.left

    def how_left(self, peers: Collection[bytes]) -> frozenset[Kind]:
        """Return the kinds of departures of `peers` from this meeting."""
        left = self._attendance.left
        return frozenset(Kind(kind) for peer, kind in left.items() if peer in peers)

    def _members(self) -> Sequence[Link]:
        member = self._member
        if member is None:
            return ()
        return [self._links[peer] for peer in member.others if peer in self._links]

    def silent(self) -> set[bytes]:
        """Return the members of this meeting whose hosts give no sign of life."""
        with self.lock:
            return self._watch.silent()

    # ---- traffic

    def wait(self, done: Callable[[], bool], until: float | None = None) -> bool:
        """Read and write until `done`, which is called with the lock held and may raise. Return
        False if the clock reaches `until` first. One thread waits at a time."""
        return self._traffic.wait(done, until)

    def wake(self) -> None:
        """Wake the waiting thread to check its condition. Callable from any thread."""
        with self.lock:
            self._traffic.ring()

    def check_sound(self) -> None:
        """Raise InvariantViolation where the links' own thread has failed."""
        self._traffic.check_sound()

    def hear(self, descriptor: int) -> bool:
        """Handle events of a descriptor of the door. Called with the lock held."""
        return descriptor in self._door and self._door.hear(descriptor)

    def rest_s(self) -> float:
        """Return how long the links' own thread may sleep without events."""
        if self._traffic.holds_back:
            return _BACKGROUND_TICK_S
        return _TICK_S if self._door.busy else self._watch.every_s

    def tick(self) -> None:
        """Do due work: door, background frames, watch, outside links, losses to report. Called with
        the lock held."""
        if self._door.busy:
            self._door.tick()
        if self._door.calling:  # waits for a link check for a failed call
            self._traffic.ring()
        self._traffic.write_background()
        self._watch.look()
        self._close_outside()
        member, self._to_tell = self._to_tell, None
        if member is not None:
            threading.Thread(
                target=self._tell_lost, args=(member,), name="loss", daemon=True
            ).start()

    def _tell_lost(self, member: Member) -> None:
        try:
            with self.lock:
                if member is not self._member:
                    return
            member.tell_lost()
        except BaseException as error:
            self._traffic.fail(error)
            raise

    # ---- end

    def close(self) -> None:
        """Close everything; the links are no longer used. Raises InvariantViolation if
        they failed.
        """
        with self.lock:
            if self._traffic.closed:
                return
            self._traffic.stop()
        self._traffic.thread.join()
        with self.lock:
            for link in list(self._links.values()):
                self._drop(link)
            self._door.close()
            self._traffic.close()
            self._traffic.check_sound()
