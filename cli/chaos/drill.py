"""A drill: the times of its strikes, its waits, and its summary.

However the drill ends, it continues everything that it has stopped. `chaos` checks the operator's
options, and `striker` acts on processes. Schedule and tally are pure.
"""

import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import click

from oobleck.cli.chaos.striker import Striker
from oobleck.cli.client import MasterClient, Unreachable
from oobleck.cli.output import text
from oobleck.cli.output.text import seconds
from oobleck.core.units import count
from oobleck.host.command import FAILED, CommandFailed
from oobleck.host.display import inline
from oobleck.proto import control_pb2 as pb

# ---- schedule and tally


#: Kinds of faults of a node, and whether each heals by itself.
KINDS = {
    "kill-worker": "SIGKILL to a worker; its agent starts another one",
    "stop-worker": "SIGSTOP to a worker, SIGCONT after --stop-for",
    "kill-warm": "SIGKILL to what workers are forked from: all of the node's workers end",
    "stop-agent": "SIGSTOP to an agent, SIGCONT after --stop-for; its workers train on",
    "stop-node": "SIGSTOP to an agent and all below it: a host that falls silent",
    "kill-agent": "SIGKILL to an agent; needs --restart-command",
    "kill-node": "SIGKILL to an agent and all below it at once; needs --restart-command",
    "stop-master": "SIGSTOP to the master, SIGCONT after --stop-for",
    "kill-master": "SIGKILL to the master; needs --restart-master",
    "garbage": "what no program understands, sent to the master's port",
}
#: Kinds of faults of the cluster, and not of a node of it.
TO_THE_MASTER = ("stop-master", "kill-master", "garbage")
#: Kinds that need --ssh, and root on the host.
OVER_SSH = {"unplug": "the host's network is cut, and back after --stop-for; --ssh, as root"}
#: Faults that this command does not do, with the reasons.
OUT_OF_REACH = {
    **dict.fromkeys(
        ("deaf", "mute", "no-control", "no-data", "slow"),
        "links are cut and slowed down by who owns the network",
    ),
    **dict.fromkeys(("clock-forward", "clock-back"), "clocks are set by root"),
    "disk-full": "it would fill a disk that others use",
    "stop-warm": "it has no effect before a worker ends",
    "twin": "a second agent needs the credentials of the first",
}
DEFAULT_KINDS = ("kill-worker", "stop-worker", "stop-agent")


@dataclass(frozen=True, slots=True)
class Strike:
    """Fault to come, `at_s` from the start of the drill, if the cluster is ready then."""

    at_s: float
    kind: str
    #: Name of the node; empty: the fault is not a node's.
    node: str


def schedule(
    *, seed: int, mtbf_s: float, for_s: float, kinds: Sequence[str], nodes: Sequence[str]
) -> Iterator[Strike]:
    """Yield faults at exponential intervals, as of independent failures, each of a random kind at a
    random node."""
    draw = random.Random(seed)
    at_s = draw.expovariate(1 / mtbf_s)
    while at_s < for_s:
        kind, node = draw.choice(kinds), draw.choice(nodes)
        yield Strike(at_s, kind, "" if kind in TO_THE_MASTER else node)
        at_s += draw.expovariate(1 / mtbf_s)


@dataclass(slots=True)
class Tally:
    """Commits of steps as they were seen, and the gaps between them."""

    began_at: float
    #: Time and step of each newly seen commit.
    commits: list[tuple[float, int]] = field(default_factory=list)
    #: Longest time without a commit after each fault.
    gaps_s: list[float] = field(default_factory=list)
    reconfigurations: int = 0
    #: Steps begun anew, and committed steps that a checkpoint did not have.
    redone: int = 0
    lost_steps: int = 0

    def committed(self, step: int, at: float) -> None:
        if not self.commits or step > self.commits[-1][1]:
            self.commits.append((at, step))

    def event(self, record: dict[str, object]) -> None:
        match record:
            case {"event": "reconfigured", "redo_step": redo}:
                self.reconfigurations += 1
                self.redone += redo is not None
            case {"event": "restored", "lost_steps": int(lost)}:
                self.lost_steps += lost
            case _:
                pass

    def recovered(self, struck_at: float) -> float:
        """Record that a fault is over; return the longest time without a commit since it struck."""
        before = [commit for commit in self.commits if commit[0] <= struck_at]
        after = before[-1:] + [commit for commit in self.commits if commit[0] > struck_at]
        # Steps committed while the master is away are seen later, all at once: subtract the time of
        # those in between.
        step_s = self.step_s
        gaps_s = (b - a - (to - at - 1) * step_s for (a, at), (b, to) in pairwise(after))
        gap_s = max(gaps_s, default=0.0)
        self.gaps_s.append(gap_s)
        return gap_s

    @property
    def step_s(self) -> float:
        """Median seconds a step, from the commits seen; 0 without two of them."""
        if len(self.commits) < 2:
            return 0.0
        pairs = pairwise(self.commits)
        return statistics.median((b - a) / (after - before) for (a, before), (b, after) in pairs)

    def useful(self, now: float) -> float:
        """Share of the time without standstills and repetitions of committed steps."""
        total_s = now - self.began_at
        still_s = sum(max(0.0, gap_s - self.step_s) for gap_s in self.gaps_s)
        return max(0.0, 1.0 - (still_s + self.lost_steps * self.step_s) / total_s)

    def summary(self, now: float) -> list[str]:
        lines = [
            f"{count(len(self.gaps_s), 'fault')} in {seconds(now - self.began_at)}, "
            f"{count(self.reconfigurations, 'reconfiguration')}, "
            f"{count(self.redone, 'step')} in flight done again, "
            f"{count(self.lost_steps, 'committed step')} lost"
        ]
        if self.gaps_s:
            lines.append(
                f"without a new step: median {seconds(statistics.median(self.gaps_s))}, "
                f"longest {seconds(max(self.gaps_s))}, where a step takes {seconds(self.step_s)}"
            )
        lines.append(f"{100 * self.useful(now):.1f} % of the time in useful steps")
        return lines


# ---- the drill


#: Time between two looks for commits.
_POLL_S = 0.05
#: Steps to be committed after a fault before the job counts as recovered.
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
        return 0 if recovered and not failed else FAILED

    # ---- watching

    def _look(self) -> pb.JobStatus | None:
        """Read and record the job's progress; return None while the master is away."""
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
        announced = False
        while True:
            status = self._look()
            ready = (
                status is not None and status.state == "running" and not self._striker.has_stopped
            )
            if ready and status is not None and (status.can_lose > 0 or self._orders.beyond):
                return
            if not announced:
                announced = True
                self._say("the next fault waits: the job cannot lose a node at the moment")

    # ---- striking

    def _strike(self, strike: Strike) -> bool:
        """Strike, and wait until the job has recovered. Return False if it has not in time."""
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
        """Keep recording for `_BEFORE_S` after a kill: steps seen in that time may have been
        finished before it."""
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
