"""`oobleck local`: a master and some agents on this machine, in the foreground."""

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

import click

from oobleck.cli.cluster.children import MASTER_GRACE_S, Child, stop
from oobleck.cli.options import DEFAULT_MASTER, FAILED, USAGE
from oobleck.host.address import leaves_host, split_address
from oobleck.host.command import CommandFailed
from oobleck.host.detection import MODES, Mode
from oobleck.host.display import printable
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint
from oobleck.host.system.process import end_signals
from oobleck.planner.units import enough_bytes, format_bytes

#: More than this is a mistake on any machine; --oversubscribe says that it is none.
WORKERS_PER_CORE = 16
#: What an agent with its warm process takes, and each worker on top, before any model.
NODE_BYTES = 350 << 20
WORKER_BYTES = 150 << 20

MASTER_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 60.0
SAME_SIGNAL_S = 0.5

EPILOG = """\b
Output, one fact per line:
  master 127.0.0.1:4600 pid 123
  agent n1 pid 124
  ...
  state /home/me/.oobleck/local/20260102-030405
  ready
\b
A daemon that dies is told in a line, and the cluster goes on, without its master too. An agent is
started again after 2 s with its own flags, later each time where it keeps dying; one that was told
to end is not, nor is the master. Each daemon's own output is in STATE/log. Exit codes: 0 ended by
Ctrl-C or SIGTERM, 1 the cluster could not start or all its daemons died, 2 wrong usage."""


@click.command(epilog=EPILOG)
@click.option("--nodes", type=int, required=True, metavar="N", help="Agents, named n1 to nN.")
@click.option(
    "--workers-per-node",
    "--workers",
    "workers",
    type=int,
    default=1,
    show_default=True,
    metavar="G",
    help="Workers of each agent.",
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Journal, metrics and logs; a used one goes on from there.  "
    "[default: a new folder in ~/.oobleck/local]",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=f"Where the master listens; port 0 is any free one.  [default: {DEFAULT_MASTER}, or a "
    "free port if that is taken; off this host it makes itself an authority in STATE/pki]",
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
    help="How fast faults are found: sets all time-outs.",
)
@click.option(
    "--keep-jobs",
    metavar="N",
    help="Jobs that have ended and are known to 'oobleck jobs'.  [default: the master's]",
)
@click.option(
    "--forget-nodes-after",
    metavar="TIME",
    help="A node that is lost for so long is no longer known.  [default: the master's]",
)
@click.option(
    "--no-restart", is_flag=True, help="For drills: leave it to others to start what dies."
)
@click.option("--master-flag", "master_flags", multiple=True, hidden=True)
@click.option(
    "--oversubscribe", is_flag=True, help="Start more workers than this machine has room for."
)
def local(
    nodes: int,
    workers: int,
    state_dir: Path | None,
    listen: str | None,
    fault_plan: Path | None,
    detection: Mode,
    keep_jobs: str | None,
    forget_nodes_after: str | None,
    no_restart: bool,
    master_flags: tuple[str, ...],
    oversubscribe: bool,
) -> int:
    """Run a whole cluster on this machine, in the foreground: one oobleck-master and N
    oobleck-agents, the same programs as on real hosts. Ctrl-C ends all of them."""
    check_counts(nodes, workers)
    memory = check_room(nodes, workers, oversubscribe)
    address = choose_address(listen)
    given = {"--keep-jobs": keep_jobs, "--forget-nodes-after": forget_nodes_after}
    kept = (part for flag, value in given.items() if value is not None for part in (flag, value))
    flags = ("--detection", detection, *kept, *master_flags)
    restart = not no_restart
    cluster = Cluster(state_dir or fresh_state_dir(), master_flags=flags, restart=restart)
    with interrupts():
        try:
            cluster.start(address, nodes, workers, memory // (nodes * workers), fault_plan)
            cluster.wait_until_ready()
            cluster.watch()
        except KeyboardInterrupt:
            pass
        finally:
            stop(cluster.master, cluster.agents)
    return 0


def check_counts(nodes: int, workers: int) -> None:
    for flag, value in (("--nodes", nodes), ("--workers-per-node", workers)):
        if value < 1:
            raise CommandFailed(f"{flag} {value}: give at least 1", USAGE)


def check_room(nodes: int, workers: int, oversubscribe: bool) -> int:
    """The machine's memory, if the cluster fits or was forced."""
    import psutil

    memory = psutil.virtual_memory()
    total, cores = nodes * workers, os.cpu_count() or 1
    needed = nodes * NODE_BYTES + total * WORKER_BYTES
    problem = None
    if total > WORKERS_PER_CORE * cores:
        problem = (
            f"{total} workers are more than {WORKERS_PER_CORE} per core on the {cores} cores of "
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
    """An address that can be listened on; only the default one may give way to a free port."""
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
            f"--listen {listen}: {problem}; choose another one (port 0: any free one)", USAGE
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


def fresh_state_dir() -> Path:
    """A folder of its own for every start, so that an old cluster's jobs do not come back."""
    base = Path.home() / ".oobleck" / "local"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        base.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            path = base / (stamp if number == 1 else f"{stamp}-{number}")
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise CommandFailed(
            f"cannot make a folder in {base}: {error.strerror}; pass --state-dir", USAGE
        ) from error
    raise CommandFailed(f"{base} is full; pass --state-dir", USAGE)


@contextlib.contextmanager
def interrupts() -> Iterator[None]:
    """SIGTERM and SIGHUP, unless that is ignored, act like Ctrl-C. A second one kills at once,
    unless it comes so early that it is the same one, sent to the whole process group and passed on
    as well."""
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


class Cluster:
    """The daemons, from their start to the line that says how each ended."""

    def __init__(
        self,
        state_dir: Path,
        tell: Callable[[str], None] | None = None,
        master_flags: Sequence[str] = (),
        *,
        restart: bool = False,
    ) -> None:
        """`tell`: what to do with the lines; they are printed otherwise. `master_flags`: more of
        them than the master needs. `restart`: agents that die are started again."""
        self._restart = restart
        self._master_flags = tuple(master_flags)
        self._state_dir = state_dir.absolute()
        self._tell = tell or say
        self.master: Child | None = None
        self.agents: list[Child] = []
        self.address = ""
        #: Of the operator; None: the cluster is in the clear, on this host.
        self.credentials: Path | None = None

    @property
    def endpoint(self) -> Endpoint:
        return choose_endpoint(self.address, self.credentials, insecure=self.credentials is None)

    def start(
        self, address: str, nodes: int, workers: int, memory: int, fault_plan: Path | None
    ) -> None:
        logs = self._state_dir / "log"
        try:
            logs.mkdir(parents=True, exist_ok=True)
            (logs / "master.log").touch()
        except OSError as error:
            raise CommandFailed(
                f"--state-dir {self._state_dir}: {error.strerror}; choose another one", USAGE
            ) from error
        arguments = ["--listen", address, "--state-dir", str(self._state_dir)]
        arguments += self._secure(address)
        arguments += self._master_flags
        self.master = Child("master", "oobleck.master", arguments, logs / "master.log", piped=True)
        self.address = self._listening(self.master)
        # Started again, it must be where the agents look for it.
        self.master.arguments = ("--listen", self.address, *arguments[2:])
        self._tell(f"master {self.address} pid {self.master.pid}")
        for number in range(1, nodes + 1):
            name = f"n{number}"
            arguments = ["--master", self.address, "--name", name, "--workers", str(workers)]
            arguments += ["--memory-per-worker", str(memory), *self._agent_credentials(name)]
            if fault_plan is not None:
                arguments += ["--fault-plan", str(fault_plan.absolute())]
            agent = Child(f"agent {name}", "oobleck.agent", arguments, logs / f"agent-{name}.log")
            self.agents.append(agent)
            self._tell(f"agent {name} pid {agent.pid}")
        if self.credentials is not None:
            self._tell(f"credentials {self.credentials}")
        self._tell(f"state {self._state_dir}")

    def _secure(self, address: str) -> list[str]:
        """What the master needs for it: an authority, where others could reach it."""
        pki = self._state_dir / "pki"
        if not leaves_host(address) and not pki.exists():
            return ["--insecure"]
        from oobleck.cli.cluster.authority import OPERATOR, make_authority

        if not pki.exists():
            make_authority(pki, ())
        self.credentials = pki / OPERATOR
        return ["--pki", str(pki)]

    def _agent_credentials(self, name: str) -> list[str]:
        if self.credentials is None:
            return ["--insecure"]
        from oobleck.cli.cluster.authority import issue

        folder = self._state_dir / "pki" / "nodes" / name
        if not folder.exists():
            issue(self._state_dir / "pki", folder, "agent", name)
        return ["--credentials", str(folder)]

    def _listening(self, master: Child) -> str:
        """The address from the master's line, which it prints once it listens."""
        pipe = master.process.stdout
        assert pipe is not None
        readable, _, _ = select.select([pipe], [], [], MASTER_TIMEOUT_S)
        line = pipe.readline().decode().strip() if readable else ""
        if not line.startswith("listening on "):
            if readable:  # its output has ended, and so does it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    master.process.wait(MASTER_GRACE_S)
            master.process.kill()
            refused = master.process.wait() == USAGE
            reason = master.last_line().removeprefix("oobleck-master: ")
            raise CommandFailed(
                reason if refused else f"the master could not start: {reason}",
                USAGE if refused else FAILED,
            )
        return line.removeprefix("listening on ")

    def wait_until_ready(self) -> None:
        """Until every agent that lives has registered."""
        from oobleck.cli.client import MasterClient, Unreachable

        live: set[str] = set()
        deadline = time.monotonic() + READY_TIMEOUT_S
        with MasterClient(self.endpoint) as connection:
            while True:
                self._tell_deaths()
                if self.master is None or not self.master.alive:
                    raise CommandFailed("the master died before the cluster was ready", FAILED)
                with contextlib.suppress(Unreachable):  # if it died, the next round says so
                    live = {node.node for node in connection.nodes() if node.state == "live"}
                missing = [
                    agent.name
                    for agent in self.agents
                    if agent.alive and agent.name.removeprefix("agent ") not in live
                ]
                if not missing and live:
                    break
                if not missing and not any(agent.alive for agent in self.agents):
                    raise CommandFailed(
                        f"every agent ended before it registered; see {self._state_dir}/log", FAILED
                    )
                if time.monotonic() > deadline:
                    raise CommandFailed(
                        f"{', '.join(missing)} did not register within {READY_TIMEOUT_S:.0f} s; "
                        f"see {self._state_dir}/log",
                        FAILED,
                    )
                time.sleep(0.05)
        self._tell("ready")

    def watch(self) -> None:
        """Until nothing is left to watch."""
        while True:
            self._tell_deaths()
            for agent in self.agents:
                if agent.due is not None and time.monotonic() >= agent.due:
                    agent.start()
                    self._tell(f"{agent.name} pid {agent.pid}")
            time.sleep(0.1)

    def _tell_deaths(self) -> None:
        children = [*self.agents, *([self.master] if self.master else [])]
        for child in children:
            if not child.alive and not child.told:
                child.told = True
                end, then = child.how_it_ended(), self._then(child)
                self._tell(f"{child.name} (pid {child.pid}) {end}; {then}")
        if not any(child.alive or child.due is not None for child in children):
            raise CommandFailed("all daemons have ended", FAILED)

    def _then(self, child: Child) -> str:
        """What becomes of one that has ended."""
        if self._restart and child is not self.master and child.has_died:
            return f"it is started again in {child.plan_restart():g} s"
        program = f"oobleck-{child.name.split()[0]}"
        goes_on = "training goes on without it; " if child is self.master else ""
        return f"{goes_on}to start it again: {shlex.join([program, *child.arguments])}"


def say(line: str) -> None:
    click.echo(printable(line))
    sys.stdout.flush()
