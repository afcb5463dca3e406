"""`oobleck-master`: reads the flags, locks the state directory, serves until it is told to end.

Exit codes: 0 ended as told, 1 the state directory takes no more, 2 the flags or what they name
cannot be used.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
import grpc

from oobleck.host import log
from oobleck.host.address import leaves_host
from oobleck.host.detection import MODES, Detection, Mode, choose
from oobleck.host.endpoint import check_insecure
from oobleck.host.process import allow_open_files, die_with_parent
from oobleck.master import crash, limits
from oobleck.master.access import Access, AccessGuard
from oobleck.master.config import MasterConfig
from oobleck.master.guard import CallGuard
from oobleck.master.journal import Journal, JournalUnusable
from oobleck.master.loop import Master
from oobleck.master.pkiservice import PkiService
from oobleck.master.planningprocess import PlanningProcess
from oobleck.master.service import OperatorService
from oobleck.master.session import ControlService
from oobleck.master.storage import StorageFailed
from oobleck.proto import control_pb2_grpc as rpc

if TYPE_CHECKING:
    from oobleck.master.authority import AuthorityFolder

logger = logging.getLogger(__name__)

#: Open files; with fewer the master can serve no cluster of a thousand nodes.
_FEW_FILES = 4096
#: Longest wait for the ends of calls that are answered already.
_ENDING_S = 2.0


class Unusable(Exception):
    """What the flags name cannot be used; the text is one line with the fix."""


@contextlib.contextmanager
def locked(state_dir: Path) -> Iterator[None]:
    """Hold the state directory against other masters."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise Unusable(
            f"--state-dir {state_dir} cannot be written ({error.strerror}); choose another one"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 20, 0).decode(errors="replace") or "unknown"
            raise Unusable(
                f"--state-dir {state_dir} is in use by another master (pid {holder}); "
                "stop it or choose another directory"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(lock)


def _check_address(listen: str) -> None:
    """Bind the address once, since gRPC says only in its own words why it cannot."""
    host, _, port = listen.rpartition(":")
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise Unusable(
            f"--listen {listen} cannot be bound ({error.strerror}); choose another address or port"
        ) from error


def _read_authority(config: MasterConfig) -> "AuthorityFolder | None":
    """None: the service is in the clear. Raises Unusable."""
    if config.pki is None:
        return None
    from oobleck.master.authority import AuthorityFolder

    try:
        return AuthorityFolder(config.pki)
    except ValueError as error:
        raise Unusable(f"--pki: {error}") from error


def choose_pki(listen: str, state_dir: Path, pki: str | None, *, insecure: bool) -> Path | None:
    """The authority's folder; None: in the clear. Raises ValueError with the flag and the fix."""
    if insecure:
        if pki is not None:
            raise ValueError("--insecure and --pki exclude each other; leave one out")
        check_insecure("--insecure", listen)
        return None
    own = state_dir / "pki"
    if pki is not None:
        return Path(pki).absolute()
    if own.exists():
        return own
    if leaves_host(listen):
        raise ValueError(
            f"--listen {listen}: others than this host could reach the master, so it needs an "
            f"authority; run 'oobleck pki init --dir {own}', or listen on 127.0.0.1"
        )
    return None


async def serve(config: MasterConfig, journal: Journal) -> None:
    """Serve until a signal ends it. Raises Unusable, StorageFailed."""
    _check_address(config.listen)
    authority = _read_authority(config)
    planner = PlanningProcess()
    master = Master(config, journal, planner=planner)
    access = Access(master.state.trust, master.sessions.refused, secured=authority is not None)
    server = grpc.aio.server(
        options=limits.server_options(config.timing),
        interceptors=(AccessGuard(access), CallGuard()),
        maximum_concurrent_rpcs=limits.MOST_CALLS,
    )
    pki = PkiService(master, authority.authority if authority else None, config.certificate_life_s)
    # The generated functions have no types.
    rpc.add_ControlServicer_to_server(ControlService(master), server)  # type: ignore[no-untyped-call]
    rpc.add_OperatorServicer_to_server(OperatorService(master), server)  # type: ignore[no-untyped-call]
    rpc.add_PkiServicer_to_server(pki, server)  # type: ignore[no-untyped-call]
    host = config.listen.rpartition(":")[0]
    try:
        if authority is None:
            port = server.add_insecure_port(config.listen)
        else:
            port = server.add_secure_port(config.listen, authority.server_credentials())
    except RuntimeError as error:
        raise Unusable(f"--listen {config.listen} cannot be bound; choose another one") from error
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    await server.start()
    running = asyncio.create_task(master.run())
    planning = asyncio.create_task(planner.run())
    print(f"listening on {host}:{port}", flush=True)  # noqa: T201 - the line that callers wait for
    stopping = asyncio.create_task(stopped.wait())
    try:
        await asyncio.wait((running, planning, stopping), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (running, planning, stopping):
            task.cancel()
        # Calls that are open now are cancelled, and gRPC tells of each in a traceback.
        logging.getLogger("grpc").setLevel(logging.CRITICAL)
        master.close()
        await server.stop(grace=0.1)
        await _all_ended()
    for task in (running, planning):
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _all_ended() -> None:
    """Calls outlive the server that answers them by some turns of the event loop; one that is
    cancelled in these ends in a traceback."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=_ENDING_S)


def _fail(text: str, code: int = 2) -> NoReturn:
    click.echo(f"oobleck-master: {text}", err=True)
    sys.exit(code)


def _time_out_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Hidden flags that set single time-outs, for tests and drills."""
    for field in reversed(fields(Detection)):
        flag = "--" + field.name.replace("_", "-")
        command = click.option(flag, field.name, type=float, hidden=True)(command)
    return command


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--listen",
    default="127.0.0.1:4600",
    show_default=True,
    metavar="HOST:PORT",
    help="Where agents and operators reach this master; port 0 takes a free one.",
)
@click.option(
    "--state-dir",
    required=True,
    type=click.Path(),
    metavar="DIR",
    help="Journal, metrics, events and logs; a master started on it again goes on from there.",
)
@click.option(
    "--pki",
    type=click.Path(),
    metavar="DIR",
    help="Folder of the cluster's authority, made by 'oobleck pki init'.  [default: pki in "
    "--state-dir, if it is there]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Let everybody on this host do everything, in the clear; on loopback addresses only, "
    "where it is the default without an authority.",
)
@click.option("--exit-with-parent", is_flag=True, help="End when the parent process ends.")
@click.option(
    "--salvage-journal",
    is_flag=True,
    help="Go on with what a damaged journal has before the damage; the rest is kept beside it.",
)
@click.option(
    "--crash-at", metavar="POINT[:COUNT]", help="Die there, as by kill -9 (for tests).", hidden=True
)
@click.option(
    "--detection",
    type=click.Choice(MODES),
    default="balanced",
    show_default=True,
    help="How fast faults are found, against how much delay is no fault: sets all time-outs of "
    "the cluster (docs/operations.md).",
)
@click.option("--certificate-life-s", default=90 * 86_400.0, hidden=True)
@_time_out_flags
def main(
    listen: str,
    state_dir: str,
    pki: str | None,
    insecure: bool,
    certificate_life_s: float,
    exit_with_parent: bool,
    salvage_journal: bool,
    crash_at: str | None,
    detection: Mode,
    **time_outs: float | None,
) -> None:
    """Head of an Oobleck cluster: takes jobs, plans them onto nodes, and plans anew on losses.

    Prints `listening on HOST:PORT` when it is ready. Exit codes: 0 ended by SIGTERM or SIGINT,
    1 the state directory can no longer be written, 2 a flag, or what it names, cannot be used.
    """
    if exit_with_parent:
        die_with_parent(os.getppid())
    log.configure()
    if (files := allow_open_files()) < _FEW_FILES:
        logger.warning(
            "few files may be open: each agent takes one, so raise the hard limit (ulimit -Hn)",
            extra={"limit": files},
        )
    os.umask(0o077)
    if not state_dir:
        _fail("--state-dir: is empty; name a directory, as in --state-dir oobleck-state")
    try:
        timing = choose(detection, time_outs)
        state = Path(state_dir).absolute()
        config = MasterConfig(
            listen=listen,
            state_dir=state,
            timing=timing,
            pki=choose_pki(listen, state, pki, insecure=insecure),
            certificate_life_s=certificate_life_s,
        )
        if crash_at is not None:
            point, _, times = crash_at.partition(":")
            crash.arm(point, int(times or 1))
    except ValueError as error:
        _fail(str(error))
    try:
        with (
            locked(config.state_dir),
            contextlib.closing(
                Journal(config.state_dir / "journal.log", salvage=salvage_journal)
            ) as journal,
        ):
            asyncio.run(serve(config, journal))
    except (Unusable, JournalUnusable) as error:
        _fail(str(error))
    except StorageFailed as failed:
        _fail(str(failed), code=1)


if __name__ == "__main__":
    main()
