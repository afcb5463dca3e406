"""How many connections one host may have that make no call, and what becomes of more."""

import asyncio
import contextlib
import ctypes
import itertools
import select
import socket
import time
from collections.abc import Collection
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.client import MasterClient
from oobleck.cli.cluster.authority import make_authority
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.ipc.port import Port, packed
from oobleck.host.security.credentials import read_credentials
from oobleck.host.security.pki import Identity
from oobleck.master.api import access
from oobleck.master.api import connections as module
from oobleck.master.api.connections import (
    DENIED_AT_ONCE,
    DENIED_COUNTS_AS,
    DENIED_PER_S,
    MOST_OF_HOLDER,
    MOST_OF_SOURCE,
    MOST_WAITING,
    REFUSED_S,
    Connections,
    Refusals,
    name_of,
    share,
    source_of,
)
from oobleck.master.api.pki_service import AuthorityFolder
from support import loops
from support.masters import PATIENT, master
from support.waiting import until

DEADLINE_S = 240.0
#: Long enough for a connection on this host; one that is refused has no answer at all.
UNANSWERED_S = 0.5
HERE, THERE = "127.0.0.1", "127.0.0.2"
#: Free memory within the heap, and the pieces that it was taken in: too small for a mapping each.
LEFT_BYTES, PIECE_BYTES = 32 << 20, 32 << 10
#: Of a TLS handshake.
BEGUN = b"\x16\x03\x01"
HOSTS = [number.to_bytes(4) for number in range(10)]


def connect(source: str, port: int, timeout_s: float = DEADLINE_S) -> socket.socket:
    return socket.create_connection((HERE, port), timeout_s, source_address=(source, 0))


def reaches_itself_by_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return socket.has_dualstack_ipv6()
    except OSError:
        return False


def grpc_name(connection: socket.socket) -> str:
    return "ipv4:{}:{}".format(*connection.getsockname())


def refuses(source: str, port: int) -> bool:
    try:
        connect(source, port, UNANSWERED_S).close()
    except TimeoutError:
        return True
    return False


def attempt(source: str, port: int) -> socket.socket | None:
    """A connection, if the first packet is answered."""
    try:
        return connect(source, port, 0.1)
    except TimeoutError:
        return None


@given(st.lists(st.integers(1, 12), max_size=8), st.integers(1, 10), st.integers(1, 30))
def test_a_share_is_the_most_that_leaves_room_for_all(
    waiting: list[int], of_source: int, in_all: int
) -> None:
    fitting = [
        most
        for most in range(1, of_source + 1)
        if sum(min(count, most) for count in waiting) <= in_all
    ]
    assert share(waiting, of_source, in_all) == max(fitting, default=1)


def test_who_has_too_many_is_refused_until_that_is_some_time_ago() -> None:
    refusals = Refusals()
    many, few = HOSTS[0], HOSTS[1]
    assert refusals.look({many: MOST_OF_SOURCE, few: 3}, 0.0) == set()
    assert refusals.look({many: MOST_OF_SOURCE + 1, few: 3}, 1.0) == {many}
    assert refusals.look({many: 5, few: 3}, 1.0 + 0.9 * REFUSED_S) == {many}
    assert refusals.look({few: 3}, 1.0 + REFUSED_S) == set()
    # Together they are too many: those with the most are refused, and others have room.
    crowd = dict.fromkeys(HOSTS[:5], MOST_OF_SOURCE)
    assert refusals.look({**crowd, HOSTS[6]: MOST_WAITING // 8}, 100.0) == set(crowd)


def test_sources_are_addresses_and_networks() -> None:
    assert name_of(source_of(packed("10.1.2.3"))) == "10.1.2.3"
    assert name_of(source_of(packed("::ffff:10.1.2.3"))) == "10.1.2.3"
    assert name_of(source_of(packed("2001:db8:1:2:3:4:5:6"))) == "2001:db8:1:2::/64"
    assert name_of(source_of(packed("fe80::1%eth0"))) == "fe80::/64"


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_port_knows_who_is_connected_and_refuses_some(family: socket.AddressFamily) -> None:
    six = family == socket.AF_INET6
    if six and not reaches_itself_by_ipv6():
        pytest.skip("this host has no IPv6")
    address = ("::" if six else HERE, 0)
    with (
        socket.create_server(address, family=family, dualstack_ipv6=six) as server,
        Port(port := server.getsockname()[1]) as watched,
        contextlib.ExitStack() as clients,
    ):
        for source in (HERE, THERE, THERE):
            clients.enter_context(connect(source, port))
        connections = Connections(time.monotonic, lambda who: False)
        here, there = packed(HERE), packed(THERE)
        # The kernel lists a connection a moment after its client has it.
        until(lambda: connections.waiting(watched) == {here: 1, there: 2}, "three connections")
        proven = clients.enter_context(connect(THERE, port))
        connections.allowed(grpc_name(proven), None)
        until(lambda: connections.waiting(watched) == {here: 1, there: 2}, "no other than these")

        watched.refuse({there})
        assert refuses(THERE, port)
        assert not refuses(HERE, port)
        if six:
            networks = {source_of(packed("::1")), there}
            assert clients.enter_context(socket.create_connection(("::1", port), DEADLINE_S))
            assert connections.waiting(watched)[source_of(packed("::1"))] == 1
            watched.refuse(networks)
            assert refuses(THERE, port)
            with pytest.raises(TimeoutError):
                socket.create_connection(("::1", port), UNANSWERED_S)
        watched.refuse(())
        assert not refuses(THERE, port)
        watched.refuse({there}, partly={there})
        tries = [attempt(THERE, port) for _ in range(60)]
        through = [one for one in tries if one is not None]
        # None or all of them come through once in 30 million runs.
        assert 0 < len(through) < len(tries)
        for one in through:
            clients.enter_context(one)
            one.sendall(b"x")
        ports = {one.getsockname()[1] for one in through}
        server.settimeout(DEADLINE_S)
        while ports:
            accepted, peer = server.accept()
            clients.enter_context(accepted).settimeout(DEADLINE_S)
            if peer[1] in ports:
                assert accepted.recv(1) == b"x"
                ports.remove(peer[1])
        watched.refuse(())
        watched.refuse({there})
        watched.__exit__()
        assert not refuses(THERE, port)


def test_a_holder_has_some_connections_that_do_not_wait_until_it_is_revoked() -> None:
    eve, ann = Identity(role="agent", name="eve"), Identity(role="viewer", name="ann")
    token = Identity(role="agent", name="", token=True)
    revoked: set[Identity] = set()
    with (
        socket.create_server((HERE, 0)) as server,
        Port(port := server.getsockname()[1]) as watched,
        contextlib.ExitStack() as clients,
    ):
        connections = Connections(time.monotonic, revoked.__contains__)

        def call(who: Identity) -> socket.socket:
            one = clients.enter_context(connect(HERE, port))
            connections.allowed(grpc_name(one), who)
            return one

        def waiting() -> int:
            return connections.waiting(watched)[packed(HERE)]

        hers = [call(eve) for _ in range(MOST_OF_HOLDER + 2)]
        call(ann)
        assert waiting() == 2
        call(token)
        assert waiting() == 3
        hers[0].close()
        server.accept()[0].close()
        assert waiting() == 2
        revoked.add(eve)
        assert waiting() == MOST_OF_HOLDER + 2


def test_of_a_holder_who_has_too_many_connections_the_newest_are_closed() -> None:
    eve, ann = Identity(role="viewer", name="eve"), Identity(role="viewer", name="ann")
    with (
        socket.create_server((HERE, 0), backlog=2 * MOST_OF_HOLDER) as server,
        socket.create_server((HERE, 0)) as elsewhere,
        Port(server.getsockname()[1]) as watched,
        contextlib.ExitStack() as ends,
    ):
        connections = Connections(time.monotonic, lambda who: False)

        def connection(at: socket.socket) -> socket.socket:
            one = ends.enter_context(connect(HERE, at.getsockname()[1]))
            ends.enter_context(at.accept()[0])
            return one

        def call(who: Identity) -> socket.socket:
            one = connection(server)
            connections.allowed(grpc_name(one), who)
            return one

        def open_ones(some: list[socket.socket]) -> list[socket.socket]:
            ended, _, _ = select.select(some, (), (), 0)
            return [one for one in some if one not in ended]

        others = [connection(server), connection(elsewhere), call(ann)]
        first = [call(eve) for _ in range(MOST_OF_HOLDER)]
        connections.waiting(watched)
        assert open_ones(first) == first
        newest = [call(eve) for _ in range(3)]
        connections.waiting(watched)
        assert [one.recv(1) for one in newest] == [b""] * len(newest)
        assert open_ones([*others, *first]) == [*others, *first]


def test_free_memory_goes_back_once_connections_have_come_or_gone() -> None:
    def anonymous_bytes() -> int:
        fields = Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()
        return int(fields[0]) << 10

    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    with (
        socket.create_server((HERE, 0), backlog=100) as server,
        Port(port := server.getsockname()[1]) as watched,
        contextlib.ExitStack() as clients,
    ):
        connections = Connections(time.monotonic, lambda who: False)
        connections.waiting(watched)
        held: list[int] = []
        for _ in range(LEFT_BYTES // PIECE_BYTES):
            held.append(libc.malloc(PIECE_BYTES))
            ctypes.memset(held[-1], 1, PIECE_BYTES)
        for piece in held[:-1]:  # the last one keeps the heap's end where it is
            libc.free(piece)
        left = anonymous_bytes()
        connections.waiting(watched)
        assert anonymous_bytes() > left - LEFT_BYTES // 2
        clients.enter_context(connect(HERE, port))
        connections.waiting(watched)
        assert anonymous_bytes() < left - LEFT_BYTES // 2
        libc.free(held[-1])


def test_a_crowd_that_makes_no_call_shuts_its_own_door_alone(tmp_path: Path) -> None:
    make_authority(tmp_path / "pki", ())
    with master(tmp_path / "state", "--pki", str(tmp_path / "pki")) as secured:
        port = int(secured.address.rpartition(":")[2])
        operator = read_credentials(tmp_path / "pki" / "operator")
        endpoint = Endpoint(address=secured.address, credentials=operator)
        with MasterClient(endpoint) as before:
            assert before.nodes() == []
            for source, said in ((THERE, b""), ("127.0.0.3", BEGUN)):
                with contextlib.ExitStack() as crowd:
                    deadline = time.monotonic() + DEADLINE_S
                    while f"source={source}" not in secured.errors.read_text():
                        assert time.monotonic() < deadline, "nobody is refused"
                        with contextlib.suppress(TimeoutError):
                            one = crowd.enter_context(connect(source, port, UNANSWERED_S))
                            one.sendall(said)
                    assert refuses(source, port)
                    assert before.nodes() == []
                    with MasterClient(endpoint) as after:
                        assert after.nodes() == []


def test_an_address_with_an_agent_is_never_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent there, or one that ended an hour ago at most, connects again after some attempts."""
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    now = 1000.0
    agent, viewer = Identity(role="agent", name="n1"), Identity(role="viewer", name="ann")

    class Crowded(Port):
        def __init__(self) -> None:
            self.refused = asyncio.Queue[tuple[set[bytes], set[bytes]]]()
            self.proven = {(packed(HERE), 1), (packed(THERE), 1)}

        def peers(self) -> list[tuple[bytes, int]]:
            crowds = itertools.product(map(packed, (HERE, THERE)), range(2, MOST_OF_SOURCE + 3))
            return [*self.proven, *crowds]

        def refuse(self, networks: Collection[bytes], partly: Collection[bytes] = ()) -> None:
            self.refused.put_nowait((set(networks), set(partly)))

    async def run() -> list[tuple[set[bytes], set[bytes]]]:
        nonlocal now
        connections, port = Connections(lambda: now, lambda who: False), Crowded()
        connections.allowed(f"ipv4:{HERE}:1", viewer)
        connections.allowed(f"ipv4:{THERE}:1", agent)
        found = []
        async with asyncio.timeout(DEADLINE_S):
            for passed_s in (0.0, 3500.0, 200.0):
                now += passed_s
                watching = asyncio.create_task(connections._watch(port))
                assert await port.refused.get() == (set(), set())
                found.append(await port.refused.get())
                watching.cancel()
                port.proven.clear()
        return found

    both, there = {packed(HERE), packed(THERE)}, {packed(THERE)}
    assert loops.run(run()) == [(both, there), (both, there), (both, set())]


def test_a_handshake_that_does_not_go_on_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "HANDSHAKE_S", 0.1)
    make_authority(tmp_path, ())

    async def run() -> None:
        server = grpc.aio.server(options=access.server_options(PATIENT, secured=True))
        folder = AuthorityFolder(tmp_path)
        port = server.add_secure_port(f"{HERE}:0", folder.server_credentials())
        await server.start()
        try:
            for said in (b"", BEGUN):
                reading, writing = await asyncio.open_connection(HERE, port)
                writing.write(said)
                async with asyncio.timeout(DEADLINE_S):
                    assert await reading.read() == b""
                writing.close()
        finally:
            await server.stop(None)

    loops.run(run())


def test_who_is_denied_again_and_again_counts_for_many_and_hears_of_it_once_a_second() -> None:
    now = 1000.0
    slept: list[float] = []
    with socket.create_server((HERE, 0)) as server, Port(server.getsockname()[1]) as watched:
        connections = Connections(lambda: now, lambda who: False)

        async def deny(peer: str) -> None:
            denied = asyncio.create_task(connections.denied(peer))
            await asyncio.sleep(0)
            slept.append(connections._denied[peer][0].owe(0, now))
            denied.cancel()

        async def deny_all() -> None:
            for _ in range(round(DENIED_AT_ONCE) + 2):
                await deny("ipv4:127.0.0.2:4242")
            await deny("ipv4:127.0.0.2:4243")

        loops.run(deny_all())
        one_s = 1 / DENIED_PER_S
        assert slept == [*[0.0] * round(DENIED_AT_ONCE), one_s, 2 * one_s, 0.0]
        assert connections.waiting(watched) == {packed(THERE): 2 * DENIED_COUNTS_AS}
        now += REFUSED_S
        assert connections.waiting(watched) == {}
