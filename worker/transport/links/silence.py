"""Watch over the hosts at the other ends of links, by their signs of life.

The kernels of both hosts exchange keep-alive probes on an idle connection, which they answer
whatever their processes do, and end a silent one. While data is under way the kernel is less
certain, so there it is asked for the length of the silence. A silent host gets one more connection
attempt; a refusal is an answer too.
"""

import contextlib
import errno
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from math import ceil

from oobleck.worker.transport.links.link import Link

#: The kernel allows at most 127.
_MOST_QUESTIONS = 100
#: Tolerance in probe intervals, since a host that falls silent has last answered its peers at
#: different times.
_APART = 1.1
#: Longest wait for a host's answer to one more connection.
ASK_S = 2.0
#: Errors when a host is unreachable.
NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
#: Milliseconds since the last data and the last answer in Linux' struct tcp_info.
_TCP_INFO = struct.Struct("=52x2I")


class Patience:
    """Limit of a host's silence, and its detection."""

    def __init__(self, silence_s: float) -> None:
        """Set the limit. `silence_s`: silence after which a peer's host is gone."""
        self.silence_s = silence_s
        #: Interval of the kernels' probes, in whole seconds.
        self.every_s = max(1, ceil(silence_s / _MOST_QUESTIONS))

    def watch(self, link: socket.socket) -> None:
        """Have the kernel probe that link."""
        questions = max(1, ceil(self.silence_s / self.every_s) - 1)
        with contextlib.suppress(OSError):  # it has ended
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # The kernel counts in whole seconds; the first is before the first probe.
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.every_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.every_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, questions)

    def is_doubtful(self, link: socket.socket) -> bool:
        """Return whether it is time to ask the host."""
        return silent_s(link) >= self.silence_s - ASK_S

    def is_silent(self, link: socket.socket) -> bool:
        """Return whether the host has been silent for nearly the time of a loss: so both ends of a
        cut connection notice it, whichever of them leaves first."""
        return silent_s(link) >= self.silence_s - _APART * self.every_s


def silent_s(link: socket.socket) -> float:
    """Return the seconds since a sign of life of the host at the other end; 0 where the system does
    not know.
    """
    try:
        info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (AttributeError, OSError):
        return 0.0
    data_ms, answer_ms = _TCP_INFO.unpack(info)
    return float(min(data_ms, answer_ms)) / 1e3


def answers(link: socket.socket) -> bool:
    """Return whether the host at the other end accepts or refuses one more connection."""
    try:
        host = link.getpeername()[:2]
    except OSError:
        return True  # the link has ended, which reading detects
    try:
        socket.create_connection(host, ASK_S).close()
    except OSError as error:  # any other is a refusal, or a fault of this host
        return not isinstance(error, TimeoutError) and error.errno not in NO_WAY
    return True


# ---- Watch over the hosts at the other ends of links, by their signs of life.


class Watch:
    """Watch over the hosts at the other ends of links. Used with the links' lock held, except by
    its own threads."""

    def __init__(
        self,
        silence_s: float,
        lock: threading.RLock,
        members: Callable[[], Sequence[Link]],
        unanswered: Callable[[Link, str], bool],
    ) -> None:
        """Make a watch.

        `silence_s`: silence after which a peer's host is gone; `members`: returns the links to
        members of the present meeting; `unanswered`: called with a link whose host was asked in
        vain, returns whether the link still exists.
        """
        self._lock = lock
        self._members = members
        self._tell_unanswered = unanswered
        self._patience = Patience(silence_s)
        #: Time of the next look at signs of life; hosts being asked; and hosts asked in vain.
        self._next_look = 0.0
        self._asked: set[bytes] = set()
        self._unanswered: set[bytes] = set()

    @property
    def every_s(self) -> float:
        """Interval in seconds at which `look` is needed."""
        return float(self._patience.every_s)

    def add(self, link: Link) -> None:
        self._patience.watch(link.socket)

    def begin(self) -> None:
        """Begin a new meeting."""
        self._unanswered.clear()

    def ended(self, link: Link, why: OSError) -> None:
        """Note the end of a link, if the peer's host did not answer."""
        if isinstance(why, TimeoutError) or why.errno in NO_WAY:
            self._unanswered.add(link.peer)

    def look(self) -> None:
        """Check each link, if it is time: ask hosts whose silence is doubtful."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + self.every_s
        for link in self._members():
            if link.peer not in self._asked and self._patience.is_doubtful(link.socket):
                self._asked.add(link.peer)
                threading.Thread(target=self._ask, args=(link,), name="ask", daemon=True).start()

    def _ask(self, link: Link) -> None:
        """Ask a silent host for one more connection."""
        answered = answers(link.socket)
        with self._lock:
            self._asked.discard(link.peer)
            why = f"a peer's host does not answer for {self._patience.silence_s:.0f} s"
            if not answered and self._tell_unanswered(link, why):
                self._unanswered.add(link.peer)

    def silent(self) -> set[bytes]:
        """Return the members of this meeting whose hosts give no sign of life."""
        return self._unanswered | {
            link.peer for link in self._members() if self._patience.is_silent(link.socket)
        }
