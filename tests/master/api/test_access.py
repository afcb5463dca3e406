"""Every RPC with every role against a real master, and what certificates bind."""

import contextlib
import re
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from oobleck.cli.cluster.authority import make_authority
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.security import pki
from oobleck.host.security.credentials import MASTER_NAME, ROLES, Credentials, read_credentials
from oobleck.master.api.access import ALLOWED, JOIN
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.health import CHECK
from oobleck.proto.secure import open_aio_channel
from oobleck.proto.status import register_message
from support import holders, loops
from support.agent import Agent, facts
from support.commands import run
from support.masters import MasterProcess

DENIED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
#: What gRPC says where a message met the end of its call: how that ended is not known then.
CROSSED = (grpc.StatusCode.INTERNAL, "Internal error from Core")
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
} | {CHECK: health_pb2.DESCRIPTOR.services_by_name["Health"].methods_by_name["Check"]}


async def call(endpoint: Endpoint, path: str, *requests: Any) -> grpc.StatusCode:
    """The code that the call ends with; OK as soon as there is any reply."""
    async with open_aio_channel(endpoint, ()) as channel:
        found = await _call(channel, path, requests)
    return found[0]


async def _call(
    channel: grpc.aio.Channel, path: str, requests: tuple[Any, ...]
) -> tuple[grpc.StatusCode, str]:
    while (found := await _once(channel, path, requests)) == CROSSED:
        pass
    return found


async def _once(
    channel: grpc.aio.Channel, path: str, requests: tuple[Any, ...]
) -> tuple[grpc.StatusCode, str]:
    method = METHODS[path]
    encoded = [request.SerializeToString() for request in requests] or [b""]
    try:
        if method.client_streaming:
            stream = channel.stream_stream(path)(iter(encoded), timeout=240)
            await anext(aiter(stream), None)
        elif method.server_streaming:
            await anext(aiter(channel.unary_stream(path)(encoded[0], timeout=240)), None)
        else:
            await channel.unary_unary(path)(encoded[0], timeout=240)
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""


def test_the_table_has_every_rpc_and_no_other() -> None:
    assert set(ALLOWED) == set(METHODS)


def test_viewers_only_read_and_workers_have_nothing() -> None:
    viewers = {path.rpartition("/")[2] for path, roles in ALLOWED.items() if "viewer" in roles}
    reading = {"ListJobs", "GetJob", "WatchJob", "GetProfile", "GetPlanning", "ListNodes"}
    assert viewers == reading | {"Events", "Metrics", "Logs", "Renew", "Check"}
    assert [path for path, roles in ALLOWED.items() if "worker" in roles] == ["/oobleck.Pki/Renew"]
    assert not [path for path, roles in ALLOWED.items() if len(roles) == len(ROLES) - 1]


@pytest.mark.parametrize("holder", [*ROLES, "token"])
def test_who_may_call_what(
    running: MasterProcess, everyone: dict[str, Credentials], holder: str
) -> None:
    async def walk() -> dict[str, bool]:
        endpoint = Endpoint(address=running.address, credentials=everyone[holder])
        async with open_aio_channel(endpoint, ()) as channel:
            codes = {path: (await _call(channel, path, ()))[0] for path in METHODS}
        return {path: code not in DENIED for path, code in codes.items()}

    expected = {path: holder in roles for path, roles in ALLOWED.items()}
    expected[JOIN] = holder == "token"
    assert loops.run(walk()) == expected


def test_strangers_get_no_connection(
    running: MasterProcess, everyone: dict[str, Credentials], tmp_path: Path
) -> None:
    make_authority(tmp_path / "other", ())
    other = read_credentials(tmp_path / "other" / "operator")
    foreign = Credentials(
        authority=everyone["operator"].authority, certificate=other.certificate, key=other.key
    )
    for credentials in (None, foreign):
        endpoint = Endpoint(address=running.address, credentials=credentials)
        for path in METHODS:
            assert loops.run(call(endpoint, path)) is grpc.StatusCode.UNAVAILABLE


def test_who_shows_no_certificate_reaches_health_and_nothing_else(
    running: MasterProcess,
) -> None:
    told = re.search(r"health is served.* address=(\S+)", running.errors.read_text())
    assert told is not None

    async def walk() -> dict[str, grpc.StatusCode]:
        async with grpc.aio.insecure_channel(told[1]) as channel:
            return {path: (await _call(channel, path, ()))[0] for path in METHODS}

    nothing = dict.fromkeys(METHODS, grpc.StatusCode.UNIMPLEMENTED)
    assert loops.run(walk()) == {**nothing, CHECK: grpc.StatusCode.OK}


def test_an_operator_does_not_talk_to_a_false_master(
    running: MasterProcess, everyone: dict[str, Credentials], folder: Path, tmp_path: Path
) -> None:
    """An agent of the same cluster that listens in the master's place is found out."""
    agent = everyone["agent"]
    creds = grpc.ssl_server_credentials(
        [(agent.key, agent.certificate)], agent.authority, require_client_auth=True
    )

    async def ask() -> grpc.StatusCode:
        server = grpc.aio.server()
        port = server.add_secure_port("127.0.0.1:0", creds)
        await server.start()
        try:
            endpoint = Endpoint(address=f"127.0.0.1:{port}", credentials=everyone["operator"])
            return await call(endpoint, "/oobleck.Operator/ListJobs")
        finally:
            await server.stop(0)

    assert loops.run(ask()) is grpc.StatusCode.UNAVAILABLE


def test_a_master_speaks_tls_1_3_alone(
    running: MasterProcess, folder: Path, everyone: dict[str, Credentials]
) -> None:
    def version(newest: ssl.TLSVersion) -> str | None:
        context = ssl.create_default_context(cafile=folder / "ca.crt")
        own = folder / "operator" / "x"
        context.load_cert_chain(own / "client.crt", own / "client.key")
        context.set_alpn_protocols(["h2"])
        context.maximum_version = newest
        host, _, port = running.address.rpartition(":")
        with (
            socket.create_connection((host, int(port)), 30) as plain,
            context.wrap_socket(plain, server_hostname=MASTER_NAME) as secured,
        ):
            return secured.version()

    assert version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
    with pytest.raises((ssl.SSLError, ConnectionError)):
        version(ssl.TLSVersion.TLSv1_2)


def test_oobleck_calls_no_master_that_speaks_older_tls(
    folder: Path, everyone: dict[str, Credentials]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "master.crt", folder / "master.key")
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    problems: list[str] = []

    def serve(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            try:
                context.wrap_socket(connection, server_side=True).close()
            except (ssl.SSLError, ConnectionError) as error:
                problems.append(str(error))

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve, args=(server,))
        serving.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        shown = ("--credentials", str(folder / "operator" / "x"))
        assert run("nodes", "--master", address, *shown).returncode == 4
        serving.join()
    assert "NO_SHARED_CIPHER" in problems[0]


def test_an_agent_speaks_for_its_own_node_alone(
    running: MasterProcess, everyone: dict[str, Credentials]
) -> None:
    endpoint = Endpoint(address=running.address, credentials=everyone["agent"])

    def register(name: str) -> pb.AgentMessage:
        agent = Agent(facts(name))
        return pb.AgentMessage(
            incarnation=agent.facts.incarnation, register=register_message(agent.registration())
        )

    path = "/oobleck.Control/Session"
    assert loops.run(call(endpoint, path, register("n2"))) is grpc.StatusCode.PERMISSION_DENIED
    assert loops.run(call(endpoint, path, register("some-agent"))) is grpc.StatusCode.OK
    operator = Endpoint(address=running.address, credentials=everyone["operator"])

    async def names() -> list[str]:
        async with open_aio_channel(operator, ()) as channel:
            stub = rpc.OperatorStub(channel)  # type: ignore[no-untyped-call]
            return [node.node for node in (await stub.ListNodes(pb.ListNodesRequest())).nodes]

    assert loops.run(names()) == ["some-agent"]


def test_a_registration_that_comes_too_soon_after_others_is_not_even_read(
    running: MasterProcess, folder: Path
) -> None:
    """Nor if another node registers in between."""
    often, other = (
        holders.signed(folder, pki.Identity(role="agent", name=name)) for name in ("often", "other")
    )

    async def register(agent: Credentials) -> pb.Refused | None:
        endpoint = Endpoint(address=running.address, credentials=agent)
        async with open_aio_channel(endpoint, ()) as channel:
            call = channel.stream_stream("/oobleck.Control/Session")(iter([b"no message"]))
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in call:
                    return pb.MasterMessage.FromString(answer).refused
        return None

    async def until_refused() -> pb.Refused:
        while (told := await register(often)) is None:
            await register(other)
        return told

    told = loops.run(until_refused())
    assert told.reason == "node often registers more often than once a second"
    assert told.temporary


def test_an_expired_certificate_is_good_for_nothing(running: MasterProcess, folder: Path) -> None:
    expired = holders.signed(folder, pki.Identity(role="operator", name="late"), life_s=1.0)
    while pki.expiry(expired.certificate) > time.time():
        time.sleep(0.05)
    endpoint = Endpoint(address=running.address, credentials=expired)
    assert loops.run(call(endpoint, "/oobleck.Operator/ListJobs")) in (
        *DENIED,
        grpc.StatusCode.UNAVAILABLE,
    )


@pytest.mark.parametrize(
    "uri",
    [
        "oobleck://root/x",
        "oobleck://operator",
        "oobleck://operator/a/b",
        "oobleck://operator/../x",
        "oobleck://Operator/x",
        "https://operator/x",
    ],
)
def test_a_certificate_that_says_no_role_is_nobodys(uri: str) -> None:
    class Strange(pki.Identity):
        @property
        def uri(self) -> str:
            return uri

    signer = pki.Authority.new("test")
    key = pki.new_key().public_key()
    with pytest.raises(ValueError, match=r"role|name"):
        pki.identity_of(signer.sign(key, Strange(role="operator", name="x"), 60.0))
