"""Metrics as data, their text for Prometheus, and the page `/metrics` that a daemon serves.

Names follow Prometheus' conventions: base units at the end, `_total` for counters.

Anybody who can reach the page gets it, so connections, what they send, how long they last, and how
often the metrics are read are bounded. The server of prometheus_client has a thread for each
connection and makes a page for each request; only its text format is used. Must not know what the
metrics are.
"""

import asyncio
import contextlib
import logging
import socket
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from oobleck.host.address import is_loopback, is_number, joined, split_address, without_port

if TYPE_CHECKING:
    from prometheus_client import Metric


Kind = Literal["gauge", "counter", "histogram"]
_UNITS = ("seconds", "bytes", "ratio")
#: Upper bounds of buckets, in seconds: SHORT_S for computing, USUAL_S for waits for a disk, a
#: process or a caller, LONG_S for work of many hosts.
SHORT_S = (5e-5, 1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
USUAL_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    60.0,
    600.0,
)
LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True, slots=True)
class Family:
    """Metric family: all series of one name."""

    kind: Kind
    name: str
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters alone end with _total")

    @property
    def base(self) -> str:
        """Name in OpenMetrics."""
        return self.name.removesuffix("_total")

    @property
    def unit(self) -> str:
        """Unit in OpenMetrics; empty for a family that has none, such as a count."""
        last = self.base.rpartition("_")[2]
        return last if last in _UNITS else ""


class Distribution(NamedTuple):
    """Histogram of durations: a count per bucket between bounds, one more above the last bound, and
    the sum of all in seconds."""

    bounds_s: Sequence[float]
    counts: Sequence[int]
    sum_s: float


class Durations:
    """Counter of durations by their length."""

    def __init__(self, bounds_s: Sequence[float] = USUAL_S) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def read(self) -> Distribution:
        """Return the current distribution."""
        return Distribution(self._bounds_s, tuple(self._counts), self._sum_s)


#: By the values of the labels, a tuple of texts.
Values = Mapping[Any, float | Distribution]


class Reading(NamedTuple):
    """Values of a family at one moment."""

    family: Family
    values: Values


def families_of(*modules: ModuleType) -> tuple[Family, ...]:
    """Return all families that the modules define, in order. Raises ValueError if two have the same
    name in OpenMetrics, which ignores `_total`."""
    values = (value for module in modules for value in vars(module).values())
    families = tuple(value for value in values if isinstance(value, Family))
    twice = [name for name, n in Counter(family.base for family in families).items() if n > 1]
    if twice:
        raise ValueError(f"more than one family is called {twice[0]} in OpenMetrics; rename one")
    return families


def single(family: Family, value: float | Distribution) -> Reading:
    """Return the reading of a family without labels."""
    return Reading(family, {(): value})


def content_type(*, openmetrics: bool) -> str:
    """Return the content type of a page."""
    if openmetrics:
        return "application/openmetrics-text; version=1.0.0; charset=utf-8"
    return "text/plain; version=0.0.4; charset=utf-8"


def render(readings: Iterable[Reading], *, openmetrics: bool) -> bytes:
    """Render the page, with the kernel's metrics of this process. OpenMetrics, which newer readers
    request, adds units. Slow: not for an event loop that others wait for."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.openmetrics import exposition
    from prometheus_client.process_collector import ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Read(readings))
    ProcessCollector(registry=registry)
    encode: Callable[[CollectorRegistry], bytes] = (
        exposition.generate_latest if openmetrics else generate_latest
    )
    return encode(registry)


class _Read:
    """Collector for the Prometheus library."""

    def __init__(self, readings: Iterable[Reading]) -> None:
        self._readings = readings

    def collect(self) -> "Iterator[Metric]":
        return map(_metric, self._readings)


def _metric(reading: Reading) -> "Metric":
    from prometheus_client import Metric

    family = reading.family
    metric = Metric(family.base, family.help, family.kind, family.unit)
    for labels, value in reading.values.items():
        named = dict(zip(family.labels, labels, strict=True))
        if isinstance(value, Distribution):
            _add_buckets(metric, named, value)
        else:
            metric.add_sample(family.name, named, value)
    return metric


def _add_buckets(metric: "Metric", labels: dict[str, str], value: Distribution) -> None:
    total = 0
    for bound, count in zip((*map(str, value.bounds_s), "+Inf"), value.counts, strict=True):
        total += count
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, total)
    metric.add_sample(f"{metric.name}_count", labels, total)
    metric.add_sample(f"{metric.name}_sum", labels, value.sum_s)


# ---- page


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
            reason = b"this page is for this host alone; ask for localhost or an address\n"
            return _response("421 Misdirected Request", reason)
        if target.partition("?")[0] != _PATH:
            return _response("404 Not Found", b"metrics are at /metrics\n")
        openmetrics = "application/openmetrics-text" in "".join(_values(lines, "accept"))
        page = await self._page(openmetrics=openmetrics)
        if page is None:
            reason = b"the metrics could not be read; the log tells why\n"
            return _response("500 Internal Server Error", reason)
        return _response("200 OK", page, content_type(openmetrics=openmetrics))

    def _is_rebound(self, hosts: list[str]) -> bool:
        """Return whether a page for this host alone was requested by another name. A site whose
        name resolves to this host could otherwise read it through a browser here (DNS rebinding).
        """
        if not is_loopback(self._socket.getsockname()[0]):
            return False
        return not all(is_number(host) or host == "localhost" for host in map(without_port, hosts))

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
