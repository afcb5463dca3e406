"""How fast faults are found, and that what is no fault is not.

    python -m bench.detection [--modes fast balanced wan] [--exits 20] [--stops 5] [--hosts 20]
        [--cuts 8] [--pause 30]

On real clusters, in each of the modes of `oobleck-master --detection`:

- `exit`: SIGKILL of one worker process. How long until the master has it in its journal, and until
  the last of the other agents has the new plan for its workers.
- `stop`: SIGSTOP of one worker process, which no event reports. How long until the master has it in
  its journal, and until the next step is committed.
- `silent`: all packets to and from a host are dropped, in a network of namespaces (this needs
  root), of two hosts in turn. How long until the master has each in its journal.
- `cut`: the data network between two hosts is cut, of four in turn. How long until the next step is
  committed, without one of the two.
- `pause`: SIGSTOP of the master for so many seconds. Reconfigurations that follow: there must be
  none.

The mode `wan`, whose time-outs are several times as long, has a fourth of the stops, hosts and
cuts. A round in which anything else is lost is reported and repeated.

All clocks are this machine's, and other load on it adds to all times.
"""

import argparse
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import combinations
from pathlib import Path

from bench.support import network
from bench.support.client import ClusterError, Record
from bench.support.cluster import Cluster, LocalCluster
from bench.support.netcluster import NetCluster
from oobleck.agent.state import QUICK_S
from oobleck.host.detection import MODES

_NODES = 4
#: Steps between two disturbances, so that the next one meets a settled cluster.
_SETTLE_STEPS = 5
#: Age from which a worker that ends is restarted at once, without the agent's back-off.
_AGED_S = QUICK_S + 0.5
#: Number of hosts silenced in one round, and the seconds between them: the job survives both
#: losses.
_SILENT = 2
_APART_S = 0.35
#: Divisor of the number of slow rounds in the mode `wan`.
_WAN_SHARE = 4
#: Time-out for nodes to come back, including an agent's back-off.
_SETTLE_S = 180.0
#: Most disturbed rounds that are repeated.
_MOST_DISTURBED = 10
_ASSIGNED = re.compile(r"^(\S+)Z INFO agent\.supervisor assigned .*\bgeneration=(\d+)")


def job() -> dict[str, object]:
    return {
        "name": "detection",
        "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
        "data": {"text": [str(Path(__file__).resolve().parents[1] / "LICENSE")]},
        "training": {"steps": 1_000_000, "global_batch": 16, "microbatch": 2},
        "fault_tolerance": 1,
        "profile": "estimate",
    }


class Watched:
    """Cluster with a running job, and its events since the last `settle`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.job_id = cluster.submit(job())
        cluster.wait_step(self.job_id, _SETTLE_STEPS)
        self._known = 0
        #: Time at which each node's worker was last hit.
        self._hit_at: dict[str, float] = {}

    def settle(self, victim: str | None = None) -> None:
        """Wait until all nodes have trained for some steps, and until the worker of `victim` is old
        enough to be replaced at once."""
        cluster, nodes = self.cluster, set(self.cluster.agents)
        cluster.wait(
            lambda: cluster.planned(self.job_id) == nodes, "all to train", _SETTLE_S, poll_s=0.2
        )
        if victim is not None:
            time.sleep(max(0.0, self._hit_at.get(victim, 0.0) + _AGED_S - time.time()))
            self._hit_at[victim] = time.time()
        cluster.wait_step(self.job_id, cluster.last_step(self.job_id) + _SETTLE_STEPS)
        self._known = len(cluster.events(self.job_id))

    def since(self, kind: str) -> list[Record]:
        """Return the events of that kind since the cluster has settled."""
        return [e for e in self.cluster.events(self.job_id)[self._known :] if e["event"] == kind]

    def first(self, kind: str, what: str) -> Record:
        self.cluster.wait(lambda: bool(self.since(kind)), what)
        return self.since(kind)[0]

    def lost_at(self, node: str) -> float:
        """Wait until the node is declared lost; return the Unix time of that."""

        def losses() -> list[Record]:
            return [event for event in self.since("node_lost") if event["node"] == node]

        self.cluster.wait(lambda: bool(losses()), f"the loss of {node}")
        return float(losses()[0]["time"])

    def disturbed(self, *victims: str) -> bool:
        """Return whether anything but the `victims` was lost since the last `settle`; print it."""
        kinds = ("worker_lost", "worker_late", "node_lost", "node_reset", "node_left_out")
        lost = [event for kind in kinds for event in self.since(kind)]
        others = [event for event in lost if event["node"] not in victims]
        if others or len(lost) > len(victims):
            print(f"disturbed: {[(event['event'], event['node']) for event in lost]}", flush=True)
            return True
        return False

    def committed_at(self, generation: int) -> float:
        """Return the Unix time of the first step of that or a later generation."""

        def steps() -> list[Record]:
            lines = self.cluster.metrics(self.job_id)
            return [line for line in lines if line["generation"] >= generation]

        self.cluster.wait(lambda: bool(steps()), f"a step of generation {generation}", poll_s=0.1)
        return float(steps()[0]["time"])

    def assigned_at(self, generation: int, nodes: Sequence[str]) -> float:
        """Return the Unix time at which the last of the agents had that generation for its
        workers."""
        moments = [self._assigned_at(node, generation) for node in nodes]
        return max(moments)

    def _assigned_at(self, node: str, generation: int) -> float:
        text = (self.cluster.state_dir / "log" / f"agent-{node}.log").read_text()
        for line in text.splitlines():
            found = _ASSIGNED.match(line)
            if found is not None and int(found[2]) >= generation:
                return datetime.fromisoformat(found[1]).replace(tzinfo=UTC).timestamp()
        raise ClusterError(f"{node} was not told of generation {generation}")


@contextmanager
def local(mode: str) -> Iterator[Watched]:
    with LocalCluster(_NODES, options=["--detection", mode]) as cluster:
        yield Watched(cluster)


def exits(watched: Watched, count: int) -> dict[str, list[float]]:
    known, sent = [], []
    for victim in _victims(count):
        watched.settle(victim)
        pid = watched.cluster.worker_pids()[f"{victim}/0"]
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        lost = watched.first("worker_lost", "the loss")
        made = watched.first("reconfigured", "the recovery")
        if watched.disturbed(victim):
            continue
        others = [name for name in watched.cluster.agents if name != victim]
        known.append(float(lost["time"]) - at)
        sent.append(watched.assigned_at(int(made["to_generation"]), others) - at)
        if len(known) == count:
            break
    return {"exit: the master knows": known, "exit: the survivors know": sent}


def stops(watched: Watched, count: int) -> dict[str, list[float]]:
    flagged, committed = [], []
    for victim in _victims(count):
        watched.settle(victim)
        pid = watched.cluster.worker_pids()[f"{victim}/0"]
        at = time.time()
        os.kill(pid, signal.SIGSTOP)
        lost = watched.first("worker_lost", "the verdict")
        made = watched.first("reconfigured", "the recovery")
        if watched.disturbed(victim):
            continue
        flagged.append(float(lost["time"]) - at)
        committed.append(watched.committed_at(int(made["to_generation"])) - at)
        if len(flagged) == count:
            break
    return {"stop: the master knows": flagged, "stop: the next step is committed": committed}


def _victims(count: int) -> Iterator[str]:
    """Yield nodes in turn: more than `count`, since disturbed rounds are repeated."""
    rounds = count + _MOST_DISTURBED if count else 0
    return (f"n{number % _NODES + 1}" for number in range(rounds))


def pause(watched: Watched, seconds: float) -> int:
    """Stop the master for so long; return the number of reconfigurations once all agents are
    back."""
    cluster = watched.cluster
    assert isinstance(cluster, LocalCluster), "its master runs here"
    watched.settle()
    os.kill(cluster.master_pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(cluster.master_pid, signal.SIGCONT)
    cluster.wait(lambda: cluster.live() == set(cluster.agents), "all agents back", poll_s=0.2)
    watched.cluster.wait_step(watched.job_id, cluster.last_step(watched.job_id) + _SETTLE_STEPS)
    return len(watched.since("reconfigured"))


def silences(mode: str, count: int) -> dict[str, list[float]]:
    declared: list[float] = []
    with NetCluster(_NODES, master_options=["--detection", mode]) as cluster:
        watched = Watched(cluster)
        turns = _victims(count)
        for victims in zip(*[turns] * _SILENT, strict=False):
            watched.settle()
            silent_at = {}
            for victim in victims:
                silent_at[victim] = time.time()
                cluster.net.unplug(victim)
                time.sleep(_APART_S)
            found = [watched.lost_at(victim) - at for victim, at in silent_at.items()]
            disturbed = watched.disturbed(*victims)
            for victim in victims:
                cluster.net.plug(victim)
            if not disturbed:
                declared += found
            if len(declared) >= count:
                break
    return {"silent host: declared": declared}


def cuts(mode: str, count: int) -> dict[str, list[float]]:
    committed: list[float] = []
    with NetCluster(_NODES, master_options=["--detection", mode]) as cluster:
        watched = Watched(cluster)
        pairs = list(combinations(cluster.agents, 2))
        for number in range(count + _MOST_DISTURBED):
            one, other = pairs[number % len(pairs)]
            watched.settle()
            at = time.time()
            cluster.net.part([one], [other])
            made = watched.first("reconfigured", "the recovery")
            found = watched.committed_at(int(made["to_generation"])) - at
            cluster.net.heal()
            lost = {str(event["node"]) for event in watched.since("node_reset")}
            if lost <= {one, other} and not watched.disturbed(*lost):
                committed.append(found)
            if len(committed) >= count:
                break
    return {"cut pair: the next step is committed": committed}


def tell(mode: str, figures: Mapping[str, Sequence[float]]) -> None:
    for name, values in figures.items():
        if values:
            ordered = sorted(values)
            shown = "  ".join(f"{quantile(ordered, q):>8.3f}" for q in (0.5, 0.99, 1.0))
            print(f"{mode:<10}{name:<36}{len(values):>4}  {shown}", flush=True)


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the quantile by the nearest rank."""
    return ordered[max(0, -(-int(q * 1000) * len(ordered) // 1000) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--exits", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--hosts", type=int, default=20)
    parser.add_argument("--cuts", type=int, default=8)
    parser.add_argument("--pause", type=float, default=30.0, help="0: none")
    arguments = parser.parse_args()
    print(f"{'mode':<10}{'seconds':<36}{'n':>4}  {'p50':>8}  {'p99':>8}  {'max':>8}")
    for mode in arguments.modes:
        share = _WAN_SHARE if mode == "wan" else 1
        with local(mode) as watched:
            tell(mode, exits(watched, arguments.exits))
            tell(mode, stops(watched, -(-arguments.stops // share)))
            if arguments.pause:
                found = pause(watched, arguments.pause)
                print(
                    f"{mode:<10}master stopped for {arguments.pause:g} s: {found} reconfigurations"
                )
        if not arguments.hosts and not arguments.cuts:
            continue
        if problem := network.unusable():
            print(f"{mode:<10}silent hosts and cut pairs: not measured ({problem})")
            continue
        if arguments.hosts:
            tell(mode, silences(mode, -(-arguments.hosts // share)))
        if arguments.cuts:
            tell(mode, cuts(mode, -(-arguments.cuts // share)))


if __name__ == "__main__":
    main()
