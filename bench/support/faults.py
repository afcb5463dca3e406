"""Faults of a cluster on hosts of its own: how each strikes, shows, and is undone.

Each is real: signals to processes and bytes sent to open ports, by the injector of `oobleck chaos`;
packets that are lost in a router. Callers check afterwards how the job has taken the fault.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.support.client import ClusterError, Record
from bench.support.netcluster import HEAD, NetCluster
from oobleck.cli.chaos import injector

#: Silent strangers at each port of a node.
_CROWD = 64
#: Bytes per write when a disk is filled.
_PIECE = 1 << 16
#: Time for a stranger to be let in, over a link full of others, with retransmissions after seconds.
_LET_IN_S = 10.0
#: Time after which a held cluster may continue, although strangers still arrive.
_VISITS_S = 5.0
#: Time for a second agent of the same name to start and be refused, on any machine.
_TWIN_S = 240.0
_LOSSES = ("worker_lost", "node_lost", "node_reset", "reconfigured")
#: State of listening sockets in the kernel's tables.
_LISTENING = "0A"
#: Processor time of workers that shows that they train: far more than waiting takes.
_WORKED_S = 0.5
#: Longer than anything stays stopped before it is undone.
_STOPPED_S = 3600.0
#: Longest absence of the master.
_AWAY_S = 4.0


@dataclass(frozen=True)
class Strike:
    """Fault that has struck, and the progress of the job at that moment."""

    cluster: NetCluster
    job_id: str
    node: str
    #: Number of the job's events, and its newest step, at that moment.
    events: int
    step: int
    worked_before_s: float
    #: Time of the strike, by the monotonic clock.
    at: float

    def told(self, kind: str) -> list[Record]:
        """Return later events of that kind, of those about a node only this node's."""
        since = self.cluster.events(self.job_id)[self.events :]
        return [e for e in since if e["event"] == kind and e.get("node", self.node) == self.node]

    def losses(self) -> list[Record]:
        """Return later events about a loss, of any node."""
        since = self.cluster.events(self.job_id)[self.events :]
        return [event for event in since if event["event"] in _LOSSES]

    def steps(self) -> int:
        return self.cluster.last_step(self.job_id) - self.step

    def worked_s(self) -> float:
        """Return the processor time of the workers since the strike. It shows that they train even
        while the master, which has the records of their steps, is away."""
        return working_s(self.cluster) - self.worked_before_s


@dataclass(frozen=True)
class Fault:
    name: str
    #: Strikes a node, and returns a function that undoes the fault.
    strike: Callable[[NetCluster, str], Callable[[], None]]
    #: Returns whether the cluster has reacted, or, for a fault that needs no reaction, has
    #: continued despite it; then the fault is undone.
    seen: Callable[[Strike], bool]
    #: True if it loses a node, so it must not strike while none can be spared.
    deadly: bool = True


def _nothing() -> None:
    """Do nothing: some faults undo themselves."""


def _goes_on(strike: Strike) -> bool:
    return strike.steps() >= 5


def _crawls_on(strike: Strike) -> bool:
    # Over the slow link a step takes several times as long. The second step was begun over it.
    return strike.steps() >= 2


def _trains_alone(strike: Strike) -> bool:
    # During a recovery workers may need the master to continue, so do not wait longer than its
    # absence.
    return strike.worked_s() >= _WORKED_S or time.monotonic() > strike.at + _AWAY_S


def _node_lost(strike: Strike) -> bool:
    return bool(strike.told("node_lost"))


def _worker_lost(strike: Strike) -> bool:
    # During a recovery it may not be in the plan yet; then no loss follows.
    return bool(strike.told("worker_lost") or strike.told("node_lost")) or _goes_on(strike)


def _answered(strike: Strike) -> bool:
    """Return whether a loss, a reset or a new meeting followed, or the plan is without the node
    anyway."""
    return bool(strike.losses()) or _goes_on(strike)


def working_s(cluster: NetCluster) -> float:
    """Return the processor time of all live workers."""
    total = 0.0
    for name in cluster.agents:
        with contextlib.suppress(psutil.Error, ClusterError):
            for pid in cluster.worker_pids_of(name):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
    return total


# ---- signals


def _first_worker(cluster: NetCluster, node: str) -> int:
    """Return the node's first worker; during a recovery, wait until it is started."""
    found: list[int] = []

    def look() -> bool:
        with contextlib.suppress(ClusterError, IndexError):
            found[:] = cluster.worker_pids_of(node)
        return bool(found)

    cluster.wait(look, f"a worker on {node}")
    return found[0]


def _kill_worker(cluster: NetCluster, node: str) -> Callable[[], None]:
    injector.kill([_first_worker(cluster, node)])
    return _nothing


def _kill_warm(cluster: NetCluster, node: str) -> Callable[[], None]:
    injector.kill([cluster.warm_pid(node)])
    return _nothing


def _kill_agent(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Kill only the agent; its processes must end by themselves."""
    injector.kill([cluster.agents.pop(node)])
    return lambda: void(cluster.start_node(node))


def _kill_node(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Kill all processes at once, as when the machine dies."""
    cluster.kill_node(node)
    return lambda: void(cluster.start_node(node))


def _kill_master(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.kill_master()
    return lambda: void(cluster.start_master())


def _stop(
    find: Callable[[NetCluster, str], int],
) -> Callable[[NetCluster, str], Callable[[], None]]:
    def strike(cluster: NetCluster, node: str) -> Callable[[], None]:
        _, healer = injector.stop([find(cluster, node)], _STOPPED_S)
        return lambda: void(injector.heal(healer))

    return strike


# ---- links


def _others(cluster: NetCluster, node: str) -> list[str]:
    return [other for other in cluster.agents if other != node]


def _unplug(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.net.unplug(node)
    return cluster.net.heal


def _deaf(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Drop packets to the node; those from it arrive."""
    cluster.net.block([HEAD, *_others(cluster, node)], [node])
    return cluster.net.heal


def _mute(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.net.block([node], [HEAD, *_others(cluster, node)])
    return cluster.net.heal


def _no_control(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.net.part([HEAD], [node])
    return cluster.net.heal


def _no_data(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.net.part([node], _others(cluster, node))
    return cluster.net.heal


def _no_way(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Cut the network between the node and one other; of four nodes, one that is not its neighbour
    in the ring."""
    cluster.net.part([node], _others(cluster, node)[1:2])
    return cluster.net.heal


def _slow(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.net.slow(node, 100_000)
    return cluster.net.heal


# ---- strangers, clocks and disks


def ports(pid: int) -> set[int]:
    """Return the ports on which anything listens on the host of a process."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def _garbage(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Send garbage to every port of all hosts, of the master and of workers; a silent crowd also
    stays at the node's ports."""
    pids = {HEAD: cluster.master_pid, **cluster.agents}
    places = [(cluster.net.address(host), port) for host in pids for port in ports(pids[host])]
    if not places:
        raise ClusterError(f"nothing listens on {sorted(pids)}")
    crowd = contextlib.ExitStack()
    for port in ports(cluster.agents[node]):
        with contextlib.suppress(OSError):  # the port is closed, or cut off
            for _ in range(_CROWD):
                place = cluster.net.address(node), port
                crowd.enter_context(socket.create_connection(place, _LET_IN_S))
    strangers = ThreadPoolExecutor(len(places))
    visits = [strangers.submit(injector.garbage, *place, _LET_IN_S) for place in places]
    futures.wait(visits, _VISITS_S)

    def undo() -> None:
        crowd.close()
        strangers.shutdown()
        if not visits[0].result():  # the master's must let a stranger in
            raise AssertionError(f"nobody lets strangers in: {places}")

    return undo


def _twin(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Start a second agent of the same name, on another host."""
    twin = cluster.start_twin(HEAD, node)

    def undo() -> None:
        # Wait only now: a cluster that is held at an exact point until then would be held too long.
        if (code := twin.wait(_TWIN_S)) != 2:
            raise AssertionError(f"the second {node} ended with {code} instead of being refused")

    return undo


def _disk_full(cluster: NetCluster, node: str) -> Callable[[], None]:
    """Fill the master's disk."""
    filler = cluster.state_dir / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(_PIECE))
    return filler.unlink


def _clock(offset_s: float) -> Callable[[NetCluster, str], Callable[[], None]]:
    """Shift the wall clocks of a node and of the master, in opposite directions."""

    def strike(cluster: NetCluster, node: str) -> Callable[[], None]:
        cluster.set_clock(node, offset_s)
        cluster.set_clock(HEAD, -offset_s)

        def undo() -> None:
            cluster.set_clock(node, 0.0)
            cluster.set_clock(HEAD, 0.0)

        return undo

    return strike


def void(_: object) -> None:
    """Discard a result."""


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("kill-worker", _kill_worker, _worker_lost),
        Fault("kill-warm", _kill_warm, _worker_lost),
        Fault("kill-agent", _kill_agent, _node_lost),
        Fault("kill-node", _kill_node, _node_lost),
        Fault("kill-master", _kill_master, _trains_alone, deadly=False),
        Fault("stop-worker", _stop(_first_worker), _answered),
        Fault("stop-agent", _stop(lambda c, n: c.agents[n]), _node_lost),
        Fault("stop-warm", _stop(lambda c, n: c.warm_pid(n)), _goes_on, deadly=False),
        Fault("stop-master", _stop(lambda c, _: c.master_pid), _trains_alone, deadly=False),
        Fault("unplug", _unplug, _node_lost),
        Fault("deaf", _deaf, _node_lost),
        Fault("mute", _mute, _node_lost),
        Fault("no-control", _no_control, _node_lost),
        Fault("no-data", _no_data, _answered),
        Fault("no-way", _no_way, _answered),
        Fault("slow", _slow, _crawls_on, deadly=False),
        Fault("garbage", _garbage, _goes_on, deadly=False),
        Fault("disk-full", _disk_full, _trains_alone, deadly=False),
        Fault("clock-forward", _clock(5 * 3600.0), _goes_on, deadly=False),
        Fault("clock-back", _clock(-5 * 3600.0), _goes_on, deadly=False),
        Fault("twin", _twin, _goes_on, deadly=False),
    )
}
