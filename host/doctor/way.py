"""Measurement of the network path from this host to another one.

It finds whether there is a connection, its round-trip time and throughput, and how large a packet
may be. Both ends are doctor's processes, whose agents got a shared secret from the master. The
caller proves first that it has the secret, then the listener does. Without that proof the listener
answers nothing, and its port is open only during one examination. The data sent is filler.
"""

import contextlib
import hashlib
import hmac
import secrets
import select
import socket
import statistics
import struct
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator

import psutil

from oobleck.core.orders import Call, Listening, Way

_NONCE_BYTES = _PROOF_BYTES = 32
#: Time to connect, and for each answer.
_ANSWER_S = 3.0
_ROUND_TRIPS = 21
_CHUNK = 256 << 10
#: Request: a kind, bytes, and seconds.
_ASK = struct.Struct("!cQd")
_ECHO, _TAKE, _GIVE = b"e", b"t", b"g"
#: Bytes received, and in how many nanoseconds.
_TAKEN = struct.Struct("!QQ")
#: SO_LINGER: drop unsent data at the close.
_AT_ONCE = struct.pack("@ii", 1, 0)
#: No examination sends more, whatever is requested.
MOST_BYTES, _MOST_S = 256 << 20, 5.0
#: Most calls served at a time. One would do, as each node is in one pair: the rest are strangers'.
_MOST_CALLERS = 4

#: Parts of a datagram: a proof of the rest, and a number.
_TAG_BYTES = 16
_NUMBER = struct.Struct("!Q")
#: Headers of IP and UDP.
_HEADERS = {socket.AF_INET: 28, socket.AF_INET6: 48}
_MOST_DATAGRAM = (64 << 10) - 64
_TRIES, _WAIT_S = 3, 0.2
#: Common packet sizes of links, tried where the interface's own does not get through.
_SIZES = (9000, 8900, 4200, 1500, 1492, 1476, 1450, 1400, 1300, 1280, 576, 128)
#: Linux: IP_MTU_DISCOVER (ip(7)), IPV6_MTU_DISCOVER; send unsplit whatever the kernel knows of the
#: path.
_DISCOVER = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}
_PROBE = 3


class Refused(Exception):
    """Error of a peer that does not have the secret."""


class Listener:
    """Called end of a path; a context manager."""

    def __init__(self, address: str, secret: bytes, seconds: float) -> None:
        """Open the port. Raises OSError if the address is not one of this host's."""
        self._secret = secret
        self._until = time.monotonic() + seconds
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._tcp, self._udp = _pair(family, address)
        self.port = int(self._tcp.getsockname()[1])
        self._callers = threading.Semaphore(_MOST_CALLERS)
        self._closed = False
        for serve in (self._accept, self._echo):
            threading.Thread(target=serve, daemon=True).start()

    def listening(self) -> Listening:
        return Listening(port=self.port)

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._tcp.shutdown(socket.SHUT_RDWR)
        for one in (self._tcp, self._udp):
            one.close()

    def _is_over(self) -> bool:
        return self._closed or time.monotonic() > self._until

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._is_over():
                self._tcp.settimeout(1.0)
                try:
                    caller, _ = self._tcp.accept()
                except TimeoutError:
                    continue
                if not self._callers.acquire(blocking=False):
                    caller.close()
                    continue
                threading.Thread(target=self._serve, args=(caller,), daemon=True).start()
        self.close()

    def _serve(self, caller: socket.socket) -> None:
        try:
            with caller, contextlib.suppress(OSError, Refused):
                caller.settimeout(_ANSWER_S)
                caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                _prove_as_called(caller, self._secret)
                while not self._is_over():
                    kind, size, seconds = _ASK.unpack(_read(caller, _ASK.size))
                    size, seconds = min(size, MOST_BYTES), min(seconds, _MOST_S)
                    if kind == _ECHO:
                        caller.sendall(_ASK.pack(kind, size, seconds))
                    else:
                        if kind == _TAKE:
                            caller.sendall(_TAKEN.pack(*_take(caller, size, seconds)))
                            _leave_unread(caller)
                        elif kind == _GIVE:
                            _give(caller, size, seconds)
                        return
        finally:
            self._callers.release()

    def _echo(self) -> None:
        """Answer each datagram of a holder of the secret with its size; never with more bytes than
        it had."""
        with contextlib.suppress(OSError):
            while not self._is_over():
                self._udp.settimeout(1.0)
                try:
                    data, caller = self._udp.recvfrom(64 << 10)
                except TimeoutError:
                    continue
                number = data[_TAG_BYTES : _TAG_BYTES + _NUMBER.size]
                if len(data) > 2 * _TAG_BYTES + _NUMBER.size and hmac.compare_digest(
                    data[:_TAG_BYTES], _tag(self._secret, b"sent", number)
                ):
                    self._udp.sendto(_tag(self._secret, b"came", number) + number, caller)


def _pair(family: int, address: str) -> tuple[socket.socket, socket.socket]:
    """Return sockets of TCP and UDP with one port, chosen by the kernel. Raises OSError."""
    for last in (False, False, False, True):
        tcp, udp = (
            socket.socket(family, socket.SOCK_STREAM),
            socket.socket(family, socket.SOCK_DGRAM),
        )
        try:
            tcp.bind((address, 0))
            udp.bind((address, tcp.getsockname()[1]))
            tcp.listen(_MOST_CALLERS)
        except OSError:
            tcp.close()
            udp.close()
            if last:
                raise
        else:
            return tcp, udp
    raise AssertionError("the last try returns or raises")


def measure(order: Call, secret: bytes, own: str) -> Way:
    """Measure the path. `own`: this host's address to call from; empty: any."""
    try:
        with _called(order, secret, own) as link:
            trips = sorted(_round_trip(link) for _ in range(_ROUND_TRIPS))
            mtu, arrived = _largest(order, secret, own)
            there = _send(link, order) if order.most_bytes else 0.0
        back = 0.0
        if order.most_bytes:
            with _called(order, secret, own) as link:
                link.sendall(_ASK.pack(_GIVE, order.most_bytes, order.seconds))
                back = _rate(*_take(link, order.most_bytes, order.seconds))
    except Refused:
        return Way(problem="another program than this examination's agent answers there")
    except TimeoutError:
        return Way(problem=f"no answer within {_ANSWER_S:g} s")
    except OSError as error:
        return Way(problem=(error.strerror or str(error)).lower())
    return Way(
        least_s=trips[0],
        median_s=statistics.median(trips),
        there_bytes_per_s=there,
        back_bytes_per_s=back,
        sent_bytes=order.most_bytes,
        mtu=mtu,
        arrived=arrived,
    )


@contextlib.contextmanager
def _called(order: Call, secret: bytes, own: str) -> Iterator[socket.socket]:
    """Yield a connection to the other end, after proving possession of the secret. Raises OSError,
    Refused."""
    source = (own, 0) if own else None
    link = socket.create_connection((order.address, order.port), _ANSWER_S, source)
    with link:
        link.settimeout(_ANSWER_S)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _prove_as_caller(link, secret)
        yield link


# ---- proofs of the secret


def _proof(secret: bytes, role: bytes, message: bytes) -> bytes:
    return hmac.digest(secret, b"oobleck doctor " + role + message, hashlib.sha256)


def _tag(secret: bytes, role: bytes, number: bytes) -> bytes:
    return _proof(secret, role, number)[:_TAG_BYTES]


def _prove_as_caller(link: socket.socket, secret: bytes) -> None:
    theirs = _read(link, _NONCE_BYTES)
    ours = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(ours + _proof(secret, b"caller", theirs + ours))
    if not hmac.compare_digest(_read(link, _PROOF_BYTES), _proof(secret, b"called", theirs + ours)):
        raise Refused


def _prove_as_called(link: socket.socket, secret: bytes) -> None:
    ours = secrets.token_bytes(_NONCE_BYTES)
    link.sendall(ours)
    reply = _read(link, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = reply[:_NONCE_BYTES], reply[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"caller", ours + theirs)):
        raise Refused
    link.sendall(_proof(secret, b"called", ours + theirs))


def _read(link: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raises OSError, also if the other end closes the connection."""
    data = bytearray()
    while len(data) < size:
        part = link.recv(size - len(data))
        if not part:
            raise ConnectionError("the other end closed the connection")
        data += part
    return bytes(data)


# ---- times and rates


def _round_trip(link: socket.socket) -> float:
    began = time.monotonic()
    link.sendall(_ASK.pack(_ECHO, 0, 0.0))
    _read(link, _ASK.size)
    return time.monotonic() - began


def _send(link: socket.socket, order: Call) -> float:
    """Send for the order's time and return the bytes a second that the other end received.

    The other end answers when it has all data or the time is over. Data then still in flight is
    not counted.
    """
    link.sendall(_ASK.pack(_TAKE, order.most_bytes, order.seconds))
    chunk, left = memoryview(bytes(_CHUNK)), order.most_bytes
    until = time.monotonic() + order.seconds + _ANSWER_S
    link.setblocking(False)
    while left:
        readable, writable, _ = select.select([link], [link], [], until - time.monotonic())
        if readable:
            break
        if not writable:
            raise TimeoutError
        left -= link.send(chunk[:left])
    link.settimeout(max(0.1, until - time.monotonic()))
    rate = _rate(*_TAKEN.unpack(_read(link, _TAKEN.size)))
    # A slow path would carry the unsent data for long.
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
    return rate


def _take(link: socket.socket, size: int, seconds: float) -> tuple[int, int]:
    """Receive data; return the number of bytes, and the nanoseconds since the first of them."""
    buffer, taken, began = bytearray(_CHUNK), 0, 0
    while taken < size:
        got = link.recv_into(buffer, min(_CHUNK, size - taken))
        now = time.monotonic_ns()
        if not got:
            break
        # The first data may have arrived before this read.
        began = began or now
        taken += got
        if now - began > seconds * 1e9:
            break
    return taken, max(1, time.monotonic_ns() - began) if began else 0


def _leave_unread(link: socket.socket) -> None:
    """Read and discard until the other end closes. If this end closed with unread data, TCP would
    reset the connection, and the other end might lose the last answer."""
    until = time.monotonic() + _ANSWER_S
    while time.monotonic() < until and link.recv(_CHUNK):
        pass


def _give(link: socket.socket, size: int, seconds: float) -> None:
    chunk, left = memoryview(bytes(_CHUNK)), size
    until = time.monotonic() + seconds
    while left and time.monotonic() < until:
        left -= link.send(chunk[:left])


def _rate(taken: int, took_ns: int) -> float:
    return 1e9 * taken / took_ns if took_ns else 0.0


# ---- packet sizes


def _largest(order: Call, secret: bytes, own: str) -> tuple[int, int]:
    """Return the interface's MTU, and the largest of the usual packet sizes that arrives unsplit (0
    if none does). Raises OSError if nothing can be sent."""
    family = socket.AF_INET6 if ":" in order.address else socket.AF_INET
    level, option = _DISCOVER[family]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.setsockopt(level, option, _PROBE)
        if own:
            probe.bind((own, 0))
        probe.connect((order.address, order.port))
        mtu = _mtu_of(str(probe.getsockname()[0]))
        probe.settimeout(_WAIT_S)
        room = _HEADERS[family]

        def arrives(size: int) -> bool:
            # Loopback's packets may exceed the largest datagram.
            return _arrives(probe, min(size, _MOST_DATAGRAM) - room, secret)

        if arrives(mtu):
            return mtu, mtu
        smaller = sorted(size for size in _SIZES if size < mtu)
        if not smaller or not arrives(smaller[0]):
            return mtu, 0
        return mtu, smaller[bisect_left(smaller, True, key=lambda size: not arrives(size)) - 1]


def _mtu_of(address: str) -> int:
    states = psutil.net_if_stats()
    for name, has in psutil.net_if_addrs().items():
        if name in states and any(one.address.partition("%")[0] == address for one in has):
            return int(states[name].mtu)
    return 1500


def _arrives(probe: socket.socket, size: int, secret: bytes) -> bool:
    for _ in range(_TRIES):
        number = secrets.token_bytes(_NUMBER.size)
        data = _tag(secret, b"sent", number) + number
        try:
            probe.send(data + bytes(size - len(data)))
            until = time.monotonic() + _WAIT_S
            while time.monotonic() < until:
                if probe.recv(256) == _tag(secret, b"came", number) + number:
                    return True
        except OSError:  # too large for the path, or unanswered
            continue
    return False
