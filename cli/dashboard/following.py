"""A thread that reads one stream of the master, through restarts of the master and new credentials.

Owns the connection of that stream and what is wrong with it. Must not know what is read.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.options import NO_SUCH_THING
from oobleck.host.command import CommandFailed

#: A connection with the credentials as they are now. Raises CommandFailed or ValueError.
Connect = Callable[[], MasterClient]

#: Between two tries where the master is away, and where it refuses.
_AGAIN_S = 0.5
_REFUSED_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Why nothing comes from the master."""

    line: str
    #: Unix time.
    since: float
    #: It is not there; else it is, and refuses.
    away: bool


class Following:
    def __init__(self, connect: Connect, read: Callable[[MasterClient], None], name: str) -> None:
        """`read`: reads the stream to its end, calls `heard` on the way, and goes on where it was
        when it is called again."""
        self._connect = connect
        self._read = read
        self._closed = threading.Event()
        self._client: MasterClient | None = None
        self._lock = threading.Lock()
        #: None: all is well.
        self.trouble: Trouble | None = None
        #: The master has nothing more to say, or nothing at all of this.
        self.ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def heard(self) -> None:
        """Something has come."""
        self.trouble = None

    def close(self) -> None:
        """Drop the connection that is no longer read; the thread ends soon."""
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
        """Return the connection, made if there is none; None if this is closed."""
        with self._lock:
            if self._closed.is_set():
                return None
            if self._client is None:
                self._client = self._connect()
            return self._client

    def _drop(self) -> None:
        """The channel ends all that goes through it, in any thread."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(ValueError):  # it is closed
                client.close()

    def _fail(self, failure: Exception, *, away: bool) -> None:
        self.trouble = trouble(failure, self.trouble, away=away)


def trouble(failure: Exception, before: Trouble | None, *, away: bool) -> Trouble:
    """`before`: what was the matter so far."""
    since = before.since if before is not None else time.time()
    return Trouble(line=str(failure).partition(";")[0], since=since, away=away)
