"""How links come about: the listener, the calls that come in and those that go out.

Callers are strangers until they have proven that they belong: each has a few bytes of memory and
a limit of time, and there is a limit on how many there may be, beyond which the oldest is dropped.
Where two processes call each other at once, the call of the larger identity stands. Nothing here
blocks. Must not know what goes over a link.
"""

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.greeting import Call
from oobleck.worker.transport.links.link import Link
from oobleck.worker.transport.links.sealing import Seals

#: Callers whose greeting is not complete.
MOST_CALLERS = 128
#: From a caller's connection until it has proven itself.
GREETING_LIMIT_S = 5.0
#: For the kernel of a host that is up, which takes a call however busy its processes are.
DIAL_LIMIT_S = 5.0
#: For the process behind it, which is known to be there: so long only where a host is busy with
#: other things. Who dies or is superseded meanwhile releases the wait.
ANSWER_LIMIT_S = 30.0
#: Before a call is made again that the other end has hung up on.
_AGAIN_S = 0.05
_BACKLOG = 1024
#: No descriptor is left.
_FULL = (errno.EMFILE, errno.ENFILE)


class Card(NamedTuple):
    """Where a process listens, and who it is."""

    identity: bytes
    host: str
    port: int

    @property
    def text(self) -> str:
        return f"{self.identity.hex()}@{self.host}:{self.port}"

    @property
    def digest(self) -> bytes:
        """In the proofs of both ends: who is called, and where."""
        return sha256(self.text.encode()).digest()

    @classmethod
    def read(cls, text: str) -> "Card":
        """Raises ValueError."""
        identity, _, place = text.partition("@")
        host, _, port = place.rpartition(":")
        return cls(bytes.fromhex(identity), host, int(port))


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


class Dial:
    """A call of this process's own."""

    def __init__(self, card: Card, serial: int, epoch: int) -> None:
        """`epoch`: of the meeting that it is made for."""
        self.card = card
        self.serial = serial
        self.epoch = epoch
        self.until = time.monotonic() + DIAL_LIMIT_S
        #: Whether the host has taken the call.
        self.answered = False
        #: None: it is made again at `again_at`.
        self.socket: socket.socket | None = None
        self.again_at = 0.0
        #: This end's fresh key.
        self.own = greeting.fresh()
        self.said = bytearray()
        self.missing = 0
        self.confirmed = False
        #: Of what follows, once it is confirmed. None: all goes in the clear.
        self.seals: Seals | None = None
        #: Why there is no link.
        self.problem: OSError | None = None


#: Is given a connection that has been greeted: the peer's identity, the serial, the socket, and its
#: seals where it is sealed.
Open = Callable[[bytes, int, socket.socket, Seals | None], None]


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
        self._family = family
        self._address = address
        self._identity = identity
        self._poll = poll
        self._link_to = link_to
        self._opened = opened
        self._sealed = sealed
        self._listener = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._listener.setblocking(False)
        poll.register(self._listener, select.EPOLLIN)
        self.card = Card(identity, address, self._listener.getsockname()[1])
        self._own_digest = self.card.digest
        #: Of the present meeting; and the secrets of that and of those that are expected.
        self._epoch = -1
        self._secrets: dict[int, bytes] = {}
        #: By their descriptors; guests the oldest first.
        self._guests: dict[int, _Guest] = {}
        self._dials: dict[int, Dial] = {}
        #: All calls of this process's own, by whom they are to.
        self.calls: dict[bytes, Dial] = {}
        #: How many links there have been to a process.
        self._serials: dict[bytes, int] = {}
        #: Where accepting failed for want of descriptors: not again before.
        self._full_until = 0.0

    def __contains__(self, descriptor: int) -> bool:
        return (
            descriptor in self._guests
            or descriptor in self._dials
            or descriptor == self._listener.fileno()
        )

    def admit(self, epoch: int, secret: bytes) -> None:
        """Let in those of this meeting, and of later ones that are expected, alone from now on."""
        self._epoch = epoch
        self._secrets = {e: known for e, known in self._secrets.items() if e > epoch}
        self._secrets[epoch] = secret
        for peer, call in list(self.calls.items()):
            if call.confirmed:
                # The other end may have the link by now, whose end it would take for a loss.
                call.until = time.monotonic() + ANSWER_LIMIT_S
            elif call.epoch < epoch or call.problem is not None:
                self._hang_up(call)
                del self.calls[peer]
        self._answer_early()

    def expect(self, epoch: int, secret: bytes) -> None:
        """Let in those of this later meeting too."""
        self._secrets[epoch] = secret
        self._answer_early()

    def call_off(self, epoch: int) -> None:
        """Expect it no more."""
        self._secrets.pop(epoch, None)
        for peer, call in list(self.calls.items()):
            if call.epoch == epoch and not call.confirmed:
                self._hang_up(call)
                del self.calls[peer]

    def _answer_early(self) -> None:
        """Those that have called before their meeting was known here."""
        early = [d for d, guest in self._guests.items() if guest.call and guest.own is None]
        for descriptor in early:
            self._hear_guest(descriptor, self._answer)

    # ---- calls of this process's own

    def dial(self, card: Card, epoch: int) -> None:
        """Begin to call for that meeting, unless a call is under way or it is not expected."""
        under_way = self.calls.get(card.identity)
        if under_way is not None and under_way.epoch < epoch and not under_way.confirmed:
            self._hang_up(under_way)
            del self.calls[card.identity]
        if epoch in self._secrets and card.identity not in self.calls:
            call = Dial(card, self._serials.get(card.identity, 0) + 1, epoch)
            self.calls[card.identity] = call
            self._connect(call)

    def _connect(self, call: Dial) -> None:
        try:
            call.socket = connection = self._new_socket(call.card.host)
            connection.setblocking(False)
            problem = connection.connect_ex((call.card.host, call.card.port))
        except OSError as error:
            self._fail(call, error)
            return
        if problem and problem != errno.EINPROGRESS:
            self._fail(call, OSError(problem, os.strerror(problem)))
            return
        call.said, call.missing = bytearray(), 0
        self._dials[connection.fileno()] = call
        self._poll.register(connection, select.EPOLLOUT)

    def _new_socket(self, host: str) -> socket.socket:
        """Where no descriptor is left, strangers give theirs."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        while True:
            try:
                return socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                if error.errno not in _FULL or not self._guests:
                    raise
                self._show_out(next(iter(self._guests)))

    def _hang_up(self, call: Dial) -> None:
        if call.socket is not None:
            self._dials.pop(call.socket.fileno(), None)
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(call.socket)
            call.socket.close()
            call.socket = None

    def _fail(self, call: Dial, problem: OSError) -> None:
        self._hang_up(call)
        call.problem = problem

    def _advance(self, call: Dial) -> None:
        """The connection stands, or there is something to read, or neither will be."""
        connection, secret = call.socket, self._secrets.get(call.epoch, b"")
        assert connection is not None, "only what is connected is polled"
        if not secret and not call.confirmed:
            self._fail(call, OSError(errno.ECONNABORTED, "its meeting is over"))
            return
        them = call.card.digest
        if not call.missing:
            problem = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if problem:
                self._fail(call, OSError(problem, os.strerror(problem)))
                return
            if not call.answered:
                call.answered = True
                call.until = time.monotonic() + ANSWER_LIMIT_S
            said = self._said(call)
            connection.sendall(said + greeting.prove(secret, b"call", them, said))
            call.missing = greeting.ANSWER_BYTES
            self._poll.modify(connection, select.EPOLLIN)
            return
        part = connection.recv(call.missing)
        if not part:
            self._call_again(call)
            return
        call.said += part
        call.missing -= len(part)
        if call.missing:
            return
        if call.confirmed:
            self._open(call, connection)
            return
        answer, said = greeting.read_answer(bytes(call.said)), self._said(call)
        if not greeting.proven(answer.proof, secret, b"answer", them, said, answer.said):
            self._fail(call, PermissionError("whoever answers there is not of this job"))
            return
        if self._sealed or answer.seals:
            call.seals = greeting.seals_of_caller(
                call.own, answer.public, secret, them, said, answer.said
            )
        connection.sendall(greeting.prove(secret, b"confirm", them, said, answer.said))
        call.said, call.missing, call.confirmed = bytearray(), len(greeting.WELCOME), True

    def _said(self, call: Dial) -> bytes:
        return greeting.make_call(call.epoch, call.serial, self._sealed, self._identity, call.own)

    def _call_again(self, call: Dial) -> None:
        """It calls this one at the same time, is not there yet, or took it for a stranger in a
        crowd."""
        self._hang_up(call)
        call.own, call.confirmed = greeting.fresh(), False
        call.again_at = time.monotonic() + _AGAIN_S
        call.until = time.monotonic() + ANSWER_LIMIT_S

    # ---- calls of others

    def hear(self, descriptor: int) -> None:
        """Go on with what is ready there."""
        if descriptor == self._listener.fileno():
            self._let_in()
        elif (call := self._dials.get(descriptor)) is not None:
            try:
                self._advance(call)
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                self._call_again(call)  # hung up on amid a word
            except OSError as error:
                self._fail(call, error)
        elif descriptor in self._guests:
            self._hear_guest(descriptor, self._listen_to)

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
            if error.errno in _FULL:
                self._make_room()
            return
        caller.setblocking(False)
        self._guests[caller.fileno()] = _Guest(caller)
        self._poll.register(caller, select.EPOLLIN)
        if len(self._guests) > MOST_CALLERS:
            self._show_out(next(iter(self._guests)))

    def _make_room(self) -> None:
        """No descriptor is left: the oldest stranger gives its own, or the listener rests."""
        if self._guests:
            self._show_out(next(iter(self._guests)))
        else:
            self._poll.modify(self._listener, 0)
            self._full_until = time.monotonic() + _AGAIN_S

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
        self._opened_with(call.caller, call.serial, guest.socket, seals)
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
        own = self.calls.get(call.caller)
        under_way = own is not None and own.problem is None and own.serial >= call.serial
        return not (under_way and self._identity > call.caller)

    # ---- both

    def _open(self, call: Dial, connection: socket.socket) -> None:
        del self._dials[connection.fileno()]
        self._poll.unregister(connection)
        call.socket = None
        self._opened_with(call.card.identity, call.serial, connection, call.seals)

    def _opened_with(
        self, peer: bytes, serial: int, connection: socket.socket, seals: Seals | None
    ) -> None:
        if (call := self.calls.pop(peer, None)) is not None:
            self._hang_up(call)
        self._serials[peer] = serial
        self._opened(peer, serial, connection, seals)

    def tick(self) -> None:
        """What the clock brings; called a few times a second while something is under way."""
        now = time.monotonic()
        for descriptor in [d for d, guest in self._guests.items() if guest.until < now]:
            self._show_out(descriptor)
        for call in list(self.calls.values()):
            if call.problem is not None:
                continue
            if call.until < now:
                how = errno.ECONNABORTED if call.answered else errno.ETIMEDOUT
                self._fail(call, OSError(how, os.strerror(how)))
            elif call.socket is None and call.again_at < now:
                self._connect(call)
        if self._full_until and self._full_until < now:
            self._full_until = 0.0
            self._poll.modify(self._listener, select.EPOLLIN)

    @property
    def busy(self) -> bool:
        """Whether `tick` is needed soon."""
        return bool(self._guests or self.calls or self._full_until)

    def close(self) -> None:
        for descriptor in list(self._guests):
            self._show_out(descriptor)
        for call in list(self.calls.values()):
            self._hang_up(call)
        self._poll.unregister(self._listener)
        self._listener.close()
