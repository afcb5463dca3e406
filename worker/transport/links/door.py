"""Listener and incoming calls, from which links come about.

Callers are strangers until they have proven that they know the meeting's secret. Each has a few
bytes of memory and a time limit. Their number is limited, and the oldest is dropped first. Callers
whose first message is proven, and callers from a member's address, have limits of their own. If
strangers arrive faster than they can be handled, the kernel accepts all calls from members'
addresses and a random part of the rest.

Where two processes call each other at once, the call of the larger identity wins. No call here
blocks. Must not know the traffic of links.
"""

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
from oobleck.worker.transport.links.calls import AGAIN_S, FULL, MOST_SERIAL, Calls, Card, Dial, Open
from oobleck.worker.transport.links.greeting import Call, Seals
from oobleck.worker.transport.links.link import Link

#: Most callers with an incomplete greeting, for each degree of trust.
MOST_CALLERS = 128
#: Time from a caller's connection to its proof.
GREETING_LIMIT_S = 5.0
_BACKLOG = 1024
#: Limits of accepting in one go, by time and by number, before other work gets the lock.
_TURN_S = 0.02
_TURN = 256
#: Interval of looking at the clock.
_TICK_S = 0.05
#: Connections still to accept after a turn that make a crowd: more arrive than are handled, and
#: soon the kernel would drop members' calls.
_CROWD = _BACKLOG // 4
#: In a crowd the kernel accepts a smaller and smaller part of strangers' calls: the interval
#: between reductions, the smallest part, and how long after the last crowd all are accepted again.
_SMALLER_S = 0.2
_FEWEST_ONE_OF = 1024
_CROWD_S = 10.0
#: `tcpi_unacked` of a listening socket in Linux' struct tcp_info: connections to accept.
_TCP_INFO = struct.Struct("=24xI")
#: Trust in callers: neither the first word proven nor a member's address; a member's address;
#: proven.
_STRANGE, _NEAR, _PROVEN = range(3)

log = logging.getLogger(__name__)


class _Guest:
    """Caller whose greeting is not complete."""

    def __init__(self, caller: socket.socket, trust: int) -> None:
        self.socket = caller
        self.trust = trust
        self.until = time.monotonic() + GREETING_LIMIT_S
        self.received = bytearray()
        self.missing = greeting.CALL_BYTES
        self.call: Call | None = None
        #: Fresh key of this end, and the answer with it. None: not answered yet.
        self.own: X25519PrivateKey | None = None
        self.answer = b""


class Door:
    """Listener of this process, with its guests and calls. Used with the links' lock held. All
    descriptors are registered in `poll`; its events for those in the door go to `hear`."""

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
        """Listen at `address`.

        `link_to`: returns the present link to a process, if there is one; `opened` takes a new one.
        `sealed`: all links are sealed; else those whose other end wants it.
        """
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
        #: Epoch of the present meeting; and the secrets of it and of expected ones.
        self._epoch = -1
        self._secrets: dict[int, bytes] = {}
        #: By descriptor.
        self._guests: dict[int, _Guest] = {}
        #: All and only their descriptors, by degree of trust, oldest first.
        self._trusted: tuple[dict[int, None], ...] = ({}, {}, {})
        #: Number of links so far to each process.
        self._serials: dict[bytes, int] = {}
        #: Hosts of the members of present and expected meetings; and hosts that linked processes
        #: have called from, which may differ.
        self._members: dict[int, frozenset[str]] = {}
        self._callers: dict[bytes, str] = {}
        #: Both together.
        self._near: frozenset[str] = frozenset()
        #: Time (monotonic clock) until which the kernel rejects most strangers; 0: it accepts all.
        self._crowd_until = 0.0
        #: Denominator of the part of strangers accepted then, and the time at which it may shrink.
        self._one_of = 1
        self._smaller_at = 0.0
        self._next_tick = 0.0
        #: Time until which accepting rests for lack of descriptors.
        self._full_until = 0.0
        self._calls = Calls(
            self.card, poll, self._secret_of, self._drop_oldest_stranger, self._open, sealed=sealed
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
        """Accept only members of this meeting, and of expected later ones, from now on."""
        self._epoch = epoch
        self._secrets = {e: known for e, known in self._secrets.items() if e > epoch}
        self._secrets[epoch] = secret
        self._calls.begin(epoch)
        self._members = {e: hosts for e, hosts in self._members.items() if e >= epoch}
        self._update_near()
        self._answer_early()

    def favour(self, epoch: int, cards: Iterable[Card]) -> None:
        """Prefer callers from the hosts of these cards, members of that meeting."""
        before = self._members.get(epoch, frozenset())
        self._members[epoch] = before.union(card.host for card in cards)
        self._update_near()

    def expect(self, epoch: int, secret: bytes) -> None:
        """Accept members of this later meeting too."""
        self._secrets[epoch] = secret
        self._answer_early()

    def call_off(self, epoch: int) -> None:
        """Stop expecting that meeting."""
        self._secrets.pop(epoch, None)
        self._members.pop(epoch, None)
        self._calls.call_off(epoch)

    def dial(self, card: Card, epoch: int) -> None:
        """Begin to call for that meeting, unless a call is under way or the meeting is not
        expected.
        """
        serial = min(self._serials.get(card.identity, 0) + 1, MOST_SERIAL)
        self._calls.dial(card, epoch, serial)

    def call_to(self, peer: bytes) -> Dial | None:
        """Return this process's call that is under way, or has failed."""
        return self._calls.calls.get(peer)

    # ---- calls of others

    def hear(self, descriptor: int) -> bool:
        """Handle events of the descriptor. Return whether it was a call from this process."""
        if descriptor in self._calls:
            self._calls.hear(descriptor)
            return True
        if descriptor == self._listener.fileno():
            self._accept()
        elif descriptor in self._guests:
            self._hear_guest(descriptor, self._listen_to)
        return False

    def _answer_early(self) -> None:
        """Answer the callers that called before their meeting was known here."""
        early = [d for d, guest in self._guests.items() if guest.call and guest.own is None]
        for descriptor in early:
            self._hear_guest(descriptor, self._answer)

    def _hear_guest(self, descriptor: int, advance: Callable[[_Guest], bool]) -> None:
        guest = self._guests[descriptor]
        try:
            done = advance(guest)
        except BlockingIOError:
            return
        except OSError:  # a stranger went away
            done = True
        if done:
            self._drop(descriptor)

    def _accept(self) -> None:
        """Accept waiting callers, within the limits of a turn."""
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
        self._check_for_crowd()

    def _welcome(self, caller: socket.socket, host: str) -> None:
        caller.setblocking(False)
        guest = _Guest(caller, _NEAR if host in self._near else _STRANGE)
        self._guests[caller.fileno()] = guest
        self._poll.register(caller, select.EPOLLIN)
        self._keep(guest)
        self._hear_guest(caller.fileno(), self._listen_to)  # usually something is readable already

    def _keep(self, guest: _Guest) -> None:
        """Count `guest` among those of equal trust, and drop the oldest of too many."""
        alike = self._trusted[guest.trust]
        alike[guest.socket.fileno()] = None
        if len(alike) > MOST_CALLERS:
            self._drop(next(iter(alike)))

    # ---- crowds

    def _update_near(self) -> None:
        near = frozenset(self._callers.values()).union(*self._members.values())
        if near != self._near:
            self._near = near
            if self._crowd_until:
                self._reject_most_strangers()

    def _check_for_crowd(self) -> None:
        info = self._listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        if len(info) < _TCP_INFO.size or _TCP_INFO.unpack(info)[0] < _CROWD:
            return
        now = time.monotonic()
        if now >= self._smaller_at and self._one_of < _FEWEST_ONE_OF:
            self._smaller_at = now + _SMALLER_S
            self._one_of *= port.ONE_OF
            log.warning("strangers crowd the port: accepting one of %d", self._one_of)
            self._reject_most_strangers()
        self._crowd_until = now + _CROWD_S

    def _reject_most_strangers(self) -> None:
        """Have the kernel accept only a random part of the calls from hosts that are no members'.
        Not none, since a member may call from another address than its card's."""
        try:
            port.favour(self._listener, self._near, self._one_of)
        except OSError as error:  # too many members for a filter
            log.warning("strangers cannot be kept out", extra={"detail": str(error)})

    def _accept_all(self) -> None:
        self._crowd_until, self._one_of = 0.0, 1
        port.let_all_in(self._listener)

    # ---- one caller

    def _make_room(self) -> None:
        """Free a descriptor, as none is left: drop the oldest stranger, or let the
        listener rest."""
        if not self._drop_oldest_stranger():
            self._poll.modify(self._listener, 0)
            self._full_until = time.monotonic() + AGAIN_S

    def _drop_oldest_stranger(self) -> bool:
        """Drop the oldest stranger, to free a descriptor. Return False where there are no
        strangers."""
        for descriptors in self._trusted:
            if descriptors:
                self._drop(next(iter(descriptors)))
                return True
        return False

    def _drop(self, descriptor: int) -> None:
        guest = self._remove(descriptor)
        guest.socket.close()

    def _remove(self, descriptor: int) -> _Guest:
        """Remove it from the guests."""
        guest = self._guests.pop(descriptor)
        del self._trusted[guest.trust][descriptor]
        self._poll.unregister(guest.socket)
        return guest

    def _trust(self, guest: _Guest) -> None:
        """Count `guest` among those whose first message is proven."""
        del self._trusted[guest.trust][guest.socket.fileno()]
        guest.trust = _PROVEN
        self._keep(guest)

    def _listen_to(self, guest: _Guest) -> bool:
        """Read from a guest. Return whether it is finished as a guest."""
        part = guest.socket.recv(guest.missing)
        if not part:
            return True
        guest.received += part
        guest.missing -= len(part)
        if guest.missing:
            return False
        received, me = bytes(guest.received), self._own_digest
        if guest.call is None:
            guest.call, guest.missing = greeting.read_call(received), 1
            return guest.call is None or self._answer(guest)
        call = guest.call
        secret = self._secrets.get(call.epoch)
        if secret is None or not self._wanted(call):
            return True
        if not greeting.proven(received, secret, b"confirm", me, call.packed, guest.answer):
            return True
        seals: Seals | None = None
        if self._sealed or call.seals:
            assert guest.own is not None, "it was answered"
            seals = greeting.seals_of_called(
                guest.own, call.public, secret, me, call.packed, guest.answer
            )
        guest.socket.sendall(greeting.WELCOME)
        self._remove(guest.socket.fileno())
        # If it fails, the caller sees only the end of the link.
        with contextlib.suppress(OSError):
            self._open(call.caller, call.place, call.serial, guest.socket, seals)
        return False

    def _answer(self, guest: _Guest) -> bool:
        """Answer a call, now or when this worker enters the caller's meeting."""
        call, me = guest.call, self._own_digest
        assert call is not None, "it has called"
        secret = self._secrets.get(call.epoch)
        if secret is None:
            return call.epoch < self._epoch  # this worker may still learn of a later one
        if not greeting.proven(call.proof, secret, b"call", me, call.packed):
            return True
        self._trust(guest)
        guest.own = greeting.fresh()
        guest.answer = greeting.make_answer(self._sealed, guest.own)
        proof = greeting.prove(secret, b"answer", me, call.packed, guest.answer)
        guest.socket.sendall(guest.answer + proof)
        guest.received, guest.missing = bytearray(), greeting.CONFIRM_BYTES
        return False

    def _wanted(self, call: Call) -> bool:
        """Return whether this call makes the link, rather than one from this process."""
        link = self._link_to(call.caller)
        if link is not None:
            return call.serial > link.serial
        own = self.call_to(call.caller)
        if own is None or own.problem is not None or own.serial < call.serial:
            return True
        # The other end may not know a later meeting yet; but a confirmed call may have made the
        # link there.
        own_call_wins = own.confirmed or own.epoch <= call.epoch
        return not (own_call_wins and self._identity > call.caller)

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
        with contextlib.suppress(OSError):  # it has ended already
            self._callers[peer] = connection.getpeername()[0]
            self._update_near()

    def tick(self) -> None:
        """Do due work: drop late guests, repeat calls, listen again. Called a few times a second
        while something is under way."""
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK_S
        for descriptor in [d for d, guest in self._guests.items() if guest.until < now]:
            self._drop(descriptor)
        self._calls.tick(now)
        if self._full_until and self._full_until < now:
            self._full_until = 0.0
            self._poll.modify(self._listener, select.EPOLLIN)
        if self._crowd_until and self._crowd_until < now:
            self._accept_all()

    @property
    def busy(self) -> bool:
        """True if `tick` is needed soon."""
        return bool(self._guests or self.calling or self._full_until or self._crowd_until)

    @property
    def calling(self) -> bool:
        """True if a call from this process is under way, or has failed."""
        return bool(self._calls.calls)

    def close(self) -> None:
        for descriptor in list(self._guests):
            self._drop(descriptor)
        self._calls.close()
        self._poll.unregister(self._listener)
        self._listener.close()
