"""Thread that reads one stream of the master, through restarts and new credentials.

Owns the stream's connection and its trouble. Must not know what is read.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.options import NO_SUCH_THING
from oobleck.host.command import CommandFailed

#: Connects with the current credentials. Raises CommandFailed or ValueError.
Connect = Callable[[], MasterClient]

#: Pauses between two attempts while the master is away, and while it refuses.
_AGAIN_S = 0.5
_REFUSED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Reason why nothing arrives from the master."""

    line: str
    #: Unix time.
    since: float
    #: Whether the master is unreachable; otherwise it refuses.
    away: bool


class Following:
    def __init__(self, connect: Connect, read: Callable[[MasterClient], None], name: str) -> None:
        """Prepare the thread.

        `read`: reads the stream to its end and calls `heard` meanwhile; called again, it continues
        where it was.
        """
        self._connect = connect
        self._read = read
        self._closed = threading.Event()
        self._client: MasterClient | None = None
        self._lock = threading.Lock()
        #: Current trouble; None: none.
        self.trouble: Trouble | None = None
        #: Whether the stream has ended, or never existed.
        self.ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def heard(self) -> None:
        """Note that something has arrived, so the trouble is over."""
        self.trouble = None

    def close(self) -> None:
        """Drop the connection; the thread ends soon."""
        self._closed.set()
        self._drop()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                client = self._open()
                if client is None:
                    return
                self._read(client)
                self.heard()
                self.ended = True
                self._drop()
                return
            except Unreachable as unreachable:
                self._fail(unreachable, away=True)
                self._closed.wait(_AGAIN_S)
            except (CommandFailed, ValueError) as failure:
                self._fail(failure, away=False)
                self._drop()  # credentials may be renewed meanwhile
                if isinstance(failure, CommandFailed) and failure.exit_code == NO_SUCH_THING:
                    self.ended = True
                    return
                self._closed.wait(_REFUSED_S)

    def _open(self) -> MasterClient | None:
        """Return the connection, opened if needed; None if this is closed."""
        with self._lock:
            if self._closed.is_set():
                return None
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _drop(self) -> None:
        """Close the connection, which ends its streams in any thread."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(ValueError):  # already closed
                client.close()

    def _fail(self, failure: Exception, *, away: bool) -> None:
        self.trouble = trouble(failure, self.trouble, away=away)


def trouble(failure: Exception, before: Trouble | None, *, away: bool) -> Trouble:
    """Return the trouble after `failure`. `before`: the trouble so far."""
    since = before.since if before is not None else time.time()
    return Trouble(line=str(failure).partition(";")[0], since=since, away=away)
