"""Calls from this process to others, by their cards, until each is a link or has failed.

A call is repeated if the other end hangs up: it may not know the meeting yet, or may have dropped
this caller among many strangers. Nothing here blocks. Must not know the callers of this process.
"""

import contextlib
import errno
import os
import select
import socket
import time
from collections.abc import Callable
from hashlib import sha256
from ipaddress import ip_address
from typing import NamedTuple

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links import greeting
from oobleck.worker.transport.links.greeting import IDENTITY_BYTES, Seals

# ---- Card of a process: its address and identity, by which others call it.


class Card(NamedTuple):
    """Address at which a process listens, and its identity."""

    identity: bytes
    host: str
    port: int

    @property
    def text(self) -> str:
        return f"{self.identity.hex()}@{self.host}:{self.port}"

    @property
    def digest(self) -> bytes:
        """Digest of the called identity and address, for the proofs of both ends."""
        return sha256(self.text.encode()).digest()

    @classmethod
    def read(cls, text: str) -> "Card":
        """Parse a card. Raises TransportError: a card from another process may be invalid."""
        identity, _, place = text.partition("@")
        host, _, port = place.rpartition(":")
        try:
            ip_address(host)  # resolving a name would take time
            card = cls(bytes.fromhex(identity), host, int(port))
        except ValueError as error:
            raise TransportError(f"the card {text!r} cannot be read: {error}") from None
        if len(card.identity) != IDENTITY_BYTES or not 0 < card.port < 1 << 16:
            raise TransportError(
                f"the card {text!r} cannot be read: its identity or port is invalid"
            )
        return card


#: Time-out of connecting: the kernel of a live host accepts a call even if its processes are busy.
DIAL_LIMIT_S = 5.0
#: Time-out of the called process's answer, long enough for a host that is busy with other work. A
#: loss or a newer generation ends the wait before.
ANSWER_LIMIT_S = 30.0
#: Pause before a call is repeated after the other end hung up.
AGAIN_S = 0.05
#: Highest number of a link, which a greeting has room for.
MOST_SERIAL = (1 << 32) - 1
#: Errors when no descriptor is left.
FULL = (errno.EMFILE, errno.ENFILE)


class Dial:
    """Call from this process."""

    def __init__(self, card: Card, serial: int, epoch: int) -> None:
        """Make a call. `epoch`: of the meeting that it is for."""
        self.card = card
        self.serial = serial
        self.epoch = epoch
        #: Later meeting that needs a link as well: called for if this call makes none.
        self.then: int | None = None
        self.until = time.monotonic() + DIAL_LIMIT_S
        #: True if the host has accepted the call.
        self.answered = False
        #: None: it is repeated at `again_at`.
        self.socket: socket.socket | None = None
        self.again_at = 0.0
        #: Fresh key of this end.
        self.own = greeting.fresh()
        self.received = bytearray()
        self.missing = 0
        self.confirmed = False
        #: Seals of the traffic, once confirmed. None: in the clear.
        self.seals: Seals | None = None
        #: Reason why there is no link.
        self.problem: OSError | None = None


#: Takes a connection after its greeting: the peer's identity, the digest of its card, the serial,
#: the socket, and its seals if it is sealed. Raises OSError where no link is possible.
Open = Callable[[bytes, bytes, int, socket.socket, Seals | None], None]


class Calls:
    """Calls from this process, by peer. Used with the links' lock held. All descriptors are
    registered in `poll`; its events for those in here go to `hear`."""

    def __init__(
        self,
        own: Card,
        poll: select.epoll,
        secret_of: Callable[[int], bytes | None],
        make_room: Callable[[], bool],
        opened: Open,
        *,
        sealed: bool,
    ) -> None:
        """Make it without calls.

        `secret_of`: secret of a meeting that this process is in or expects; `make_room` frees a
        descriptor and returns whether it could; `opened` takes a new link.
        """
        self._own = own
        self._poll = poll
        self._secret_of = secret_of
        self._make_room = make_room
        self._opened = opened
        self._sealed = sealed
        #: By identity of the called process.
        self.calls: dict[bytes, Dial] = {}
        #: Connected ones, by descriptor.
        self._connected: dict[int, Dial] = {}

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._connected

    def dial(self, card: Card, epoch: int, serial: int) -> None:
        """Begin to call for that meeting, unless a call is under way or the meeting is not
        expected.

        Only one call to a process is under way at a time; of two meetings the earlier one is called
        for first, since the other end may not know the later one yet. A confirmed call is never
        dropped: the other end may have the link already, and would report its end as a loss.
        """
        if self._secret_of(epoch) is None:
            return
        then, under_way = None, self.calls.get(card.identity)
        if under_way is not None:
            if under_way.epoch == epoch:
                return
            goes_on = under_way.problem is None and under_way.epoch < epoch
            if under_way.confirmed or (goes_on and self._is_expected(under_way)):
                under_way.then = max(epoch, under_way.then or 0)
                return
            if under_way.epoch > epoch:
                then = under_way.epoch
            self.drop(card.identity)
        call = Dial(card, serial, epoch)
        call.then = then
        self.calls[card.identity] = call
        self._connect(call)

    def _is_expected(self, call: Dial) -> bool:
        return self._secret_of(call.epoch) is not None

    def begin(self, epoch: int) -> None:
        """Begin this meeting, the present one from now on; older ones are over."""
        for peer, call in list(self.calls.items()):
            if call.confirmed:
                call.until = time.monotonic() + ANSWER_LIMIT_S
            elif call.epoch < epoch or call.problem is not None:
                self.drop(peer)
                self._call_for_next(call)

    def call_off(self, epoch: int) -> None:
        """Stop calling others for that meeting."""
        for peer, call in list(self.calls.items()):
            if call.then == epoch:
                call.then = None
            if call.epoch == epoch and not call.confirmed:
                self.drop(peer)

    def drop(self, peer: bytes) -> None:
        """Stop calling that process."""
        if (call := self.calls.pop(peer, None)) is not None:
            self._hang_up(call)

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
        call.received, call.missing = bytearray(), 0
        self._connected[connection.fileno()] = call
        self._poll.register(connection, select.EPOLLOUT)

    def _new_socket(self, host: str) -> socket.socket:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        while True:
            try:
                return socket.socket(family, socket.SOCK_STREAM)
            except OSError as error:
                if error.errno not in FULL or not self._make_room():
                    raise

    def _hang_up(self, call: Dial) -> None:
        if call.socket is not None:
            self._connected.pop(call.socket.fileno(), None)
            with contextlib.suppress(OSError, ValueError):
                self._poll.unregister(call.socket)
            call.socket.close()
            call.socket = None

    def _fail(self, call: Dial, problem: OSError) -> None:
        self._hang_up(call)
        call.confirmed = False
        if self._is_expected(call):
            call.problem = problem
        else:  # the reason is no longer needed
            self.calls.pop(call.card.identity, None)
            self._call_for_next(call)

    def _call_for_next(self, call: Dial) -> None:
        if call.then is not None:
            self.dial(call.card, call.then, call.serial)

    def hear(self, descriptor: int) -> None:
        """Handle events of the descriptor."""
        call = self._connected[descriptor]
        try:
            self._advance(call)
        except BlockingIOError:
            pass
        except (BrokenPipeError, ConnectionResetError):
            self._call_again(call)  # the other end hung up in the middle of a message
        except OSError as error:
            self._fail(call, error)

    def _advance(self, call: Dial) -> None:
        """Advance a call: it is connected, readable, or failed."""
        connection, secret = call.socket, self._secret_of(call.epoch) or b""
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
            packed = self._packed_call(call)
            connection.sendall(packed + greeting.prove(secret, b"call", them, packed))
            call.missing = greeting.ANSWER_BYTES
            self._poll.modify(connection, select.EPOLLIN)
            return
        part = connection.recv(call.missing)
        if not part:
            self._call_again(call)
            return
        call.received += part
        call.missing -= len(part)
        if call.missing:
            return
        if call.confirmed:
            self._open(call, connection)
            return
        answer, packed = greeting.read_answer(bytes(call.received)), self._packed_call(call)
        if not greeting.proven(answer.proof, secret, b"answer", them, packed, answer.packed):
            self._fail(call, PermissionError("the process that answers there is not of this job"))
            return
        if self._sealed or answer.seals:
            call.seals = greeting.seals_of_caller(
                call.own, answer.public, secret, them, packed, answer.packed
            )
        connection.sendall(greeting.prove(secret, b"confirm", them, packed, answer.packed))
        call.received, call.missing, call.confirmed = bytearray(), len(greeting.WELCOME), True

    def _packed_call(self, call: Dial) -> bytes:
        own = self._own
        return greeting.make_call(
            call.epoch, call.serial, self._sealed, own.identity, own.digest, call.own
        )

    def _call_again(self, call: Dial) -> None:
        """Repeat the call later. The peer may be calling this process, may not know the meeting
        yet, or may have dropped this caller among many strangers."""
        if not self._is_expected(call):
            self._fail(call, OSError(errno.ECONNABORTED, "its meeting is over"))
            return
        self._hang_up(call)
        call.own, call.confirmed = greeting.fresh(), False
        call.again_at = time.monotonic() + AGAIN_S
        call.until = time.monotonic() + ANSWER_LIMIT_S

    def _open(self, call: Dial, connection: socket.socket) -> None:
        del self._connected[connection.fileno()]
        self._poll.unregister(connection)
        call.socket = None
        card = call.card
        self._opened(card.identity, card.digest, call.serial, connection, call.seals)

    def tick(self, now: float) -> None:
        """Fail overdue calls, and connect those to be repeated."""
        for call in list(self.calls.values()):
            if call.problem is not None:
                continue
            if call.until < now:
                how = errno.ECONNABORTED if call.answered else errno.ETIMEDOUT
                self._fail(call, OSError(how, os.strerror(how)))
            elif call.socket is None and call.again_at < now:
                self._connect(call)

    def close(self) -> None:
        for call in list(self.calls.values()):
            self._hang_up(call)
