"""A ring of idle connections between the workers of a generation: notices a death at once.

A worker that computes does not look at its peers' sockets, and one that waits looks at one peer
only; a loss would be noticed when somebody next needs the dead one, which in a long step is
seconds later. So every worker also keeps a connection to the next rank, watched by a thread of its
own, and its end is the word that the neighbour is gone: the kernel closes the sockets of a killed
process whatever it was doing.

A worker that leaves a generation on purpose says goodbye first.
"""

import contextlib
import hmac
import select
import socket
import threading
import time
from collections.abc import Callable

from oobleck.worker import pulse
from oobleck.worker.errors import TransportError
from oobleck.worker.rendezvous import CONNECT_LIMIT, PROOF_BYTES, Place

_GOODBYE = b"\x00"
#: The greeting comes with the connection; a silent stranger must not keep the neighbour waiting.
_GREETING_LIMIT_S = 10.0
#: How long a wait for the neighbour may last before it looks whether it is still wanted.
_POLL_S = 0.05


class Lifeline:
    """This worker's two places in the ring."""

    def __init__(self, place: Place, rank: int, size: int, address: str) -> None:
        """Listen, and leave word in `place` how to be reached; before the arrival is complete."""
        self._place = place
        self._rank = rank
        self._size = size
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.settimeout(_POLL_S)
        self._links: list[socket.socket] = []
        self._wake_read, self._wake_write = socket.socketpair()
        place.set(f"lifeline/{rank}", f"{address}:{self._listener.getsockname()[1]}")

    def connect(self, on_lost: Callable[[str], None], check_wanted: Callable[[], None]) -> None:
        """Close the ring, once all have arrived, and watch it.

        `on_lost` is called at most once, from the watching thread. Raises TransportError, and
        what `check_wanted` raises while it waits.
        """
        if self._size == 1:
            return
        after, before = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        try:
            host, _, port = self._place.get(f"lifeline/{after}").rpartition(":")
            link = self._place.dial(after, host, int(port))
            self._links.append(link)
            # So that no stranger closes the ring.
            link.sendall(self._place.proof("lifeline", str(self._rank), str(after)))
            expected = self._place.proof("lifeline", str(before), str(self._rank))
            with pulse.WAITING:  # the one before may be stopped, and this one is not to blame
                self._links.append(self._accept(expected, check_wanted))
        except OSError as error:
            raise TransportError(f"lifeline: {error}") from None
        finally:
            self._listener.close()
        threading.Thread(target=self._watch, args=(on_lost,), name="lifeline", daemon=True).start()

    def _accept(self, expected: bytes, check_wanted: Callable[[], None]) -> socket.socket:
        deadline = time.monotonic() + CONNECT_LIMIT.total_seconds()
        while time.monotonic() < deadline:
            check_wanted()
            with contextlib.suppress(TimeoutError):
                link, _ = self._listener.accept()
                if self._greets(link, expected, check_wanted):
                    return link
                link.close()
        raise TimeoutError("the neighbour did not connect")

    @staticmethod
    def _greets(link: socket.socket, expected: bytes, check_wanted: Callable[[], None]) -> bool:
        link.settimeout(_POLL_S)
        deadline = time.monotonic() + _GREETING_LIMIT_S
        said = b""
        while len(said) < PROOF_BYTES and time.monotonic() < deadline:
            check_wanted()
            try:
                part = link.recv(PROOF_BYTES - len(said))
            except TimeoutError:
                continue
            except OSError:  # a stranger's end says nothing about the neighbour
                return False
            if not part:
                return False
            said += part
        return hmac.compare_digest(said, expected)

    def _watch(self, on_lost: Callable[[str], None]) -> None:
        # Not select: a worker of a large cluster has descriptors beyond its limit of 1024.
        watched = {link.fileno(): link for link in self._links}
        poll = select.poll()
        for descriptor in (*watched, self._wake_read.fileno()):
            poll.register(descriptor, select.POLLIN)
        while watched:
            ready = [descriptor for descriptor, _ in poll.poll()]
            if self._wake_read.fileno() in ready:
                return
            for descriptor in ready:
                poll.unregister(descriptor)
                link = watched.pop(descriptor)
                said = b""
                with contextlib.suppress(OSError):  # a reset is an end like any other
                    said = link.recv(1)
                if said != _GOODBYE:
                    on_lost("a neighbour's lifeline closed")
                    return

    def close(self, *, goodbye: bool) -> None:
        """Leave the ring; without goodbye the neighbours take it for a death. May be repeated."""
        self._wake_write.close()
        self._listener.close()
        links, self._links = self._links, []
        for link in links:
            with contextlib.suppress(OSError):
                if goodbye:
                    link.sendall(_GOODBYE)
                link.shutdown(socket.SHUT_RDWR)
