"""The master's gRPC server: its address, services, access control, and shutdown.

Must not know flags.
"""

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
from collections.abc import Iterator

import grpc

from oobleck.host.address import leaves_host, own_address
from oobleck.host.ipc.endpoint import OwnMaster, announced
from oobleck.host.metrics import MetricsPage, bind
from oobleck.host.system.files import place_of
from oobleck.host.system.process import end_signals
from oobleck.master.api.access import MOST_CALLS, Access, server_options
from oobleck.master.api.agent_service import ControlService
from oobleck.master.api.connections import Connections
from oobleck.master.api.interceptor import CallInterceptor, Calls, Shares
from oobleck.master.api.operator_service import OperatorService
from oobleck.master.api.pki_service import AuthorityFolder, PkiService
from oobleck.master.api.wheels import Wheels
from oobleck.master.config import MasterConfig, Unusable
from oobleck.master.loop import Master
from oobleck.master.metrics import Collector
from oobleck.master.metrics.own import Parts
from oobleck.master.planning.process import PlanningProcess
from oobleck.master.process import LOCK
from oobleck.master.state.trust import was_revoked
from oobleck.master.storage.journal import Journal
from oobleck.master.tracking import Tracking
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.health import ALIVE, READY, HealthPort, Probes, health_handler

log = logging.getLogger(__name__)

#: Warning of a master without an authority.
IN_THE_CLEAR = (
    "this master asks nobody who they are: every user of this host, and every container on its "
    "network, may submit jobs, which run as the agents' users; 'oobleck local' is for you alone, "
    "and so is a master with an authority in its state directory ('oobleck pki init')"
)
#: Longest wait at shutdown for calls that are answered already.
_ENDING_S = 2.0


async def serve(config: MasterConfig, journal: Journal) -> None:
    """Serve until a signal ends it. Raises Unusable, StorageFailed, OutputFailed."""
    stopped = asyncio.Event()
    # Registered only by a process that holds the lock and has replayed the journal.
    probes = {ALIVE: lambda: True, READY: lambda: not stopped.is_set()}
    # Bind all ports before the start is journaled: a master that nobody can reach must not begin.
    with _taken(config.listen):  # if two options name one port, blame the other option
        listening = _open_page(config.metrics_listen)
        health = _open_health(config.health_listen, probes)
    authority = _read_authority(config)
    config = dataclasses.replace(
        config,
        cluster=authority.cluster if authority is not None else "",
        # By the lock file, not the folder: a copy may be put into the original's folder.
        place=place_of(config.state_dir / LOCK),
    )
    planner = PlanningProcess()
    master = Master(config, journal, planner=planner)
    connections = Connections(master.now, functools.partial(was_revoked, master.state.trust))
    access = Access(
        master.state.trust,
        master.sessions.refused,
        secured=authority is not None,
        allowed=connections.allowed,
        denied=connections.denied,
    )
    calls = Calls(master.now)
    server = grpc.aio.server(
        options=server_options(config.timing, secured=authority is not None),
        interceptors=(CallInterceptor(access.check, calls, Shares(connections.denied)),),
        maximum_concurrent_rpcs=MOST_CALLS,
    )
    _add_services(server, master, authority, config)
    server.add_generic_rpc_handlers((health_handler(probes),))
    host, port = config.listen.rpartition(":")[0], _bind(server, config.listen, authority)
    # Connections are accepted only from here on, so a caller that waited for that finds the
    # credentials.
    announcement = announce(config, f"{host}:{port}")
    tracking = Tracking(master, functools.partial(_show, config, authority))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, *end_signals()):
        loop.add_signal_handler(signum, stopped.set)
    await server.start()
    if health is not None:
        await health.start()
    tasks = [
        asyncio.create_task(master.run()),
        asyncio.create_task(planner.run()),
        asyncio.create_task(connections.watch(port)),
        asyncio.create_task(tracking.run(own_address(host, port))),
        asyncio.create_task(Wheels(config.code).run(lambda: master.state.jobs.values())),
    ]
    if listening is not None:
        parts = Parts(
            master=master, planner=planner, calls=calls, connections=connections, journal=journal
        )
        page = MetricsPage(listening, Collector(parts).read)
        tasks.append(asyncio.create_task(page.run()))
    stopping = asyncio.create_task(stopped.wait())
    try:
        print(f"listening on {host}:{port}", flush=True)  # noqa: T201 - callers wait for this line
        await asyncio.wait((*tasks, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        # gRPC would log a traceback for each open call, which is cancelled now.
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        master.close()
        if health is not None:
            await health.stop()
        announcement.close()
        await server.stop(grace=0.1)
        await _all_ended()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _add_services(
    server: grpc.aio.Server,
    master: Master,
    authority: AuthorityFolder | None,
    config: MasterConfig,
) -> None:
    pki = PkiService(master, authority.authority if authority else None, config.certificate_life_s)
    # The generated functions have no types.
    rpc.add_ControlServicer_to_server(ControlService(master), server)  # type: ignore[no-untyped-call]
    rpc.add_OperatorServicer_to_server(OperatorService(master), server)  # type: ignore[no-untyped-call]
    rpc.add_PkiServicer_to_server(pki, server)  # type: ignore[no-untyped-call]


def _bind(server: grpc.aio.Server, listen: str, authority: AuthorityFolder | None) -> int:
    """Bind the server's port, and return its number. Raises Unusable."""
    try:
        if authority is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, authority.server_credentials())
    except RuntimeError as error:
        raise Unusable(f"--listen {listen} cannot be bound; choose another one") from error


@contextlib.contextmanager
def _taken(listen: str) -> Iterator[None]:
    """Bind the address while the block runs, so that no other process can. Raises Unusable, with a
    clearer reason than gRPC's."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        probe = socket.socket(family, kind)
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
        probe.listen()
    except OSError as error:
        raise Unusable(
            f"--listen {listen} cannot be bound ({error.strerror}); choose another address or port"
        ) from error
    with probe:
        yield


def _open_page(address: str | None) -> socket.socket | None:
    """Bind the port for metrics; None: no metrics are served. Raises Unusable."""
    try:
        return bind("--metrics-listen", address) if address is not None else None
    except ValueError as error:
        raise Unusable(str(error)) from error


def _open_health(address: str | None, probes: Probes) -> HealthPort | None:
    """Open the health port; None: health is not served without a certificate. Raises Unusable."""
    try:
        return HealthPort("--health-listen", address, probes) if address is not None else None
    except ValueError as error:
        raise Unusable(str(error)) from error


def _read_authority(config: MasterConfig) -> AuthorityFolder | None:
    """Read the authority's folder; None: the service is in the clear. Raises Unusable."""
    if config.pki is None:
        return None
    try:
        return AuthorityFolder(config.pki)
    except ValueError as error:
        raise Unusable(f"--pki: {error}") from error


def announce(config: MasterConfig, address: str) -> contextlib.ExitStack:
    """Let processes of this user find the master and its authority until the stack is closed."""
    stack = contextlib.ExitStack()
    if config.pki is None:
        log.warning(IN_THE_CLEAR)
        return stack
    own = OwnMaster(pki=config.pki, private=not leaves_host(config.listen))
    try:
        stack.enter_context(announced(address, own))
    except OSError as error:
        fields = {"reason": error.strerror, "credentials": str(own.operator)}
        log.warning("your own commands do not find this master's credentials", extra=fields)
    return stack


def _show(config: MasterConfig, authority: AuthorityFolder | None) -> tuple[str, ...]:
    """Return the flags with which a process of the master's own connects as a viewer. Raises
    OSError."""
    if authority is None:
        return ("--insecure",)
    authority.make_viewer(config.viewer)
    return ("--credentials", str(config.viewer))


async def _all_ended() -> None:
    """Wait for the calls, which outlive their server by some turns of the event loop: cancelled
    then, each logs a traceback."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_ENDING_S)
