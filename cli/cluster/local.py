"""`oobleck local`: a master and some agents on this machine, in the foreground."""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
import psutil

from oobleck.cli.cluster.cluster import Cluster
from oobleck.cli.output.progress import shown_if_long
from oobleck.core.units import enough_bytes, format_bytes
from oobleck.host.address import split_address
from oobleck.host.command import USAGE, CommandFailed
from oobleck.host.detection import MODES, Mode
from oobleck.host.ipc.endpoint import DEFAULT_MASTER, check_insecure
from oobleck.host.security.credentials import make_private
from oobleck.host.system.files import below_home
from oobleck.host.system.process import end_signals

#: Refuse more than this unless --oversubscribe is given.
WORKERS_PER_CORE = 16
#: Memory of an agent with its warm process, and of each worker, before any model.
NODE_BYTES = 350 << 20
WORKER_BYTES = 150 << 20

SAME_SIGNAL_S = 0.5

EVERYBODY = (
    "--insecure: every user of this host, and every container on its network, can submit jobs to "
    "this cluster; they read and write files as you, and run code as you if --allow-code or "
    "--accept-code permits it"
)

EPILOG = """\b
Output, one fact per line:
  master 127.0.0.1:4600 pid 123
  agent n1 pid 124
  ...
  credentials /home/me/.oobleck/local/20260102-030405/pki/operator
  state /home/me/.oobleck/local/20260102-030405
  ready
\b
The cluster has its own authority, in STATE/pki, and accepts only you: 'oobleck' and agents that
you start on this machine find your credentials by themselves.
\b
A daemon that dies is reported in a line, and the cluster continues, even without its master. An
agent that dies is restarted after 2 s with its own flags, and later each time if it keeps dying. An
agent that was told to end is not restarted, nor is the master. Each daemon's own output is in
STATE/log. Exit codes: 0 ended by Ctrl-C or SIGTERM, 1 the cluster could not start or all its
daemons died, 2 wrong usage."""


@click.command(epilog=EPILOG)
@click.option(
    "--nodes",
    type=click.IntRange(min=1),
    required=True,
    metavar="N",
    help="Agents, named n1 to nN.",
)
@click.option(
    "--workers-per-node",
    "--workers",
    "workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="G",
    help="Workers of each agent.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Journal, metrics and logs; a used one is continued.  "
    "[default: a new folder in ~/.oobleck/local]",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Where the master listens; port 0: any free port.  [default: {DEFAULT_MASTER}, or a "
    "free port if that is in use]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Require no credentials: every user of this host, and every container on its network, "
    "can then control the cluster. Jobs load only code that --allow-code names.",
)
@click.option(
    "--allow-code",
    multiple=True,
    metavar="PREFIX",
    help="As for oobleck-agent: jobs may load functions of this package, or of modules below this "
    "directory; * for any. May be repeated.  [default: any if the cluster is for you "
    "alone, else only installed plugins]",
)
@click.option(
    "--accept-code/--no-accept-code",
    default=None,
    help="As for oobleck-agent: jobs may bring their own code in a wheel.  [default: if the "
    "cluster is for you alone]",
)
@click.option(
    "--fault-plan",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="For drills: a JSON list of faults to inject.",
)
@click.option(
    "--detection",
    type=click.Choice(MODES),
    default="balanced",
    show_default=True,
    help="How fast faults are detected: sets all time-outs.",
)
@click.option(
    "--keep-jobs",
    metavar="N",
    help="How many ended jobs 'oobleck jobs' lists.  [default: the master's]",
)
@click.option(
    "--forget-nodes-after",
    metavar="TIME",
    help="Forget a node that has been lost for this long.  [default: the master's]",
)
@click.option("--no-restart", is_flag=True, help="For drills: do not restart agents that die.")
@click.option("--master-flag", "master_flags", multiple=True, hidden=True)
@click.option("--oversubscribe", is_flag=True, help="Start more workers than fit on this machine.")
def local(
    nodes: int,
    workers: int,
    state_dir: str | None,
    listen: str | None,
    insecure: bool,
    allow_code: tuple[str, ...],
    accept_code: bool | None,
    fault_plan: Path | None,
    detection: Mode,
    keep_jobs: str | None,
    forget_nodes_after: str | None,
    no_restart: bool,
    master_flags: tuple[str, ...],
    oversubscribe: bool,
) -> int:
    """Run a whole cluster on this machine, in the foreground.

    It is one oobleck-master and N oobleck-agents, the same programs as on real hosts. Ctrl-C ends
    all of them.
    """
    memory = check_room(nodes, workers, oversubscribe)
    address = choose_address(listen)
    if insecure:
        warn_of_everybody(address)
    given = {"--keep-jobs": keep_jobs, "--forget-nodes-after": forget_nodes_after}
    kept = (part for flag, value in given.items() if value is not None for part in (flag, value))
    flags = ("--detection", detection, *kept, *master_flags)
    restart = not no_restart
    if state_dir == "":
        raise CommandFailed("--state-dir: is empty; name a directory, or leave it out", USAGE)
    folder = fresh_state_dir() if state_dir is None else Path(state_dir)
    cluster = Cluster(
        folder,
        master_flags=flags,
        allow_code=allow_code,
        accept_code=accept_code,
        insecure=insecure,
        restart=restart,
    )
    with interrupts():
        try:
            with shown_if_long("the master starts"):
                cluster.start(address, nodes, workers, memory // (nodes * workers), fault_plan)
            cluster.wait_until_ready()
            cluster.watch(threading.Event())
        except KeyboardInterrupt:
            pass
        finally:
            cluster.stop()
    return 0


def check_room(nodes: int, workers: int, oversubscribe: bool) -> int:
    """Return the machine's memory, if the cluster fits or is forced."""
    memory = psutil.virtual_memory()
    total, cores = nodes * workers, os.cpu_count() or 1
    needed = nodes * NODE_BYTES + total * WORKER_BYTES
    problem = None
    if total > WORKERS_PER_CORE * cores:
        problem = (
            f"{total} workers exceed {WORKERS_PER_CORE} per core on the {cores} cores of "
            f"this machine (limit: {WORKERS_PER_CORE * cores})"
        )
    elif needed > memory.available:
        problem = (
            f"{nodes} nodes with {workers} workers need about {enough_bytes(needed)} of memory, "
            f"and {format_bytes(memory.available)} are free"
        )
    if problem and not oversubscribe:
        raise CommandFailed(f"{problem}; start fewer, or pass --oversubscribe", USAGE)
    return int(memory.total)


def choose_address(listen: str | None) -> str:
    """Return an address to listen on; only the default may be replaced by a free port."""
    if listen is None:
        if _problem_with(DEFAULT_MASTER) is None:
            return DEFAULT_MASTER
        return DEFAULT_MASTER.rpartition(":")[0] + ":0"
    try:
        split_address(listen)
    except ValueError as error:
        raise CommandFailed(f"--listen: {error}", USAGE) from error
    if (problem := _problem_with(listen)) is not None:
        raise CommandFailed(
            f"--listen {listen}: {problem}; choose another one (port 0: any free port)", USAGE
        )
    return listen


def _problem_with(address: str) -> str | None:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return None


def warn_of_everybody(address: str) -> None:
    """Warn of --insecure. Raise CommandFailed if it would admit users beyond this host."""
    try:
        check_insecure("--insecure", address)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error
    click.echo(f"oobleck: warning: {EVERYBODY}", err=True)


def fresh_state_dir() -> Path:
    """Make a new folder for every start, so that an old cluster's jobs do not return."""
    try:
        base = below_home("~/.oobleck/local")
    except ValueError as error:
        raise CommandFailed(f"{error}, by --state-dir", USAGE) from error
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        make_private(base)
        for number in range(1, 1000):
            path = base / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
                return path
    except OSError as error:
        raise CommandFailed(
            f"cannot make a folder in {base}: {error.strerror}; pass --state-dir", USAGE
        ) from error
    raise CommandFailed(f"{base} is full; pass --state-dir", USAGE)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """Make SIGTERM, and SIGHUP unless ignored, act like Ctrl-C.

    A second signal kills at once, unless it follows so soon that it is the same one: sent to the
    whole process group and forwarded, too.
    """
    first_at: float | None = None

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal first_at
        now = time.monotonic()
        first_at = first_at or now
        if first_at == now or now - first_at > SAME_SIGNAL_S:
            raise KeyboardInterrupt

    signals = (signal.SIGTERM, *end_signals())
    before = {signum: signal.signal(signum, interrupt) for signum in signals}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
