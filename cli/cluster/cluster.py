"""Cluster on this machine: its daemons, from their start to the report of their ends.

Daemons die with this process, however it ends. The module that starts them ensures that, because
code between fork and exec is unsafe beside gRPC's threads. Must not know flags, or how the cluster
is used.
"""

import contextlib
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click

from oobleck.host.address import leaves_host
from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.display import printable
from oobleck.host.ipc.endpoint import Endpoint, choose_endpoint
from oobleck.host.security.credentials import OPERATOR, make_private
from oobleck.host.system.process import signal_name, with_parent

# ---- one daemon


#: Time for agents to end: they give their workers 2 s. The master is stopped after them.
AGENT_GRACE_S = 3.3
MASTER_GRACE_S = 1.0
#: Pause before a daemon that died is restarted. If it lives for less than QUICK_S each time, the
#: pause doubles, up to the longest.
RESTART_S = 2.0
QUICK_S = 10.0
LONGEST_RESTART_S = 30.0
_TAIL_BYTES = 4096


def restart_pause_s(quick_ends: int) -> float:
    """Return the pause before a restart, after `quick_ends` consecutive early ends."""
    return float(min(LONGEST_RESTART_S, RESTART_S * 2 ** min(10, max(0, quick_ends - 1))))


class Child:
    """Daemon whose output goes to a file."""

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], log: Path, *, piped: bool = False
    ) -> None:
        """Start the daemon. `piped`: its standard output can be read from `process.stdout`."""
        self.name = name
        self.arguments = tuple(arguments)
        self.log = log
        #: Whether its end has been reported.
        self.reported = False
        #: Time of its restart; None: none is planned.
        self.due: float | None = None
        self._module, self._piped = module, piped
        self._quick_ends = 0
        self.start()

    def start(self) -> None:
        """Start the daemon, or restart it after it has ended."""
        self.reported, self.due, self._started_at = False, None, time.monotonic()
        with open(self.log, "ab", opener=_for_its_owner) as output:
            self.process = subprocess.Popen(
                [*with_parent(self._module), *self.arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if self._piped else output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def has_died(self) -> bool:
        """True if it failed: it ended neither by a requested stop nor by refusing its arguments."""
        return self.process.returncode not in (None, 0, USAGE)

    def plan_restart(self) -> float:
        """Plan a restart; return the pause in seconds."""
        now = time.monotonic()
        self._quick_ends = self._quick_ends + 1 if now - self._started_at < QUICK_S else 0
        pause_s = restart_pause_s(self._quick_ends)
        self.due = now + pause_s
        return pause_s

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def how_it_ended(self) -> str:
        """Return `was killed by SIGKILL` or `ended with exit code 2: its last line`."""
        code = self.process.returncode
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        last = self.last_line() if code else ""  # no reason is needed after an ordered end
        return f"ended with exit code {code}" + (f": {last}" if last else "")

    def last_line(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""


def _for_its_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def stop(master: Child | None, agents: Sequence[Child]) -> None:
    """End all of them within five seconds; a second call kills at once."""
    everyone = [*agents, *([master] if master else [])]
    try:
        _end(agents, AGENT_GRACE_S)
        _end([master] if master else [], MASTER_GRACE_S)
    finally:
        for child in everyone:
            if child.alive:
                child.process.kill()
        for child in everyone:
            child.process.wait()


def _end(children: Sequence[Child], grace_s: float) -> None:
    for child in children:
        if child.alive:
            child.process.send_signal(signal.SIGINT)  # SIGTERM would drain an agent's node
    deadline = time.monotonic() + grace_s
    while any(child.alive for child in children) and time.monotonic() < deadline:
        time.sleep(0.02)


# ---- all daemons


MASTER_TIMEOUT_S = 30.0
READY_TIMEOUT_S = 60.0


class Cluster:
    """Daemons of one cluster, from their start to the report of their ends."""

    def __init__(
        self,
        state_dir: Path,
        tell: Callable[[str], None] | None = None,
        master_flags: Sequence[str] = (),
        *,
        allow_code: Sequence[str] = (),
        accept_code: bool | None = None,
        insecure: bool = False,
        restart: bool = False,
    ) -> None:
        """Prepare a cluster.

        `tell`: prints or keeps a line; None: it is printed. `master_flags`: optional flags of the
        master. `allow_code`, `accept_code`: the agents' flags; by default any code, if only this
        user can submit jobs. `insecure`: no authority; open to everybody on this host. `restart`:
        restart agents that die.
        """
        self._restart, self._insecure = restart, insecure
        self._master_flags = tuple(master_flags)
        self._allow_code, self._accept_code = tuple(allow_code), accept_code
        self._state_dir = state_dir.absolute()
        self._tell = tell or say
        self.master: Child | None = None
        self.agents: list[Child] = []
        self.address = ""
        #: Credentials of the operator; None: the cluster requires none.
        self.credentials: Path | None = None

    @property
    def endpoint(self) -> Endpoint:
        return choose_endpoint(self.address, self.credentials, insecure=self._insecure)

    def start(
        self, address: str, nodes: int, workers: int, memory: int, fault_plan: Path | None
    ) -> None:
        logs = self._state_dir / "log"
        try:
            make_private(self._state_dir)
            make_private(logs)
            (logs / "master.log").touch(0o600)
        except OSError as error:
            raise CommandFailed(
                f"--state-dir {self._state_dir}: {error.strerror}; choose another", USAGE
            ) from error
        arguments = ["--listen", address, "--state-dir", str(self._state_dir)]
        arguments += self._make_authority()
        arguments += self._master_flags
        self.master = Child("master", "oobleck.master", arguments, logs / "master.log", piped=True)
        self.address = self._listening(self.master)
        # A restarted master must listen at the address that the agents know.
        self.master.arguments = ("--listen", self.address, *arguments[2:])
        self._tell(f"master {self.address} pid {self.master.pid}")
        for number in range(1, nodes + 1):
            name = f"n{number}"
            arguments = ["--master", self.address, "--name", name, "--workers", str(workers)]
            arguments += ["--memory-per-worker", str(memory), *self._agent_credentials(name)]
            arguments += self._code_flags(private=not self._insecure and not leaves_host(address))
            if fault_plan is not None:
                arguments += ["--fault-plan", str(fault_plan.absolute())]
            agent = Child(f"agent {name}", "oobleck.agent", arguments, logs / f"agent-{name}.log")
            self.agents.append(agent)
            self._tell(f"agent {name} pid {agent.pid}")
        if self.credentials is not None:
            self._tell(f"credentials {self.credentials}")
        self._tell(f"state {self._state_dir}")

    def _make_authority(self) -> list[str]:
        """Return the master's flags for the cluster's authority, which is made if missing. Raise
        CommandFailed."""
        if self._insecure:
            return ["--insecure"]
        from oobleck.cli.cluster.authority import ADMIN, have_issued, make_authority

        pki = self._state_dir / "pki"
        try:
            if not pki.exists():
                # Make it in a temporary folder, so that no half-made authority stays if this
                # process is killed.
                with tempfile.TemporaryDirectory(prefix=".pki-", dir=self._state_dir) as made:
                    make_authority(Path(made, "pki"), ())
                    Path(made, "pki").rename(pki)
            elif (owner := pki.stat().st_uid) != os.geteuid():
                raise CommandFailed(
                    f"{pki} belongs to another user (uid {owner}), who could control the cluster"
                )
            self.credentials = pki / OPERATOR
            have_issued(pki, self.credentials, "operator", ADMIN)
        except (CommandFailed, OSError) as error:
            reason = error.message if isinstance(error, CommandFailed) else error.strerror
            raise CommandFailed(
                f"--state-dir {self._state_dir}: cannot make an authority for the cluster: "
                f"{reason}; choose another state directory",
                USAGE,
            ) from error
        return ["--pki", str(pki)]

    def _agent_credentials(self, name: str) -> list[str]:
        if self._insecure:
            return ["--insecure"]
        from oobleck.cli.cluster.authority import have_issued

        folder = self._state_dir / "pki" / "nodes" / name
        have_issued(self._state_dir / "pki", folder, "agent", name)
        return ["--credentials", str(folder)]

    def _code_flags(self, *, private: bool) -> list[str]:
        """Return the agents' flags for code of jobs. `private`: only this user submits jobs."""
        allowed = self._allow_code or (("*",) if private else ())
        accepted = private if self._accept_code is None else self._accept_code
        flags = [part for prefix in allowed for part in ("--allow-code", prefix)]
        return [*flags, "--accept-code"] if accepted else flags

    def _listening(self, master: Child) -> str:
        """Return the address from the line that the master prints once it listens."""
        pipe = master.process.stdout
        assert pipe is not None
        readable, _, _ = select.select([pipe], [], [], MASTER_TIMEOUT_S)
        line = pipe.readline().decode().strip() if readable else ""
        if not line.startswith("listening on "):
            if readable:  # its output has ended, so it is ending too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    master.process.wait(MASTER_GRACE_S)
            master.process.kill()
            refused = master.process.wait() == USAGE
            reason = master.last_line().removeprefix("oobleck-master: ")
            reason = reason or f"{master.how_it_ended()}; {master.log} is empty, is the disk full?"
            raise CommandFailed(
                reason if refused else f"the master could not start: {reason}",
                USAGE if refused else FAILED,
            )
        return line.removeprefix("listening on ")

    def wait_until_ready(self) -> None:
        """Wait until every live agent has registered. Raise CommandFailed if the master dies, or
        after READY_TIMEOUT_S."""
        from oobleck.cli.client import MasterClient, Unreachable

        live: set[str] = set()
        deadline = time.monotonic() + READY_TIMEOUT_S
        with MasterClient(self.endpoint) as connection:
            while True:
                self._report_deaths()
                if self.master is None or not self.master.alive:
                    raise CommandFailed("the master died before the cluster was ready", FAILED)
                with contextlib.suppress(Unreachable):  # if it died, the next round reports it
                    live = {node.node for node in connection.nodes() if node.state == "live"}
                missing = [
                    agent.name
                    for agent in self.agents
                    if agent.alive and agent.name.removeprefix("agent ") not in live
                ]
                if not missing and live:
                    break
                if not missing and not any(agent.alive for agent in self.agents):
                    self._report_deaths()  # report those that ended since
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

    def watch(self, over: threading.Event) -> None:
        """Restart agents when they are due, and report deaths, until it is `over`. Raise
        CommandFailed when all are dead."""
        while not over.wait(0.1):
            self._report_deaths()
            for agent in self.agents:
                if agent.due is not None and time.monotonic() >= agent.due:
                    agent.start()
                    self._tell(f"{agent.name} pid {agent.pid}")

    def stop(self) -> None:
        """End all daemons."""
        stop(self.master, self.agents)
        if self.master is not None and self.master.process.stdout is not None:
            self.master.process.stdout.close()

    def _report_deaths(self) -> None:
        children = [*self.agents, *([self.master] if self.master else [])]
        for child in children:
            if not child.alive and not child.reported:
                child.reported = True
                end, then = child.how_it_ended(), self._then(child)
                self._tell(f"{child.name} (pid {child.pid}) {end}; {then}")
        # A daemon that died after the loop has `reported` False still, and gets its turn in the
        # next round.
        if all(child.reported and child.due is None for child in children):
            raise CommandFailed("all daemons have ended", FAILED)

    def _then(self, child: Child) -> str:
        """Plan a restart of `child` and return a sentence about it, or return the command for
        one."""
        if self._restart and child is not self.master and child.has_died:
            return f"it restarts in {child.plan_restart():g} s"
        program = f"oobleck-{child.name.split()[0]}"
        goes_on = "training goes on without it; " if child is self.master else ""
        return f"{goes_on}to restart it: {shlex.join([program, *child.arguments])}"


def say(line: str) -> None:
    click.echo(printable(line))
    sys.stdout.flush()
