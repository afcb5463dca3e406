"""The health port over a real socket: what it answers, and that nothing else is there."""

import socket
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from oobleck.proto.health import ALIVE, CHECK, READY, HealthPort
from support import loops

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


async def ask(channel: grpc.aio.Channel, service: str) -> Any:
    """What it answers, or the code that the call ends with."""
    call = channel.unary_unary(
        CHECK,
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=HealthCheckResponse.FromString,
    )
    try:
        return (await call(HealthCheckRequest(service=service), timeout=240)).status
    except grpc.aio.AioRpcError as error:
        return error.code()


def with_port(ready: Callable[[], bool], *services: str) -> list[Any]:
    async def run() -> list[Any]:
        port = HealthPort("--health-listen", "127.0.0.1:0", {ALIVE: lambda: True, READY: ready})
        await port.start()
        try:
            async with grpc.aio.insecure_channel(port.address) as channel:
                return [await ask(channel, service) for service in services]
        finally:
            await port.stop()

    return loops.run(run())


def test_a_daemon_is_alive_and_ready_or_not_yet() -> None:
    answers = iter([False, True])
    found = with_port(lambda: next(answers), ALIVE, READY, READY, "oobleck.Operator")
    assert found == [SERVING, NOT_SERVING, SERVING, grpc.StatusCode.NOT_FOUND]


@pytest.mark.parametrize("address", ["", "4601", "no.such.host.invalid:4601"])
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ValueError, match=r"^--health-listen.*(HOST:PORT|choose another)"):
        HealthPort("--health-listen", address, {})


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"^--health-listen {address} cannot be bound"):
            HealthPort("--health-listen", address, {})
