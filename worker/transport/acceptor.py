"""Accepts connections on a port of the worker's own, and reads the greeting of each caller.

A greeting has a fixed size and shows who calls. Nobody waits for a caller that stays silent, and
there is a limit on how many of those there may be: beyond it the oldest is dropped, so strangers
cannot use up the worker's open files. Must not know who is welcome.
"""

import contextlib
import select
import socket

#: Callers whose greeting is not complete. A peer sends it as it calls.
MOST = 256


class Acceptor:
    """A listener, and the connections that it has accepted; all of them in one poll.

    One thread uses it, and asks it only about descriptors that are its own.
    """

    def __init__(self, address: str, greeting_bytes: int, poll: select.poll) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._greeting_bytes = greeting_bytes
        self._poll = poll
        self._poll.register(self._listener, select.POLLIN)
        #: By their descriptors, the oldest first.
        self._callers: dict[int, tuple[socket.socket, bytearray]] = {}

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._callers or descriptor == self._listener.fileno()

    def hear(self, descriptor: int) -> tuple[socket.socket, bytes] | None:
        """Read what there is on one of these descriptors. Returns a caller whose greeting is
        complete, and the greeting; the connection is the asker's from then on."""
        if descriptor == self._listener.fileno():
            self._let_in()
            return None
        caller, greeting = self._callers[descriptor]
        try:
            part = caller.recv(self._greeting_bytes - len(greeting))
        except BlockingIOError:
            return None
        except OSError:  # a stranger went away
            part = b""
        greeting += part
        if part and len(greeting) < self._greeting_bytes:
            return None
        self._poll.unregister(caller)
        del self._callers[descriptor]
        if len(greeting) < self._greeting_bytes:
            caller.close()
            return None
        return caller, bytes(greeting)

    def _let_in(self) -> None:
        # The caller may have gone again.
        with contextlib.suppress(BlockingIOError, ConnectionError):
            caller, _ = self._listener.accept()
            caller.setblocking(False)
            self._callers[caller.fileno()] = caller, bytearray()
            self._poll.register(caller, select.POLLIN)
        if len(self._callers) > MOST:
            oldest, _ = self._callers.pop(next(iter(self._callers)))
            self._poll.unregister(oldest)
            oldest.close()

    def close(self) -> None:
        """Accept nobody any more. May be repeated."""
        if self._listener.fileno() < 0:
            return
        self._poll.unregister(self._listener)
        self._listener.close()
        for caller, _ in self._callers.values():
            self._poll.unregister(caller)
            caller.close()
        self._callers.clear()
