"""`oobleck chaos`: a drill that strikes a running job with real faults and tells how it takes them.

Owns the course of a drill: when it strikes, what it waits for, what it prints. Whatever was stopped
goes on at the end, however the drill ends.
"""

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from oobleck.cli import options, text
from oobleck.cli.client import Master, Unreachable
from oobleck.cli.strikes import DEFAULT_KINDS, KINDS, Strike, Tally, schedule
from oobleck.cli.victims import check_here, send, victim
from oobleck.host.command import CommandFailed
from oobleck.host.endpoint import Endpoint
from oobleck.planner.units import parse_seconds
from oobleck.proto import control_pb2 as pb

F = TypeVar("F", bound=Callable[..., Any])

#: How often commits are looked for.
_POLL_S = 0.05
#: Steps that have to be committed after a fault for the job to have taken it.
_STEPS = 2
_BEFORE_S = 2.0

EPILOG = "\b\nKinds:\n" + "\n".join(f"  {kind:<12} {what}" for kind, what in KINDS.items())


def span(ctx: click.Context, parameter: click.Parameter, value: str) -> float:
    """Seconds, or a usage error that says how to write them."""
    try:
        return parse_seconds(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def time_option(flag: str, name: str, default: str, help_text: str) -> Callable[[F], F]:
    return click.option(
        flag,
        name,
        default=default,
        show_default=True,
        metavar="TIME",
        callback=span,
        help=help_text,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What the operator wants."""

    job_id: str
    kinds: tuple[str, ...]
    nodes: tuple[str, ...]
    stop_for_s: float
    patience_s: float
    beyond: bool
    restart_command: str | None


@click.command(epilog=EPILOG)
@click.argument("job_id", metavar="JOB")
@time_option("--mtbf", "mtbf_s", "30s", "Mean time between two faults of the cluster.")
@click.option(
    "--kinds",
    default=",".join(DEFAULT_KINDS),
    show_default=True,
    metavar="KIND,...",
    help="What to do; listed below.",
)
@click.option("--nodes", metavar="NAME,...", help="Strike only these.  [default: all live ones]")
@time_option("--for", "for_s", "10m", "How long the drill lasts.")
@time_option("--stop-for", "stop_for_s", "5s", "How long what is stopped stays so.")
@time_option(
    "--patience", "patience_s", "5m", "A job that does not go on for so long has failed the drill."
)
@click.option("--seed", type=int, help="The same seed gives the same faults.  [default: a new one]")
@click.option("--dry-run", is_flag=True, help="Only show when what would be done.")
@click.option("--beyond", is_flag=True, help="Strike also while the job cannot lose a node.")
@click.option(
    "--restart-command",
    metavar="COMMAND",
    help="Starts a killed agent again; {node} in it is the node's name.",
)
@options.master_option
def chaos(
    job_id: str,
    mtbf_s: float,
    kinds: str,
    nodes: str | None,
    for_s: float,
    stop_for_s: float,
    patience_s: float,
    seed: int | None,
    dry_run: bool,
    beyond: bool,
    restart_command: str | None,
    master: Endpoint,
) -> int:
    """Strike the running job JOB with real faults, as a drill: signals to processes of its nodes,
    at random times, while no more is lost than it survives. Each fault is printed, with how long
    the job stood still; a summary comes at the end. Only for nodes of this machine.

    Exit code 1: the job ended badly, or did not go on after a fault.
    """
    wanted = check_kinds(kinds, restart_command)
    seed = seed if seed is not None else time.time_ns() % 1_000_000
    with Master(master) as connection:
        connection.job(job_id)  # an unknown one is told of first
        live = chosen(connection.nodes(), nodes)
        check_here(live)
        orders = Orders(
            job_id=job_id,
            kinds=wanted,
            nodes=tuple(node.node for node in live),
            stop_for_s=stop_for_s,
            patience_s=patience_s,
            beyond=beyond,
            restart_command=restart_command,
        )
        strikes = schedule(seed=seed, mtbf_s=mtbf_s, for_s=for_s, kinds=wanted, nodes=orders.nodes)
        click.echo(f"seed {seed}")
        if dry_run:
            for strike in strikes:
                click.echo(f"{text.seconds(strike.at_s):>12}  {strike.kind} {strike.node}")
            return 0
        return Drill(connection, orders).run(list(strikes), for_s)


def check_kinds(kinds: str, restart_command: str | None) -> tuple[str, ...]:
    wanted = tuple(kind.strip() for kind in kinds.split(","))
    for kind in wanted:
        if kind not in KINDS:
            raise click.UsageError(f"--kinds: no kind {kind!r}; there are {', '.join(KINDS)}")
    if "kill-agent" in wanted and restart_command is None:
        raise click.UsageError(
            "--kinds kill-agent: nobody starts a killed agent again; say how with "
            "--restart-command 'systemctl restart oobleck-agent', or leave the kind out"
        )
    return wanted


def chosen(known: Sequence[pb.NodeInfo], names: str | None) -> list[pb.NodeInfo]:
    live = {node.node: node for node in known if node.state == "live"}
    if names is None:
        if not live:
            raise CommandFailed("no node is live", options.NO_SUCH_THING)
        return [live[name] for name in sorted(live)]
    wanted = sorted({name.strip() for name in names.split(",")})
    if missing := [name for name in wanted if name not in live]:
        raise CommandFailed(
            f"--nodes: {', '.join(missing)} not live; live are {', '.join(sorted(live)) or 'none'}",
            options.NO_SUCH_THING,
        )
    return [live[name] for name in wanted]


class _JobEnded(Exception):
    """There is nothing to strike any more."""


class Drill:
    """One drill from its first look at the job to the summary."""

    def __init__(self, master: Master, orders: Orders) -> None:
        self._master = master
        self._orders = orders
        self._tally = Tally(began_at=time.monotonic())
        self._began = time.time()
        self._status: pb.JobStatus | None = None
        #: Stopped processes, and when they go on.
        self._stopped: dict[int, float] = {}

    def run(self, strikes: Sequence[Strike], for_s: float) -> int:
        recovered = True
        try:
            for strike in strikes:
                self._pass_until(self._tally.began_at + strike.at_s)
                self._await_ready()
                recovered = self._strike(strike)
                if not recovered:
                    break
            if recovered:
                self._pass_until(self._tally.began_at + for_s)
        except _JobEnded:
            click.echo(f"{self._orders.job_id} {self._status.state if self._status else 'ended'}")
        except KeyboardInterrupt:
            click.echo("the drill ends early")
        finally:
            self._let_go(all_of_them=True)
            self._summarise()
        failed = self._status is not None and self._status.state in ("failed", "cancelled")
        return 0 if recovered and not failed else options.FAILED

    # ---- watching

    def _look(self) -> pb.JobStatus | None:
        """Take note of what the job has done; None while the master is away."""
        self._let_go()
        time.sleep(_POLL_S)
        try:
            self._status = self._master.job(self._orders.job_id)
        except Unreachable:
            return None
        self._tally.committed(self._status.committed_step, time.monotonic())
        if self._status.state in text.ENDED:
            raise _JobEnded
        return self._status

    def _pass_until(self, at: float) -> None:
        while time.monotonic() < at:
            self._look()

    def _await_ready(self) -> None:
        told = False
        while True:
            status = self._look()
            ready = status is not None and status.state == "running" and not self._stopped
            if ready and status is not None and (status.can_lose > 0 or self._orders.beyond):
                return
            if not told:
                told = True
                self._say("the next fault waits: the job cannot lose a node at the moment")

    # ---- striking

    def _strike(self, strike: Strike) -> bool:
        """Do it and wait until the job has taken it; False: it did not in time."""
        nodes = {node.node: node for node in self._master.nodes()}
        node = nodes.get(strike.node)
        pid = victim(strike.kind, node) if node is not None and node.state == "live" else None
        if pid is None or not self._do(strike.kind, pid):
            self._say(f"{strike.kind} {strike.node}: nothing to strike there now")
            return True
        struck_at = time.monotonic()
        self._say(f"{strike.kind} {strike.node} (pid {pid})")
        if not self._await_steps():
            took = text.seconds(self._orders.patience_s)
            self._say(f"  NOT RECOVERED: no new step in {took}; see 'oobleck status'")
            return False
        self._await_answer(strike.kind, struck_at)
        gap_s = self._tally.recovered(struck_at)
        self._say(f"  goes on; longest time without a new step {text.seconds(gap_s)}")
        if strike.kind == "kill-agent":
            self._restart(strike.node)
        return True

    def _do(self, kind: str, pid: int) -> bool:
        if kind.startswith("kill"):
            return send(pid, signal.SIGKILL)
        self._stopped[pid] = time.monotonic() + self._orders.stop_for_s
        return send(pid, signal.SIGSTOP)

    def _let_go(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for pid, at in list(self._stopped.items()):
            if all_of_them or now >= at:
                send(pid, signal.SIGCONT)
                del self._stopped[pid]

    def _await_steps(self) -> bool:
        """Until steps were committed after the fault, and nothing is stopped any more."""
        deadline = time.monotonic() + self._orders.patience_s
        step = None
        while time.monotonic() < deadline:
            status = self._look()
            if status is None or status.state != "running" or self._stopped:
                continue
            step = status.committed_step if step is None else step
            if status.committed_step >= step + _STEPS:
                return True
        return False

    def _await_answer(self, kind: str, struck_at: float) -> None:
        """A killed process may have done its part of the steps that were seen since."""
        until = struck_at + _BEFORE_S
        while kind.startswith("kill") and time.monotonic() < until:
            self._look()

    def _restart(self, node: str) -> None:
        assert self._orders.restart_command is not None, "asked for with the kind"
        command = self._orders.restart_command.replace("{node}", shlex.quote(node))
        self._say(f"  {command}")
        subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    # ---- telling

    def _say(self, line: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')}  {line}")

    def _summarise(self) -> None:
        now = time.monotonic()
        try:
            for record in self._master.events(self._orders.job_id, follow=False):
                event = json.loads(record.json)
                if event["time"] >= self._began:
                    self._tally.event(event)
        except CommandFailed as error:
            click.echo(f"the events could not be read: {error.format_message()}", err=True)
        click.echo("\n".join(self._tally.summary(now)))
