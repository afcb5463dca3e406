"""The way between two ends, over loopback: who may measure, and that nobody else gets anything."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from oobleck.core.orders import Call
from oobleck.host.doctor.way import Listener, measure
from oobleck.host.doctor.ways import conclude

SECRET, OTHER = bytes(32), bytes([1]) * 32
HERE = "127.0.0.1"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener(HERE, SECRET, seconds=60.0) as listening:
        yield listening


def call(port: int, most_bytes: int = 0) -> Call:
    return Call(address=HERE, port=port, most_bytes=most_bytes, seconds=2.0)


def test_what_is_measured(listener: Listener) -> None:
    way = measure(call(listener.port, 4 << 20), SECRET, HERE)
    assert way.problem == ""
    assert 0 < way.least_s <= way.median_s
    assert min(way.there_bytes_per_s, way.back_bytes_per_s) > 0
    assert way.sent_bytes == 4 << 20
    assert (way.mtu, way.arrived) == (65536, 65536)
    nothing = measure(call(listener.port), SECRET, "")
    assert (nothing.problem, nothing.there_bytes_per_s, nothing.sent_bytes) == ("", 0.0, 0)


def test_who_has_another_secret_measures_nothing(listener: Listener) -> None:
    assert measure(call(listener.port, 1 << 20), OTHER, HERE).problem != ""
    assert measure(call(listener.port), SECRET, HERE).problem == ""


def test_what_listens_in_its_place_is_found_out() -> None:
    with Listener(HERE, OTHER, seconds=60.0) as stranger:
        assert measure(call(stranger.port), SECRET, HERE).problem != ""


def test_strangers_are_told_nothing_and_hold_nobody_up(listener: Listener) -> None:
    with contextlib.ExitStack() as strangers:
        for _ in range(20):
            silent = strangers.enter_context(socket.create_connection((HERE, listener.port)))
        silent.sendall(b"x" * 64)
        silent.settimeout(30)
        said = bytearray()
        with contextlib.suppress(ConnectionError):
            while part := silent.recv(1024):
                said += part
        # A number that is of no use to it, or nothing where there are too many.
        assert len(said) in (0, 32)
    deadline = time.monotonic() + 30
    while measure(call(listener.port), SECRET, HERE).problem:
        assert time.monotonic() < deadline, "strangers are dropped"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.connect((HERE, listener.port))
        stranger.send(b"x" * 1000)
        stranger.settimeout(0.2)
        with pytest.raises(TimeoutError):
            stranger.recv(1024)


def test_a_way_that_takes_long_is_told(listener: Listener) -> None:
    with socket.create_server((HERE, 0)) as late, contextlib.ExitStack() as ends:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while data := source.recv(1024):
                    time.sleep(0.01)
                    target.sendall(data)

        def relay() -> None:
            with contextlib.suppress(OSError):
                caller = ends.enter_context(late.accept()[0])
                called = ends.enter_context(socket.create_connection((HERE, listener.port)))
                threading.Thread(target=pass_on, args=(caller, called), daemon=True).start()
                pass_on(called, caller)

        relaying = threading.Thread(target=relay, daemon=True)
        relaying.start()
        way = measure(call(late.getsockname()[1]), SECRET, HERE)
        ends.close()
        relaying.join(30)
    assert (way.problem, way.arrived) == ("", 0)
    assert way.least_s >= 0.02
    well = measure(call(listener.port), SECRET, HERE)
    found = list(conclude({("n1", "n2"): way, ("n2", "n1"): well}))
    assert [(f.check, f.level) for f in found if f.level != "pass"] == [("latency", "slow")]


def test_nobody_listens() -> None:
    with Listener(HERE, SECRET, seconds=60.0) as listening:
        port = listening.port
    assert measure(call(port), SECRET, HERE).problem == "connection refused"


def test_the_port_is_closed_when_its_time_is_over() -> None:
    with Listener(HERE, SECRET, seconds=0.0) as listening:
        deadline = time.monotonic() + 30
        while measure(call(listening.port), SECRET, HERE).problem != "connection refused":
            assert time.monotonic() < deadline, "it closes by itself"
