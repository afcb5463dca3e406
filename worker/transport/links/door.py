"""How links come about: the listener and the calls that come in.

Callers are strangers until they have proven that they belong: each has a few bytes of memory and
a limit of time, and there is a limit on how many there may be, beyond which the oldest is dropped.
Where two processes call each other at once, the call of the larger identity stands. Nothing here
blocks. Must not know what goes over a link.
"""

import contextlib
import select
import socket
import time
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.calls import AGAIN_S, FULL, Calls, Dial, Open
from oobleck.worker.transport.links.card import Card
from oobleck.worker.transport.links.greeting import Call
from oobleck.worker.transport.links.link import Link
from oobleck.worker.transport.links.sealing import Seals

#: Callers whose greeting is not complete.
MOST_CALLERS = 128
#: From a caller's connection until it has proven itself.
GREETING_LIMIT_S = 5.0
_BACKLOG = 1024


class _Guest:
    """A caller whose greeting is not complete."""

    def __init__(self, caller: socket.socket) -> None:
        self.socket = caller
        self.until = time.monotonic() + GREETING_LIMIT_S
        self.said = bytearray()
        self.missing = greeting.CALL_BYTES
        self.call: Call | None = None
        #: This end's fresh key, and what was answered with it. None: nothing was.
        self.own: X25519PrivateKey | None = None
        self.answer = b""


class Door:
    """Used with the links' lock held. `poll` is told of all descriptors; of those in the door,
    what it reports is handed to `hear`."""

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
        #: By their descriptors; the oldest first.
        self._guests: dict[int, _Guest] = {}
        #: How many links there have been to a process.
        self._serials: dict[bytes, int] = {}
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
        self._answer_early()

    def expect(self, epoch: int, secret: bytes) -> None:
        """Let in those of this later meeting too."""
        self._secrets[epoch] = secret
        self._answer_early()

    def call_off(self, epoch: int) -> None:
        """Expect it no more."""
        self._secrets.pop(epoch, None)
        self._calls.call_off(epoch)

    def dial(self, card: Card, epoch: int) -> None:
        """Begin to call for that meeting, unless a call is under way or it is not expected."""
        self._calls.dial(card, epoch, self._serials.get(card.identity, 0) + 1)

    def call_to(self, peer: bytes) -> Dial | None:
        """The call of this process's own that is under way, or has failed."""
        return self._calls.calls.get(peer)

    # ---- calls of others

    def hear(self, descriptor: int) -> None:
        """Go on with what is ready there."""
        if descriptor == self._listener.fileno():
            self._let_in()
        elif descriptor in self._calls:
            self._calls.hear(descriptor)
        elif descriptor in self._guests:
            self._hear_guest(descriptor, self._listen_to)

    def _answer_early(self) -> None:
        """Those that have called before their meeting was known here."""
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
        try:
            caller, _ = self._listener.accept()
        except OSError as error:  # the caller may have gone again
            if error.errno in FULL:
                self._make_room()
            return
        caller.setblocking(False)
        self._guests[caller.fileno()] = _Guest(caller)
        self._poll.register(caller, select.EPOLLIN)
        if len(self._guests) > MOST_CALLERS:
            self._show_out_oldest()

    def _make_room(self) -> None:
        """No descriptor is left: the oldest stranger gives its own, or the listener rests."""
        if not self._show_out_oldest():
            self._poll.modify(self._listener, 0)
            self._full_until = time.monotonic() + AGAIN_S

    def _show_out_oldest(self) -> bool:
        """Where no descriptor is left, strangers give theirs. False: there are none."""
        if not self._guests:
            return False
        self._show_out(next(iter(self._guests)))
        return True

    def _show_out(self, descriptor: int) -> None:
        guest = self._guests.pop(descriptor)
        self._poll.unregister(guest.socket)
        guest.socket.close()

    def _listen_to(self, guest: _Guest) -> bool:
        """Whether nothing more is wanted of it as a guest."""
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
        del self._guests[guest.socket.fileno()]
        self._poll.unregister(guest.socket)
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
        guest.own = greeting.fresh()
        guest.answer = greeting.make_answer(self._sealed, guest.own)
        proof = greeting.prove(secret, b"answer", me, call.said, guest.answer)
        guest.socket.sendall(guest.answer + proof)
        guest.said, guest.missing = bytearray(), greeting.CONFIRM_BYTES
        return False

    def _wanted(self, call: Call) -> bool:
        """Whether this call makes the link, rather than one of this process's own."""
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

    def tick(self) -> None:
        """What the clock brings; called a few times a second while something is under way."""
        now = time.monotonic()
        for descriptor in [d for d, guest in self._guests.items() if guest.until < now]:
            self._show_out(descriptor)
        self._calls.tick(now)
        if self._full_until and self._full_until < now:
            self._full_until = 0.0
            self._poll.modify(self._listener, select.EPOLLIN)

    @property
    def busy(self) -> bool:
        """Whether `tick` is needed soon."""
        return bool(self._guests or self._calls.calls or self._full_until)

    def close(self) -> None:
        for descriptor in list(self._guests):
            self._show_out(descriptor)
        self._calls.close()
        self._poll.unregister(self._listener)
        self._listener.close()
