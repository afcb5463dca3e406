"""Signs of life from the host at the other end of a link.

The kernels of both hosts exchange keep-alive probes on an idle connection, which they answer
whatever their processes do, and end one that stays silent. Data on its way makes the kernel less
sure, so there it is asked how long it has heard nothing. A silent host is asked by one more
connection; a refusal is an answer too."""

import contextlib
import errno
import socket
import struct
from math import ceil

#: The kernel takes no more than 127.
_MOST_QUESTIONS = 100
#: A host that falls silent has answered its peers at different times: at most so many probe
#: intervals apart.
_APART = 1.1
#: How long a host may take to answer one more connection.
ASK_S = 2.0
#: There is no way to a host.
NO_WAY = (errno.EHOSTUNREACH, errno.ENETUNREACH)
#: Where struct tcp_info of Linux has the milliseconds since the last data and the last answer.
_TCP_INFO = struct.Struct("=52x2I")


class Patience:
    """Limit on how long a host may be silent, and the means to find out."""

    def __init__(self, silence_s: float) -> None:
        """`silence_s`: without a sign of life for so long a peer's host is gone."""
        self.silence_s = silence_s
        #: How often the kernels ask, in whole seconds.
        self.every_s = max(1, ceil(silence_s / _MOST_QUESTIONS))

    def watch(self, link: socket.socket) -> None:
        """Have the kernel ask there."""
        questions = max(1, ceil(self.silence_s / self.every_s) - 1)
        with contextlib.suppress(OSError):  # its end came first
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # The kernel counts in whole seconds; the first is before the first question.
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.every_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.every_s)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, questions)

    def is_doubtful(self, link: socket.socket) -> bool:
        """Return whether it is time to ask the host."""
        return silent_s(link) >= self.silence_s - ASK_S

    def is_silent(self, link: socket.socket) -> bool:
        """Return whether the host has given no sign of life for about as long as makes one lost.
        The workers at both ends of a cut connection know that, whichever of them leaves first."""
        return silent_s(link) >= self.silence_s - _APART * self.every_s


def silent_s(link: socket.socket) -> float:
    """Since the host at the other end gave a sign of life; 0 where the system does not tell."""
    try:
        told = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (AttributeError, OSError):
        return 0.0
    data_ms, answer_ms = _TCP_INFO.unpack(told)
    return float(min(data_ms, answer_ms)) / 1e3


def answers(link: socket.socket) -> bool:
    """Return whether the host at the other end takes or refuses one more connection."""
    try:
        host = link.getpeername()[:2]
    except OSError:
        return True  # it has ended, which whoever uses it sees
    try:
        socket.create_connection(host, ASK_S).close()
    except OSError as error:  # any other is a refusal, or trouble of this host's own
        return not isinstance(error, TimeoutError) and error.errno not in NO_WAY
    return True
