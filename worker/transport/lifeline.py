"""A ring of idle connections between the workers of a generation, to notice a death at once.

A worker that computes does not look at its peers' sockets, and one that waits looks at one peer
only; a loss would be noticed when somebody next needs the dead worker, which in a long step is
seconds later. So each worker also keeps a connection to the next rank, watched by a thread of its
own. The kernel closes the sockets of a killed process, whatever it was doing, and that end tells
the neighbour. A host that is stopped or cut off closes nothing: there the kernels exchange
keep-alive probes, which they answer whatever their processes do, and end a silent connection. The
lifeline watches the other connections to peers for silence too. Data on its way makes the kernel
less sure there, so a silent host is asked by one more connection; a refusal is an answer too.

A worker that leaves a generation on purpose says goodbye first.
"""

import contextlib
import errno
import hmac
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from math import ceil

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.acceptor import Acceptor
from oobleck.worker.transport.rendezvous import CONNECT_LIMIT, PROOF_BYTES, RendezvousStore

_GOODBYE = b"\x00"
#: How long a wait for the neighbour may last before it looks whether it is still wanted.
_POLL_S = 0.05
#: The kernel takes no more than 127.
_MOST_QUESTIONS = 100
#: A host that falls silent has answered its two neighbours at different times: at most so many
#: probe intervals apart.
_APART = 1.1
#: How long a host may take to answer one more connection.
_ASK_S = 2.0
_NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
#: Where struct tcp_info of Linux has the milliseconds since the last data and the last answer.
_TCP_INFO = struct.Struct("=52x2I")


class Lifeline:
    """This worker's two places in the ring."""

    def __init__(
        self, rendezvous: RendezvousStore, rank: int, size: int, address: str, *, silence_s: float
    ) -> None:
        """Listen, and put the address into `rendezvous`; before the arrival is complete.

        `silence_s`: without a sign of life for so long a neighbour's host is gone.
        """
        self._silence_s = silence_s
        #: How often the kernels ask, in whole seconds.
        self._every_s = max(1, ceil(silence_s / _MOST_QUESTIONS))
        self._rendezvous = rendezvous
        self._rank = rank
        self._size = size
        self._poll = select.poll()
        self._acceptor = Acceptor(address, PROOF_BYTES, self._poll)
        #: By the neighbour's rank, and in a ring of two both to the same one.
        self._links: list[tuple[int, socket.socket]] = []
        #: Connections that others use; and the ranks whose hosts were asked in vain.
        self._shown: list[tuple[int, socket.socket]] = []
        self._unanswered: set[int] = set()
        self._wake_read, self._wake_write = socket.socketpair()
        #: Whoever of this worker and the watching thread ends last closes the sockets.
        self._left, self._unwatched = threading.Event(), threading.Event()
        self._unwatched.set()
        rendezvous.set(f"lifeline/{rank}", f"{address}:{self._acceptor.port}")

    def connect(self, on_lost: Callable[[str], None], check_wanted: Callable[[], None]) -> None:
        """Close the ring, once all have arrived, and watch it.

        `on_lost` is called at most once, from the watching thread. Raises TransportError, and
        what `check_wanted` raises while it waits.
        """
        if self._size == 1:
            self._acceptor.close()
            return
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        try:
            host, _, port = self._rendezvous.get(f"lifeline/{after}").rpartition(":")
            link = self._rendezvous.dial(after, host, int(port))
            self._links.append((after, link))
            # So that no stranger closes the ring.
            link.sendall(self._rendezvous.proof("lifeline", str(self._rank), str(after)))
            expected = self._rendezvous.proof("lifeline", str(before), str(self._rank))
            with pulse.WAITING:  # the one before may be stopped, and this one is not to blame
                self._links.append((before, self._accept(expected, check_wanted)))
            questions = max(1, ceil(self._silence_s / self._every_s) - 1)
            for _, link in self._links:
                self._keep_alive(link, questions)
        except OSError as error:
            raise TransportError(f"lifeline: {error}") from None
        finally:
            self._acceptor.close()
        self._unwatched.clear()
        links = [link for _, link in self._links]
        watch = threading.Thread(
            target=self._watch, args=(links, on_lost), name="lifeline", daemon=True
        )
        watch.start()

    def show(self, rank: int, link: socket.socket) -> None:
        """Watch one more connection to a peer, for silence alone; from any thread."""
        with contextlib.suppress(OSError):  # whoever uses it sees its end
            self._keep_alive(link, _MOST_QUESTIONS)
            self._shown.append((rank, link))

    def _keep_alive(self, link: socket.socket, questions: int) -> None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # The kernel counts in whole seconds; the first is before the first question.
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self._every_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self._every_s)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, questions)

    def _accept(self, expected: bytes, check_wanted: Callable[[], None]) -> socket.socket:
        deadline = time.monotonic() + CONNECT_LIMIT.total_seconds()
        while time.monotonic() < deadline:
            check_wanted()
            for descriptor, _ in self._poll.poll(1000 * _POLL_S):
                heard = self._acceptor.hear(descriptor) if descriptor in self._acceptor else None
                if heard is not None:
                    link, said = heard
                    if hmac.compare_digest(said, expected):
                        link.settimeout(_POLL_S)
                        return link
                    link.close()
        raise TimeoutError("the neighbour did not connect")

    def _watch(self, links: Sequence[socket.socket], on_lost: Callable[[str], None]) -> None:
        try:
            self._wait_for_an_end(links, on_lost)
        finally:
            self._unwatched.set()
            if self._left.is_set():
                self._dispose(links)

    def _wait_for_an_end(
        self, links: Sequence[socket.socket], on_lost: Callable[[str], None]
    ) -> None:
        # Not select: a worker of a large cluster has descriptors beyond its limit of 1024.
        watched = {link.fileno(): link for link in links}
        poll = select.poll()
        for descriptor in (*watched, self._wake_read.fileno()):
            poll.register(descriptor, select.POLLIN)
        while watched:
            silent = self._asks_in_vain()
            wait_s = 0 if silent else self._every_s
            ready = [descriptor for descriptor, _ in poll.poll(1000 * wait_s)]
            if self._wake_read.fileno() in ready:
                return
            if silent:
                on_lost(f"a peer's host does not answer for {self._silence_s:.0f} s")
                return
            for descriptor in ready:
                poll.unregister(descriptor)
                link = watched.pop(descriptor)
                said, how = b"", "a neighbour's lifeline closed"
                try:
                    said = link.recv(1)
                except TimeoutError:
                    how = f"a neighbour's host does not answer for {self._silence_s:.0f} s"
                except OSError:  # a reset is an end like any other
                    pass
                if said != _GOODBYE:
                    on_lost(how)
                    return

    def _asks_in_vain(self) -> bool:
        """Whether a host that is silent on a shown connection does not answer another one. A
        death elsewhere is told later by one such question at most: one in vain is the last."""
        for rank, link in tuple(self._shown):
            if _silent_s(link) >= self._silence_s - _ASK_S and not answers(link):
                self._unanswered.add(rank)
                return True
        return False

    def silent(self) -> list[int]:
        """Ranks of peers whose hosts give no sign of life, for about as long as makes one lost: of
        a way that is cut the workers at both ends know, whoever of them leaves first."""
        limit_s = self._silence_s - _APART * self._every_s
        links = (*self._links, *self._shown)
        return sorted(self._unanswered | {r for r, link in links if _silent_s(link) >= limit_s})

    def close(self, *, goodbye: bool) -> None:
        """Leave the ring; without goodbye the neighbours take it for a death. May be repeated."""
        self._wake_write.close()
        self._acceptor.close()
        links, self._links = self._links, []
        for _, link in links:
            with contextlib.suppress(OSError):
                if goodbye:
                    link.sendall(_GOODBYE)
                link.shutdown(socket.SHUT_RDWR)
        self._left.set()
        if self._unwatched.is_set():
            self._dispose([link for _, link in links])

    def _dispose(self, links: Sequence[socket.socket]) -> None:
        for link in (*links, self._wake_read):
            link.close()


def _silent_s(link: socket.socket) -> float:
    """Since the host at the other end gave a sign of life; 0 where the system does not tell."""
    try:
        told = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (AttributeError, OSError):
        return 0.0
    data_ms, answer_ms = _TCP_INFO.unpack(told)
    return float(min(data_ms, answer_ms)) / 1e3


def answers(link: socket.socket) -> bool:
    """Whether the host at the other end takes or refuses one more connection."""
    try:
        host = link.getpeername()[:2]
    except OSError:
        return True  # it has ended, which whoever uses it sees
    try:
        socket.create_connection(host, _ASK_S).close()
    except OSError as error:  # any other is a refusal, or trouble of this host's own
        return not isinstance(error, TimeoutError) and error.errno not in _NO_WAY
    return True
