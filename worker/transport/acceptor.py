"""Who calls at a port of a worker's own, and what each has said so far: peers and strangers.

A caller shows who it is in a greeting of a fixed size. Nobody waits for one that is silent, and
only so many may be: of more than that the oldest goes, so strangers cannot use up a worker's open
files. Must not know who is welcome.
"""

import contextlib
import select
import socket

#: Callers that have not said all of their greeting. A peer says it as it calls.
MOST = 256


class Acceptor:
    """A listener, and the connections that it has taken; all of them in one poll.

    One thread uses it; whatever the poll says of descriptors that are not its own is not for it.
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
        """Take in what the poll has for the descriptor, which is one of these. A caller that has
        said its greeting, with that: the connection is the asker's from then on."""
        if descriptor == self._listener.fileno():
            self._let_in()
            return None
        caller, greeting = self._callers[descriptor]
        try:
            part = caller.recv(self._greeting_bytes - len(greeting))
        except BlockingIOError:
            return None
        except OSError:  # a stranger's end says nothing about a peer
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
        # Who has gone again before it was let in is nobody.
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
        """Nobody is expected any more. May be repeated."""
        if self._listener.fileno() < 0:
            return
        self._poll.unregister(self._listener)
        self._listener.close()
        for caller, _ in self._callers.values():
            self._poll.unregister(caller)
            caller.close()
        self._callers.clear()
