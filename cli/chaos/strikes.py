"""Schedule of a drill's faults, and tally of the cluster's recoveries. Pure: no clock, no
processes, no master."""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from oobleck.cli.output.text import seconds
from oobleck.core.units import count

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
#: Kinds that only root can do, or the owner of the network.
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
    """Yield faults as independent failures come: at exponential intervals, of any kind,
    anywhere."""
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
        """Take note of a fault that is over, and return the longest time without a commit since."""
        before = [commit for commit in self.commits if commit[0] <= struck_at]
        after = before[-1:] + [commit for commit in self.commits if commit[0] > struck_at]
        # Steps that are committed while the master is away are seen only later, all at once.
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
        """Share of the time that was not spent standing still or doing committed steps again."""
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
