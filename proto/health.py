"""Health service of gRPC (grpc.health.v1), for programs that probe a daemon: a kubelet, a load
balancer, `grpc_health_probe`.

Kubelets cannot show a certificate, so a daemon also serves it on a port of its own, in the clear.
That is another server with this one method: nothing else of the daemon is reachable there. Must not
know daemons.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from oobleck.host.address import joined, split_address
from oobleck.host.metrics import bind

log = logging.getLogger(__name__)

#: By service name: whether it serves, evaluated at each call.
Probes = Mapping[str, Callable[[], bool]]
#: Service that represents the daemon as a whole: it answers, so its event loop runs.
ALIVE = ""
#: Service that tells whether the daemon also does its work.
READY = "ready"
_SERVICE = "grpc.health.v1.Health"
CHECK = f"/{_SERVICE}/Check"

#: A prober opens one connection and leaves; no request is longer than a service's name.
_BOUNDS = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_allowed_incoming_connections", 64),
    ("grpc.max_concurrent_streams", 4),
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 5_000),
    ("grpc.max_connection_age_ms", 30_000),
    ("grpc.max_connection_age_grace_ms", 5_000),
    ("grpc.max_receive_message_length", 4_096),
    ("grpc.max_metadata_size", 4_096),
    ("grpc.absolute_max_metadata_size", 8_192),
)


def health_handler(probes: Probes) -> "grpc.GenericRpcHandler[Any, Any]":
    """Return the health service for a server, without Watch: a stranger's would stay open."""

    async def check(request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        if (probe := probes.get(request.service)) is None:
            details = f"no such service; ask for {' or '.join(map(repr, probes))}"
            await context.abort(grpc.StatusCode.NOT_FOUND, details)
        serving = probe is not None and probe()
        return HealthCheckResponse(
            status=HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING
        )

    method = grpc.unary_unary_rpc_method_handler(
        check,
        request_deserializer=HealthCheckRequest.FromString,
        response_serializer=HealthCheckResponse.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(_SERVICE, {"Check": method})


class HealthPort:
    """Health service at HOST:PORT that anybody may query, in the clear."""

    def __init__(self, flag: str, address: str, probes: Probes) -> None:
        """Bind the port, within a running event loop; port 0 takes a free one. Raises ValueError
        with the flag and the fix."""
        bind(flag, address).close()  # its error is clearer than gRPC's
        self._server = grpc.aio.server(options=_BOUNDS)
        self._server.add_generic_rpc_handlers((health_handler(probes),))
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            text = f"{flag} {address} cannot be bound; choose another address or port"
            raise ValueError(text) from error
        self.address = joined(split_address(address)[0], port)

    async def start(self) -> None:
        await self._server.start()
        log.info("health is served", extra={"address": self.address})

    async def stop(self) -> None:
        await self._server.stop(grace=None)
