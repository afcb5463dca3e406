"""Whom the kernel lets in at a port that prefers some."""

import contextlib
import socket
from collections.abc import Iterator

import pytest

from oobleck.host.ipc import port

MEMBER, STRANGER = "127.0.0.3", "127.0.0.2"
#: A call that the kernel drops is made again by the caller's own after a second.
SOON_S = 0.3


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        yield listening


def let_in(listening: socket.socket, source: str, count: int) -> int:
    """How many of `count` calls come through at once."""
    with contextlib.ExitStack() as stack:
        calls = [stack.enter_context(socket.socket()) for _ in range(count)]
        for call in calls:
            call.setblocking(False)
            call.bind((source, 0))
            call.connect_ex(listening.getsockname())
        through = 0
        for call in calls:
            call.settimeout(SOON_S if call is calls[0] else 0.001)
            with contextlib.suppress(OSError):
                call.connect(listening.getsockname())
                through += 1
    return through


def test_members_are_let_in_and_of_all_others_a_part(listening: socket.socket) -> None:
    port.favour(listening, [MEMBER, "::1", "fe80::1%eth0"])
    assert let_in(listening, MEMBER, 100) == 100
    assert 100 / port.ONE_OF / 3 < let_in(listening, STRANGER, 100) < 100
    port.favour(listening, [MEMBER, STRANGER])
    assert let_in(listening, STRANGER, 100) == 100
    port.favour(listening, [])
    assert let_in(listening, MEMBER, 100) < 100
    for _ in range(2):
        port.let_all_in(listening)
        assert let_in(listening, STRANGER, 100) == 100


def test_who_is_connected_stays_so_and_is_heard(listening: socket.socket) -> None:
    with socket.socket() as call:
        call.bind((STRANGER, 0))
        call.connect(listening.getsockname())
        accepted, _ = listening.accept()
        with accepted:
            port.favour(listening, [MEMBER])
            call.sendall(b"word")
            assert accepted.recv(4) == b"word"
            # Also what comes through meanwhile goes on by the same rules, which spare it.
            assert let_in(listening, MEMBER, 10) == 10


def test_ipv6_networks_are_told_apart() -> None:
    with contextlib.ExitStack() as stack:
        try:
            listening = stack.enter_context(
                socket.create_server(("::1", 0), family=socket.AF_INET6, backlog=1024)
            )
        except OSError:
            pytest.skip("needs IPv6")

        def through(count: int) -> int:
            calls = [stack.enter_context(socket.socket(socket.AF_INET6)) for _ in range(count)]
            for call in calls:
                call.setblocking(False)
                call.connect_ex(listening.getsockname()[:2])
            found = 0
            for call in calls:
                call.settimeout(SOON_S if call is calls[0] else 0.001)
                with contextlib.suppress(OSError):
                    call.connect(listening.getsockname()[:2])
                    found += 1
            return found

        port.favour(listening, ["::1"])
        assert through(100) == 100
        port.favour(listening, ["2001:db8::1", "127.0.0.1"])
        assert through(100) < 100
