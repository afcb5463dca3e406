"""Run of the dashboard until it is told to end, and its connections.

uvicorn waits without limit for an incomplete request. Here such a connection is closed: otherwise a
few hundred silent ones would exclude all browsers.
"""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from oobleck.cli.dashboard.app import make_app
from oobleck.cli.dashboard.following import Connect
from oobleck.cli.dashboard.hub import Hub
from oobleck.cli.dashboard.live import Streams
from oobleck.cli.dashboard.security.guard import Guard
from oobleck.cli.dashboard.security.sessions import Sessions
from oobleck.cli.dashboard.site import Site

#: Interval of checks; a client that completes no request between two of them is disconnected.
REQUEST_S = 10.0


class Connection(H11Protocol):
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._looking is not None:
            self._looking.cancel()
        super().connection_lost(exc)

    def _look_again(self) -> None:
        self._looking = self.loop.call_later(REQUEST_S, self._look, self.cycle)

    def _look(self, before: object) -> None:
        """Check the connection. `before`: newest request at the last check."""
        is_waited_for = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_waited_for and self.cycle is before:
            self.transport.abort()
        else:
            self._look_again()


#: Most connections; a further browser is asked to retry.
MOST_CONNECTIONS = 500
_LONGEST_END_S = 3


class _Server(uvicorn.Server):
    """Server that first ends the streams of open pages, which are otherwise endless."""

    def __init__(self, config: uvicorn.Config, streams: Streams) -> None:
        super().__init__(config)
        self._streams = streams

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._streams.closing.set()
        await super().shutdown(sockets)


def run(
    listening: socket.socket,
    *,
    connect: Connect,
    master: str,
    key: bytes,
    folder: Path,
    session_s: float,
    names: Sequence[str],
    tls: tuple[Path, Path] | None,
) -> None:
    """Serve until the end. `folder`: folder of the secret; `tls`: files of certificate and key."""
    host = listening.getsockname()[0]

    async def serving() -> None:
        site = Site(
            master=master,
            connect=connect,
            hub=Hub(connect),
            sessions=Sessions(key, folder, lasts_s=session_s),
            is_tls=tls is not None,
            streams=Streams(),
        )
        config = uvicorn.Config(
            Guard(make_app(site), listen_host=host, names=names),
            access_log=False,
            date_header=False,
            http=Connection,
            limit_concurrency=MOST_CONNECTIONS,
            log_level="warning",
            proxy_headers=False,
            server_header=False,
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
            timeout_graceful_shutdown=_LONGEST_END_S,
            ws="none",
        )
        await _Server(config, site.streams).serve(sockets=[listening])

    asyncio.run(serving())
