"""A worker's own connections to the peers that it exchanges messages with in every step.

A message that fits into the kernel's buffers costs one system call to send and two to receive: no
other thread handles it, and one that has already arrived is not waited for. What the kernel does
not take at once goes out with the next call, so large messages do not belong here. An abort closes
the connections, which ends every wait at both ends.

One thread uses them; `abort` and `wake` may come from any. Must not know what is sent, nor how else
workers talk.
"""

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Collection, Iterator

import torch

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.acceptor import Acceptor
from oobleck.worker.transport.connection import Arrival, Connection, bytes_of
from oobleck.worker.transport.rendezvous import PROOF_BYTES, RendezvousStore

#: The largest message: a few of them fit into the kernel's buffers.
MOST_BYTES = 512 << 10

#: At most so many workers are all connected with each other; the messages of a sum over them grow
#: with the square of their number.
MOST_MESHED = 16
#: The largest share of such a sum.
MOST_SUM_BYTES = 64 << 10
#: No message of a program or a transfer has it.
_SUM_TAG = -1

#: Bytes read from the pipe at once: more than ever wait there.
_WAKES = 4096

#: Is shown each connection to a peer, with the peer's rank.
Watch = Callable[[int, socket.socket], None]

_GREETING = struct.Struct(f"!{PROOF_BYTES}sI")


@contextlib.contextmanager
def _peers_may_fail() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(f"connection: {error}") from None


def nobody_watches(peer: int, connection: socket.socket) -> None:
    pass


class _Receive:
    def __init__(
        self, connections: "PeerConnections", connection: Connection, tensor: torch.Tensor
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._tensor = tensor
        self.arrival = Arrival(tensor)

    def wait(self) -> None:
        if not self.arrival.done:
            self._connections.wait(self._connection, lambda: self.arrival.done)


class _Send:
    """Done when the kernel has taken so many bytes."""

    def __init__(
        self, connections: "PeerConnections", connection: Connection, tensor: torch.Tensor
    ) -> None:
        self._connections = connections
        self._connection = connection
        self._tensor = tensor
        self._end = connection.queued

    def wait(self) -> None:
        if self._connection.sent < self._end:
            self._connections.wait(self._connection, lambda: self._connection.sent >= self._end)


class PeerConnections:
    """A worker's connections, by the peers' ranks. The higher rank connects, the lower one
    listens."""

    def __init__(
        self,
        rendezvous: RendezvousStore,
        rank: int,
        peers: Collection[int],
        address: str,
        *,
        watch: Watch = nobody_watches,
    ) -> None:
        """Returns when it has connected to lower ranks; those of higher ranks are accepted when
        they are needed. `watch` is shown every connection.

        Raises TransportError when a peer cannot be reached.
        """
        self.peers = frozenset(peers)
        self._rank = rank
        self._watch = watch
        self._connections: dict[int, Connection] = {}
        self._expected = {peer for peer in peers if peer > rank}
        # New for these connections, so that nobody gets in by what was said to let in another.
        token = secrets.token_hex(PROOF_BYTES)
        self._proofs = {
            peer: rendezvous.proof("connection", token, str(peer)) for peer in self._expected
        }
        self._lock = threading.Lock()
        self._released = False
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._by_descriptor: dict[int, Connection] = {}
        self._acceptor = Acceptor(address, _GREETING.size, self._poll)
        try:
            if self._expected:
                rendezvous.set(f"connection/{rank}", f"{address}|{self._acceptor.port}|{token}")
            else:
                self._acceptor.close()
            for peer in sorted(self.peers - self._expected):
                self._call(rendezvous, peer)
        except BaseException:
            self.close()
            raise

    def _call(self, rendezvous: RendezvousStore, peer: int) -> None:
        host, port, token = rendezvous.get(f"connection/{peer}").split("|")
        connection = rendezvous.dial(peer, host, int(port))
        with _peers_may_fail():
            proof = rendezvous.proof("connection", token, str(self._rank))
            connection.sendall(_GREETING.pack(proof, self._rank))
            self._add(peer, connection)

    def _add(self, peer: int, connected: socket.socket) -> None:
        connection = self._connections[peer] = Connection(connected)
        self._by_descriptor[connected.fileno()] = connection
        self._poll.register(connected, select.POLLIN)
        self._watch(peer, connected)

    def _listen_to(self, descriptor: int) -> None:
        """Accept a caller, or read its greeting."""
        with _peers_may_fail():
            heard = self._acceptor.hear(descriptor)
        if heard is None:
            return
        connection, greeting = heard
        peer = self._peer_of(greeting)
        if peer is None:
            connection.close()
            return
        self._expected.discard(peer)
        self._add(peer, connection)
        if not self._expected:
            self._acceptor.close()

    def _peer_of(self, greeting: bytes) -> int | None:
        proof: bytes
        peer: int
        proof, peer = _GREETING.unpack(greeting)
        if peer not in self._expected or not hmac.compare_digest(proof, self._proofs[peer]):
            return None
        return peer

    # ---- messages

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> _Send:
        """Returns at once; `tensor` is not to change until the send is waited for."""
        connection = self._connection_to(peer)
        content = tensor.contiguous()
        with _peers_may_fail():
            connection.send(tag, bytes_of(content))
        return _Send(self, connection, content)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> _Receive:
        """Into `tensor`, which is contiguous; of those with the same tag the oldest comes first."""
        connection = self._connection_to(peer)
        receive = _Receive(self, connection, tensor)
        connection.post(tag, receive.arrival)
        return receive

    def _connection_to(self, peer: int) -> Connection:
        self._check()
        if peer not in self._connections:
            self.run(lambda: peer in self._connections)
        return self._connections[peer]

    def _check(self) -> None:
        if self._released:
            raise TransportError("an operation was given up")

    def wait(self, connection: Connection, done: Callable[[], bool]) -> None:
        """Until `done`, which becomes true by what happens on `connection`. Raises
        TransportError."""
        self._check()
        try:
            with _peers_may_fail():
                connection.read()
        except TransportError:
            if not done():  # else the peer left after it
                raise
        if not done():
            self.run(done)

    @property
    def blocked(self) -> bool:
        """Whether something waits until the kernel takes it."""
        return any(connection.blocked for connection in self._connections.values())

    def run(self, done: Callable[[], bool]) -> None:
        """Read and write on all connections until `done`, so that nobody waits for this worker.
        Raises TransportError."""
        while not done():
            self._check()
            for each in self._by_descriptor.values():
                write = select.POLLOUT if each.blocked else 0
                self._poll.modify(each.socket, select.POLLIN | write)
            with pulse.WAITING:
                ready = self._poll.poll()
            for descriptor, events in ready:
                if descriptor == self._wake_read:
                    os.read(self._wake_read, _WAKES)
                elif (connection := self._by_descriptor.get(descriptor)) is not None:
                    self._advance(connection, events)
                elif descriptor in self._acceptor:  # else it was closed just before
                    self._listen_to(descriptor)

    def _advance(self, connection: Connection, events: int) -> None:
        with _peers_may_fail():
            if events & select.POLLOUT:
                connection.write()
            if events & ~select.POLLOUT:
                connection.read()

    # ---- ends

    def wake(self) -> None:
        """Make `run` look whether it is done; from any thread."""
        with self._lock:
            if not self._closed:
                os.write(self._wake_write, b"\0")

    def abort(self) -> None:
        """End every wait, here and at the peers, now and later."""
        with self._lock:
            if self._released or self._closed:
                return
            self._released = True
            os.write(self._wake_write, b"\0")
            for connection in list(self._connections.values()):
                with contextlib.suppress(OSError):  # the peer's end came first
                    connection.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptors; nobody uses the connections any more."""
        with self._lock:
            if self._closed:
                return
            self._closed = self._released = True
            self._acceptor.close()
            for connection in self._connections.values():
                connection.socket.close()
            os.close(self._wake_read)
            os.close(self._wake_write)


class MeshSum:
    """A small sum over all workers, where all are connected with each other; in place of `tensor`.

    Everyone sends its share to everyone and adds up what comes, in the order of the ranks, so the
    result is the same to the last bit on all. It takes one message's time, where a ring or a tree
    takes several; and once a worker's share is out, the others need nothing more of it.
    """

    def __init__(
        self, connections: PeerConnections, tensor: torch.Tensor, rank: int, size: int
    ) -> None:
        """All of `size` ranks begin their sums in the same order. Raises TransportError."""
        self._tensor = tensor
        share = tensor.clone()
        self._shares = [share if peer == rank else torch.empty_like(share) for peer in range(size)]
        others = [peer for peer in range(size) if peer != rank]
        self._sends = [connections.send(share, peer, _SUM_TAG) for peer in others]
        self._receives = [
            connections.receive(self._shares[peer], peer, _SUM_TAG) for peer in others
        ]

    def wait(self) -> None:
        for receive in self._receives:
            receive.wait()
        for send in self._sends:
            send.wait()
        self._tensor.copy_(self._shares[0])
        for share in self._shares[1:]:
            self._tensor.add_(share)
