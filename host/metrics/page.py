"""Page `/metrics` that a daemon serves over HTTP to anybody who can reach it.

So it is bounded in all ways: connections, what they may send, how long they may last, and how often
the metrics are read, however many ask. The server of prometheus_client has a thread for each
connection, for as long as that lasts, and makes a page for each request; only its text format is
used. Must not know what the metrics are.
"""

import asyncio
import contextlib
import logging
import re
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from oobleck.host.address import is_loopback, is_number, joined, split_address
from oobleck.host.metrics.families import Reading, content_type, render

log = logging.getLogger(__name__)

#: Open connections; with one more the oldest is closed.
MOST_CONNECTIONS = 16
#: Time from the connection to the last byte of the answer.
LONGEST_S = 10.0
_MOST_REQUEST_BYTES = 8 << 10
#: Time within which a repeated request gets the same page.
_FRESH_S = 1.0
_PATH = "/metrics"


def bind(flag: str, address: str) -> socket.socket:
    """Return a socket that listens at HOST:PORT; port 0 takes a free one. Raises ValueError with
    the flag and the fix."""
    try:
        host, port = split_address(address)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error
    listening = None
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(target)
        listening.listen(MOST_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        if listening is not None:
            listening.close()
        reason = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{flag} {address} cannot be bound ({reason}); choose another address or port"
        ) from error
    return listening


class MetricsPage:
    def __init__(
        self,
        listening: socket.socket,
        read: Callable[[], Iterable[Reading]],
        read_slowly: Callable[[], Iterable[Reading]] = tuple,
    ) -> None:
        """Make the page. `read` is called in the event loop. `read_slowly`, which may wait for a
        disk, is called in the one thread that makes the text."""
        self._socket = listening
        self._read = read
        self._read_slowly = read_slowly
        #: A thread of its own, since others wait for the event loop's threads. It starts with the
        #: first scrape.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        #: Oldest first.
        self._open: dict[asyncio.Task[None], None] = {}
        #: By format (OpenMetrics or not): the begin of the page, and the task that makes it.
        self._pages: dict[bool, tuple[float, asyncio.Task[bytes | None]]] = {}

    async def run(self) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(
            self._connected, sock=self._socket, limit=_MOST_REQUEST_BYTES
        )
        host, port = self._socket.getsockname()[:2]
        address = joined(host, port)
        log.info("metrics are served", extra={"address": address, "path": _PATH})
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()
            for task in (*self._open, *(making for _, making in self._pages.values())):
                task.cancel()
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open[task] = None

        def ended(task: asyncio.Task[None]) -> None:
            self._open.pop(task, None)
            writer.transport.abort()  # also if cancelled before its begin
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("metrics could not be served", exc_info=error)

        task.add_done_callback(ended)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        strangers = (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
        with contextlib.suppress(*strangers):
            async with asyncio.timeout(LONGEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._answer(head.decode("latin-1")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()

    async def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        match request.split(" "):
            case ["GET", target, version] if version.startswith("HTTP/1."):
                pass
            case [_, _, version] if version.startswith("HTTP/1."):
                return _response(
                    "405 Method Not Allowed", b"metrics can only be read\n", allow="GET"
                )
            case _:
                return _response("400 Bad Request", b"this is no request of HTTP/1.1\n")
        if self._is_rebound(_values(lines, "host")):
            told = b"this page is for this host alone; ask for localhost or an address\n"
            return _response("421 Misdirected Request", told)
        if target.partition("?")[0] != _PATH:
            return _response("404 Not Found", b"metrics are at /metrics\n")
        openmetrics = "application/openmetrics-text" in "".join(_values(lines, "accept"))
        page = await self._page(openmetrics=openmetrics)
        if page is None:
            told = b"the metrics could not be read; the log tells why\n"
            return _response("500 Internal Server Error", told)
        return _response("200 OK", page, content_type(openmetrics=openmetrics))

    def _is_rebound(self, hosts: list[str]) -> bool:
        """Return whether a page for this host alone was requested by another name. A site whose
        name resolves to this host could otherwise read it through a browser here (DNS rebinding).
        """
        if not is_loopback(self._socket.getsockname()[0]):
            return False
        return not all(is_number(host) or host == "localhost" for host in map(_without_port, hosts))

    async def _page(self, *, openmetrics: bool) -> bytes | None:
        """Return the page; None if it could not be made. Concurrent requests share a page in the
        making, which continues if they are cancelled."""
        loop = asyncio.get_running_loop()
        begun, making = self._pages.get(openmetrics, (0.0, None))
        if making is None or (making.done() and loop.time() >= begun + _FRESH_S):
            making = loop.create_task(self._make(openmetrics))
            self._pages[openmetrics] = loop.time(), making
        return await asyncio.shield(making)

    async def _make(self, openmetrics: bool) -> bytes | None:
        try:
            readings = list(self._read())
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._render, readings, openmetrics)
        except Exception:
            log.exception("metrics could not be read")
            return None

    def _render(self, readings: list[Reading], openmetrics: bool) -> bytes:
        return render([*readings, *self._read_slowly()], openmetrics=openmetrics)


def _values(lines: Iterable[str], name: str) -> list[str]:
    """Return the values of a header, in lower case."""
    pairs = (line.lower().partition(":") for line in lines)
    return [value.strip() for found, _, value in pairs if found == name]


def _without_port(host: str) -> str:
    return re.sub(r":[0-9]*$", "", host).strip("[]") if not is_number(host) else host


def _response(
    status: str, body: bytes, kind: str = "text/plain; charset=utf-8", allow: str = ""
) -> bytes:
    allowed = f"Allow: {allow}\r\n" if allow else ""
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"{allowed}Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
