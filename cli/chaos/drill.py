"""A drill from its first strike to its last: when it strikes, what it waits for, what it tells.

However the drill ends, it lets everything that it has stopped go on. `chaos` checks what was asked
for, and `striker` acts on processes.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import click

from oobleck.cli import options
from oobleck.cli.chaos.striker import Striker
from oobleck.cli.chaos.strikes import Strike, Tally
from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.output import text
from oobleck.host.command import CommandFailed
from oobleck.host.display import inline
from oobleck.proto import control_pb2 as pb

#: Time between two looks for commits.
_POLL_S = 0.05
#: Steps that have to be committed after a fault for the job to have taken it.
_STEPS = 2
_BEFORE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders of the operator for a drill."""

    job_id: str
    kinds: tuple[str, ...]
    nodes: tuple[str, ...]
    patience_s: float
    beyond: bool


class _JobEnded(Exception):
    """Signal that the job has ended, so that nothing is left to strike."""


class Drill:
    """Drill from its first look at the job to the summary."""

    def __init__(self, master: MasterClient, orders: Orders, striker: Striker) -> None:
        self._master = master
        self._orders = orders
        self._striker = striker
        self._tally = Tally(began_at=time.monotonic())
        self._began = time.time()
        self._status: pb.JobStatus | None = None

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
            self._striker.undo()
            self._summarise()
        failed = self._status is not None and self._status.state in ("failed", "cancelled")
        return 0 if recovered and not failed else options.FAILED

    # ---- watching

    def _look(self) -> pb.JobStatus | None:
        """Take note of the job's progress; return None while the master is away."""
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
            ready = (
                status is not None and status.state == "running" and not self._striker.has_stopped
            )
            if ready and status is not None and (status.can_lose > 0 or self._orders.beyond):
                return
            if not told:
                told = True
                self._say("the next fault waits: the job cannot lose a node at the moment")

    # ---- striking

    def _strike(self, strike: Strike) -> bool:
        """Strike, and wait until the job has taken it. Return False if it did not in time."""
        nodes = {node.node: node for node in self._master.nodes()}
        struck_at = time.monotonic()
        struck = self._striker.strike(strike.kind, nodes.get(strike.node))
        if struck is None:
            self._say(f"{strike.kind} {strike.node}: nothing to strike there now")
            return True
        self._say(f"{strike.kind} {struck}")
        if strike.kind == "kill-master":  # only the master tells of steps
            self._restart(strike)
        if not self._await_steps():
            took = text.seconds(self._orders.patience_s)
            self._say(f"  NOT RECOVERED: no new step in {took}; see 'oobleck status'")
            return False
        self._await_answer(strike.kind, struck_at)
        gap_s = self._tally.recovered(struck_at)
        self._say(f"  goes on; longest time without a new step {text.seconds(gap_s)}")
        if strike.kind != "kill-master":
            self._restart(strike)
        return True

    def _restart(self, strike: Strike) -> None:
        if (command := self._striker.restart(strike.kind, strike.node)) is not None:
            self._say(f"  {command}")

    def _await_steps(self) -> bool:
        """Wait until steps were committed after the fault and nothing is stopped any more. Return
        False if the operator's patience ends first."""
        deadline = time.monotonic() + self._orders.patience_s
        step = None
        while time.monotonic() < deadline:
            status = self._look()
            if status is None or status.state != "running" or self._striker.has_stopped:
                continue
            step = status.committed_step if step is None else step
            if status.committed_step >= step + _STEPS:
                return True
        return False

    def _await_answer(self, kind: str, struck_at: float) -> None:
        """Keep looking for `_BEFORE_S` after a kill. A killed process may have done its part of the
        steps that were seen since."""
        until = struck_at + _BEFORE_S
        while kind.startswith("kill") and time.monotonic() < until:
            self._look()

    # ---- telling

    def _say(self, line: str) -> None:
        click.echo(f"{time.strftime('%H:%M:%S')}  {inline(line)}")

    def _summarise(self) -> None:
        now = time.monotonic()
        try:
            for record in self._master.events(self._orders.job_id, follow=False):
                event = json.loads(record.json)
                if event["time"] >= self._began:
                    self._tally.event(event)
        except CommandFailed as error:
            reason = inline(error.format_message())
            click.echo(f"the events could not be read: {reason}", err=True)
        click.echo("\n".join(map(inline, self._tally.summary(now))))
