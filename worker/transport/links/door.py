"""Listener and incoming calls, from which links come about.

Callers are strangers until they have proven that they belong. Each has a few bytes of memory and a
limit of time. There is a limit on how many there may be, beyond which the oldest is dropped.
Callers whose first word is proven, and callers from a member's address, are counted apart. If
strangers come faster than they can be heard, the kernel lets in all members and a part of the rest.
Where two processes call each other at once, the call of the larger identity stands. No call here
blocks. Must not know what goes over a link."""

import contextlib
import logging
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from oobleck.host.ipc import port
from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.calls import AGAIN_S, FULL, MOST_SERIAL, Calls, Dial, Open
from oobleck.worker.transport.links.card import Card
from oobleck.worker.transport.links.greeting import Call
from oobleck.worker.transport.links.link import Link
from oobleck.worker.transport.links.sealing import Seals

#: Callers whose greeting is not complete, of each degree of trust.
MOST_CALLERS = 128
#: From a caller's connection until it has proven itself.
GREETING_LIMIT_S = 5.0
_BACKLOG = 1024
#: For so long, and so many, are accepted before others get their turn, and the lock. A thread that
#: computes in Python may take as long as that over each.
_TURN_S = 0.02
_TURN = 256
#: How often the clock is looked at.
_TICK_S = 0.05
#: So many waiting to be accepted after a turn: more come than are heard, and soon members' calls
#: would be among those that the kernel drops.
_CROWD = _BACKLOG // 4
#: The kernel lets in a smaller part of strangers as long as there is a crowd, so much later each
#: time, but never fewer than one of so many; and all again so long after the last crowd.
_SMALLER_S = 0.2
_FEWEST_ONE_OF = 1024
_CROWD_S = 10.0
#: `tcpi_unacked` of a listening socket in Linux' struct tcp_info: connections to accept.
_TCP_INFO = struct.Struct("=24xI")
#: How far callers are trusted: their first word is not proven yet, nor their address a member's.
_STRANGE, _NEAR, _PROVEN = range(3)

log = logging.getLogger(__name__)


class _Guest:
    """A caller whose greeting is not complete."""

    def __init__(self, caller: socket.socket, trust: int) -> None:
        self.socket = caller
        self.trust = trust
        self.until = time.monotonic() + GREETING_LIMIT_S
        self.said = bytearray()
        self.missing = greeting.CALL_BYTES
        self.call: Call | None = None
        #: This end's fresh key, and what was answered with it. None: nothing was.
        self.own: X25519PrivateKey | None = None
        self.answer = b""


class Door:
    """Listener of this process, with its guests and calls. Used with the links' lock held. `poll`
    is told of all descriptors; of those in the door, what it reports is handed to `hear`."""

    def __init__(
        self,
        address: str,
        identity: bytes,
        poll: select.epoll,
        link_to: Callable[[bytes], Link | None],
        opened: Open,
        *,
        sealed: bool,
    ) -> None:
        """`link_to`: the present link to a process, if there is one; `opened` takes a new one.
        `sealed`: all links are; else those are whose other end wants it."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._identity = identity
        self._poll = poll
        self._link_to = link_to
        self._opened = opened
        self._sealed = sealed
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        poll.register(self._listener, select.EPOLLIN)
        host, port = self._listener.getsockname()[:2]
        self.card = Card(identity, host, port)
        self._own_digest = self.card.digest
        #: Of the present meeting; and the secrets of that and of those that are expected.
        self._epoch = -1
        self._secrets: dict[int, bytes] = {}
        #: By their descriptors.
        self._guests: dict[int, _Guest] = {}
        #: All and only their descriptors, by how far they are trusted; the oldest first.
        self._trusted: tuple[dict[int, None], ...] = ({}, {}, {})
        #: How many links there have been to a process.
        self._serials: dict[bytes, int] = {}
        #: Where the members of the present meeting and of expected ones listen; and the addresses
        #: that processes with a link have called from, which may be others.
        self._members: dict[int, frozenset[str]] = {}
        self._callers: dict[bytes, str] = {}
        #: Both together.
        self._near: frozenset[str] = frozenset()
        #: Until then (monotonic clock) the kernel keeps most strangers out; 0: it lets all in.
        self._crowd_until = 0.0
        #: Of how many strangers' attempts one comes through then, and when fewer may.
        self._one_of = 1
        self._smaller_at = 0.0
        self._next_tick = 0.0
        #: Where accepting failed for want of descriptors: not again before.
        self._full_until = 0.0
        self._calls = Calls(
            self.card, poll, self._secret_of, self._show_out_oldest, self._open, sealed=sealed
        )

    def __contains__(self, descriptor: int) -> bool:
        return (
            descriptor in self._guests
            or descriptor in self._calls
            or descriptor == self._listener.fileno()
        )

    def _secret_of(self, epoch: int) -> bytes | None:
        return self._secrets.get(epoch)

    def admit(self, epoch: int, secret: bytes) -> None:
        """Let in those of this meeting, and of later ones that are expected, alone from now on."""
        self._epoch = epoch
        self._secrets = {e: known for e, known in self._secrets.items() if e > epoch}
        self._secrets[epoch] = secret
        self._calls.begin(epoch)
        self._members = {e: hosts for e, hosts in self._members.items() if e >= epoch}
        self._look_who_is_near()
        self._answer_early()

    def favour(self, epoch: int, cards: Iterable[Card]) -> None:
        """Prefer callers from where these listen, who are members of that meeting."""
        before = self._members.get(epoch, frozenset())
        self._members[epoch] = before.union(card.host for card in cards)
        self._look_who_is_near()

    def expect(self, epoch: int, secret: bytes) -> None:
        """Let in those of this later meeting too."""
        self._secrets[epoch] = secret
        self._answer_early()

    def call_off(self, epoch: int) -> None:
        """Expect it no more."""
        self._secrets.pop(epoch, None)
        self._members.pop(epoch, None)
        self._calls.call_off(epoch)

    def dial(self, card: Card, epoch: int) -> None:
        """Begin to call for that meeting, unless a call is under way or it is not expected."""
        serial = min(self._serials.get(card.identity, 0) + 1, MOST_SERIAL)
        self._calls.dial(card, epoch, serial)

    def call_to(self, peer: bytes) -> Dial | None:
        """Return the call of this process's own that is under way, or has failed."""
        return self._calls.calls.get(peer)

    # ---- calls of others

    def hear(self, descriptor: int) -> bool:
        """Go on with what is ready there. Returns whether it was a call of this process's own."""
        if descriptor in self._calls:
            self._calls.hear(descriptor)
            return True
        if descriptor == self._listener.fileno():
            self._let_in()
        elif descriptor in self._guests:
            self._hear_guest(descriptor, self._listen_to)
        return False

    def _answer_early(self) -> None:
        """Answer the callers that called before their meeting was known here."""
        early = [d for d, guest in self._guests.items() if guest.call and guest.own is None]
        for descriptor in early:
            self._hear_guest(descriptor, self._answer)

    def _hear_guest(self, descriptor: int, go_on: Callable[[_Guest], bool]) -> None:
        guest = self._guests[descriptor]
        try:
            done = go_on(guest)
        except BlockingIOError:
            return
        except OSError:  # a stranger went away
            done = True
        if done:
            self._show_out(descriptor)

    def _let_in(self) -> None:
        """Accept those who wait, or a good part of them."""
        until = time.monotonic() + _TURN_S
        for count in range(_TURN):
            if count and time.monotonic() > until:
                break
            try:
                caller, (host, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the caller may have gone again
                if error.errno in FULL:
                    self._make_room()
                    return
                continue
            self._welcome(caller, host)
        self._look_for_a_crowd()

    def _welcome(self, caller: socket.socket, host: str) -> None:
        caller.setblocking(False)
        guest = _Guest(caller, _NEAR if host in self._near else _STRANGE)
        self._guests[caller.fileno()] = guest
        self._poll.register(caller, select.EPOLLIN)
        self._keep(guest)
        self._hear_guest(caller.fileno(), self._listen_to)  # most have said something, or gone

    def _keep(self, guest: _Guest) -> None:
        """Count it among those that are trusted as far; the oldest of too many is dropped."""
        alike = self._trusted[guest.trust]
        alike[guest.socket.fileno()] = None
        if len(alike) > MOST_CALLERS:
            self._show_out(next(iter(alike)))

    # ---- crowds

    def _look_who_is_near(self) -> None:
        near = frozenset(self._callers.values()).union(*self._members.values())
        if near != self._near:
            self._near = near
            if self._crowd_until:
                self._keep_out()

    def _look_for_a_crowd(self) -> None:
        told = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        if len(told) < _TCP_INFO.size or _TCP_INFO.unpack(told)[0] < _CROWD:
            return
        now = time.monotonic()
        if now >= self._smaller_at and self._one_of < _FEWEST_ONE_OF:
            self._smaller_at = now + _SMALLER_S
            self._one_of *= port.ONE_OF
            log.warning("strangers crowd the port: one of %d is let in", self._one_of)
            self._keep_out()
        self._crowd_until = now + _CROWD_S

    def _keep_out(self) -> None:
        """Have the kernel let in a part of those who call from elsewhere than members do, at
        random. Not none: a member may call from another address than the one it listens at."""
        try:
            port.favour(self._listener, self._near, self._one_of)
        except OSError as error:  # so many members that it has no room for their addresses
            log.warning("strangers cannot be kept out", extra={"detail": str(error)})

    def _let_all_in(self) -> None:
        self._crowd_until, self._one_of = 0.0, 1
        port.let_all_in(self._listener)

    # ---- one caller

    def _make_room(self) -> None:
        """Make room, as no descriptor is left: drop the oldest stranger, or let the listener
        rest."""
        if not self._show_out_oldest():
            self._poll.modify(self._listener, 0)
            self._full_until = time.monotonic() + AGAIN_S

    def _show_out_oldest(self) -> bool:
        """Drop the oldest stranger, to free a descriptor. Return False where there are no
        strangers."""
        for descriptors in self._trusted:
            if descriptors:
                self._show_out(next(iter(descriptors)))
                return True
        return False

    def _show_out(self, descriptor: int) -> None:
        guest = self._let_go(descriptor)
        guest.socket.close()

    def _let_go(self, descriptor: int) -> _Guest:
        """Forget it: it is no guest any more."""
        guest = self._guests.pop(descriptor)
        del self._trusted[guest.trust][descriptor]
        self._poll.unregister(guest.socket)
        return guest

    def _trust(self, guest: _Guest) -> None:
        """Count it among those whose first word is proven."""
        del self._trusted[guest.trust][guest.socket.fileno()]
        guest.trust = _PROVEN
        self._keep(guest)

    def _listen_to(self, guest: _Guest) -> bool:
        """Read from a guest. Return whether nothing more is wanted of it as a guest."""
        part = guest.socket.recv(guest.missing)
        if not part:
            return True
        guest.said += part
        guest.missing -= len(part)
        if guest.missing:
            return False
        said, me = bytes(guest.said), self._own_digest
        if guest.call is None:
            guest.call, guest.missing = greeting.read_call(said), 1
            return guest.call is None or self._answer(guest)
        call = guest.call
        secret = self._secrets.get(call.epoch)
        if secret is None or not self._wanted(call):
            return True
        if not greeting.proven(said, secret, b"confirm", me, call.said, guest.answer):
            return True
        seals: Seals | None = None
        if self._sealed or call.seals:
            assert guest.own is not None, "it was answered"
            seals = greeting.seals_of_called(
                guest.own, call.public, secret, me, call.said, guest.answer
            )
        guest.socket.sendall(greeting.WELCOME)
        self._let_go(guest.socket.fileno())
        # If it fails, the caller hears no more than the end of the link.
        with contextlib.suppress(OSError):
            self._open(call.caller, call.place, call.serial, guest.socket, seals)
        return False

    def _answer(self, guest: _Guest) -> bool:
        """Answer a call, now or when this worker comes to the meeting that the caller means."""
        call, me = guest.call, self._own_digest
        assert call is not None, "it has called"
        secret = self._secrets.get(call.epoch)
        if secret is None:
            return call.epoch < self._epoch  # of a later one this worker may yet hear
        if not greeting.proven(call.proof, secret, b"call", me, call.said):
            return True
        self._trust(guest)
        guest.own = greeting.fresh()
        guest.answer = greeting.make_answer(self._sealed, guest.own)
        proof = greeting.prove(secret, b"answer", me, call.said, guest.answer)
        guest.socket.sendall(guest.answer + proof)
        guest.said, guest.missing = bytearray(), greeting.CONFIRM_BYTES
        return False

    def _wanted(self, call: Call) -> bool:
        """Return whether this call makes the link, rather than one of this process's own."""
        link = self._link_to(call.caller)
        if link is not None:
            return call.serial > link.serial
        own = self.call_to(call.caller)
        if own is None or own.problem is not None or own.serial < call.serial:
            return True
        # Of one for a later meeting the other end may not have heard; but one that is confirmed may
        # have made the link there.
        stands = own.confirmed or own.epoch <= call.epoch
        return not (stands and self._identity > call.caller)

    # ---- both

    def _open(
        self,
        peer: bytes,
        place: bytes,
        serial: int,
        connection: socket.socket,
        seals: Seals | None,
    ) -> None:
        try:
            self._opened(peer, place, serial, connection, seals)
        except OSError:
            connection.close()
            raise
        self._calls.drop(peer)
        self._serials[peer] = serial
        with contextlib.suppress(OSError):  # it is over already
            self._callers[peer] = connection.getpeername()[0]
            self._look_who_is_near()

    def tick(self) -> None:
        """Do what is due: drop late guests, retry calls, listen again. Called a few times a second
        while something is under way."""
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        for descriptor in [d for d, guest in self._guests.items() if guest.until < now]:
            self._show_out(descriptor)
        self._calls.tick(now)
        if self._full_until and self._full_until < now:
            self._full_until = 0.0
            self._poll.modify(self._listener, select.EPOLLIN)
        if self._crowd_until and self._crowd_until < now:
            self._let_all_in()

    @property
    def busy(self) -> bool:
        """True if `tick` is needed soon."""
        return bool(self._guests or self.calling or self._full_until or self._crowd_until)

    @property
    def calling(self) -> bool:
        """True if a call of this process's own is under way, or has failed."""
        return bool(self._calls.calls)

    def close(self) -> None:
        for descriptor in list(self._guests):
            self._show_out(descriptor)
        self._calls.close()
        self._poll.unregister(self._listener)
        self._listener.close()
