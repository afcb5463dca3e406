"""Runs the dashboard until it is told to end."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import uvicorn

from oobleck.cli.dashboard.app import make_app
from oobleck.cli.dashboard.following import Connect
from oobleck.cli.dashboard.hub import Hub
from oobleck.cli.dashboard.live import Streams
from oobleck.cli.dashboard.security.connection import Connection
from oobleck.cli.dashboard.security.guard import Guard
from oobleck.cli.dashboard.security.sessions import Sessions
from oobleck.cli.dashboard.site import Site

#: Connections at a time; with one more a browser is told to come again.
MOST_CONNECTIONS = 500
_LONGEST_END_S = 3


class _Server(uvicorn.Server):
    """Ends the streams of open pages first, which would never end by themselves."""

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
    """`folder`: of the secret; `tls`: files of the certificate and its key."""
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
