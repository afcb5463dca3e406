"""The page of metrics over real sockets: what it answers, and what strangers can do to it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from oobleck.host.metrics import (
    MOST_CONNECTIONS,
    Durations,
    Family,
    MetricsPage,
    Reading,
    bind,
    single,
)
from support import loops

GAUGE = Family("gauge", "probe_bytes", "Some bytes.", ("name",))
COUNTER = Family("counter", "probe_reads_total", "How often it was read.")
HISTOGRAM = Family("histogram", "probe_seconds", "Some times.")
GET = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n"


class Probe:
    def __init__(self) -> None:
        self.reads = 0
        self.durations = Durations((0.001, 0.25, 0.5))

    def read(self) -> Iterator[Reading]:
        self.reads += 1
        yield Reading(GAUGE, {('a "quoted" \n name',): 4096})
        yield single(COUNTER, self.reads)
        yield single(HISTOGRAM, self.durations.read())


@asynccontextmanager
async def served(
    probe: Probe, read_slowly: Callable[[], Iterable[Reading]] = tuple
) -> AsyncIterator[tuple[str, int]]:
    listening = bind("--metrics-listen", "127.0.0.1:0")
    serving = asyncio.create_task(MetricsPage(listening, probe.read, read_slowly).run())
    try:
        yield listening.getsockname()[:2]
    finally:
        serving.cancel()
        await asyncio.wait({serving})


async def ask(address: tuple[str, int], request: str) -> tuple[str, str]:
    """The status and the body."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(request.encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return head.decode().split("\r\n")[0].partition(" ")[2], body.decode()


def test_the_page_is_what_prometheus_reads() -> None:
    async def run() -> tuple[str, str]:
        probe = Probe()
        for seconds in (0.001, 0.3, 1000):
            probe.durations.add(seconds)
        async with served(probe) as address:
            _, plain = await ask(address, GET + "\r\n")
            wish = "accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n\r\n"
            return plain, (await ask(address, GET + wish))[1]

    plain, with_units = loops.run(run())
    found = {family.name: family for family in text_string_to_metric_families(plain)}
    (gauge,) = found["probe_bytes"].samples
    assert (gauge.labels, gauge.value) == ({"name": 'a "quoted" \n name'}, 4096)
    buckets = {s.labels.get("le"): s.value for s in found["probe_seconds"].samples}
    assert (buckets["0.001"], buckets["0.25"], buckets["0.5"], buckets["+Inf"]) == (1, 1, 2, 3)
    units = {one.name: one.unit for one in openmetrics.text_string_to_metric_families(with_units)}
    assert (units["probe_bytes"], units["probe_seconds"], units["probe_reads"]) == (
        "bytes",
        "seconds",
        "",
    )
    assert "process_open_fds" in units


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        ("POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        ("GET /metrics HTTP/1.1\r\nHost: a.example:9460\r\n\r\n", "421 Misdirected Request"),
        ("\x16\x03\x01 no http\r\n\r\n", "400 Bad Request"),
        ("GET /metrics\r\n\r\n", "400 Bad Request"),
        ("GET /metrics HTTP/1.1\r\nX: " + "x" * 100_000, ""),
    ],
)
def test_what_is_no_request_for_it(request_: str, status: str) -> None:
    async def run() -> str:
        probe = Probe()
        async with served(probe) as address:
            try:
                told, _ = await ask(address, request_)
            except ConnectionError:
                told = ""
            assert probe.reads == 0
            assert (await ask(address, GET + "\r\n"))[0] == "200 OK"
            return told

    assert loops.run(run()) == status


@pytest.mark.parametrize(
    ("headers", "served_as"),
    [
        ("Host: 127.0.0.1:9460\r\nACCEPT: Text/Plain, Application/OpenMetrics-Text;q=0.5", "openm"),
        ("host: [::1]:9460\r\nAccept: text/plain;version=0.0.4", "plain"),
        ("Host: ::1\r\nAccept: */*", "plain"),
    ],
)
def test_how_a_reader_may_ask(headers: str, served_as: str) -> None:
    async def run() -> str:
        async with served(Probe()) as address:
            _, page = await ask(address, f"GET /metrics HTTP/1.1\r\n{headers}\r\n\r\n")
            return page

    assert loops.run(run()).endswith("# EOF\n") == (served_as == "openm")


def test_strangers_keep_nobody_from_the_page() -> None:
    async def run() -> None:
        async with served(Probe()) as address:
            silent = [await asyncio.open_connection(*address) for _ in range(3 * MOST_CONNECTIONS)]
            for _, writer in silent:
                writer.write(b"GET /met")
            assert (await ask(address, GET + "\r\n"))[0] == "200 OK"
            # All but the newest ones are closed.
            for reader, _ in silent[:-MOST_CONNECTIONS]:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await reader.readexactly(1)
            for _, writer in silent:
                writer.close()

    loops.run(run())


def test_the_page_is_made_once_a_second_whoever_asks() -> None:
    async def run() -> tuple[int, float]:
        probe, loop = Probe(), asyncio.get_running_loop()
        began = loop.time()
        async with served(probe) as address:
            await asyncio.gather(*(ask(address, GET + "\r\n") for _ in range(MOST_CONNECTIONS)))
        return probe.reads, loop.time() - began

    reads, took_s = loops.run(run())
    assert 1 <= reads <= 1 + took_s


def test_a_page_goes_on_without_who_asked_for_it_first() -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def read_slowly() -> Iterator[Reading]:
        begun.set()
        assert goes_on.wait(60)
        yield from ()

    async def run() -> tuple[Exception | tuple[str, str], list[tuple[str, str]], int]:
        probe = Probe()
        async with served(probe, read_slowly) as address:
            first = asyncio.create_task(ask(address, GET + "\r\n"))
            await asyncio.to_thread(begun.wait, 60)
            others = [
                asyncio.create_task(ask(address, GET + "\r\n")) for _ in range(MOST_CONNECTIONS)
            ]
            (lost,) = await asyncio.gather(first, return_exceptions=True)
            reads = probe.reads
            goes_on.set()
            return lost, await asyncio.gather(*others), reads

    lost, answers, reads = loops.run(run())
    assert isinstance(lost, ConnectionError) or lost == ("", "")
    assert [status for status, _ in answers] == ["200 OK"] * MOST_CONNECTIONS
    assert reads == 1


def test_metrics_that_cannot_be_read_are_answered_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read_slowly() -> Iterator[Reading]:
        raise NotImplementedError("no such file in this kernel")
        yield

    async def run() -> list[str]:
        async with served(Probe(), read_slowly) as address:
            return [(await ask(address, GET + "\r\n"))[0] for _ in range(2)]

    assert loops.run(run()) == ["500 Internal Server Error"] * 2
    assert "no such file in this kernel" in caplog.text


@pytest.mark.parametrize("address", ["", "no port", "127.0.0.1", "127.0.0.1:99999", "192.0.2.1:1"])
def test_an_address_that_cannot_be_served(address: str) -> None:
    with pytest.raises(ValueError, match=r"^--metrics-listen.*(HOST:PORT|choose another)"):
        bind("--metrics-listen", address)
