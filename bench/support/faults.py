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

#: Strangers at each port of a node that stay and say nothing.
_CROWD = 64
#: Bytes written to a disk at a time.
_PIECE = 1 << 16
#: Through a link that other strangers fill, and where packets are sent again after seconds.
_LET_IN_S = 10.0
#: Before the cluster may go on where it is held; strangers may come until later.
_VISITS_S = 5.0
#: Within which a second agent has started and was told that it is one, on any machine.
_TWIN_S = 240.0
_LOSSES = ("worker_lost", "node_lost", "node_reset", "reconfigured")
#: In the kernel's tables.
_LISTENING = "0A"
#: Far more than what waiting takes.
_WORKED_S = 0.5
#: Longer than anything stays stopped before it is undone.
_STOPPED_S = 3600.0
#: So long the master stays away at most.
_AWAY_S = 4.0


@dataclass(frozen=True)
class Strike:
    """One fault that has struck: `lost` of the events counted at that moment."""

    cluster: NetCluster
    job_id: str
    node: str
    #: Events of the job, and its newest step, before.
    events: int
    step: int
    worked_before_s: float
    #: When, on the monotonic clock.
    at: float

    def told(self, kind: str) -> list[Record]:
        """Events of that kind since, about the node where they are about one."""
        since = self.cluster.events(self.job_id)[self.events :]
        return [e for e in since if e["event"] == kind and e.get("node", self.node) == self.node]

    def losses(self) -> list[Record]:
        """Events since that tell of a loss, of whichever node."""
        since = self.cluster.events(self.job_id)[self.events :]
        return [event for event in since if event["event"] in _LOSSES]

    def steps(self) -> int:
        return self.cluster.last_step(self.job_id) - self.step

    def worked_s(self) -> float:
        """Processor time of the workers since, which tells that they train where nobody else can:
        the records of their steps come with the master."""
        return working_s(self.cluster) - self.worked_before_s


@dataclass(frozen=True)
class Fault:
    name: str
    #: Does it to a node, and returns how to undo it.
    strike: Callable[[NetCluster, str], Callable[[], None]]
    #: Whether the cluster has taken note (of one that it has to take note of), or has gone on in
    #: spite of it (of the others); then it is undone.
    seen: Callable[[Strike], bool]
    #: A node is lost by it, so it may not come where none can be spared.
    deadly: bool = True


def _nothing() -> None:
    """Some faults undo themselves."""


def _goes_on(strike: Strike) -> bool:
    return strike.steps() >= 5


def _crawls_on(strike: Strike) -> bool:
    # Over the slow link a step takes a multiple of its time: the second one was begun on it.
    return strike.steps() >= 2


def _trains_alone(strike: Strike) -> bool:
    # In the middle of a recovery they may need the master to go on.
    return strike.worked_s() >= _WORKED_S or time.monotonic() > strike.at + _AWAY_S


def _node_lost(strike: Strike) -> bool:
    return bool(strike.told("node_lost"))


def _worker_lost(strike: Strike) -> bool:
    # In the middle of a recovery it may have had no part in the plan yet: nobody misses it then.
    return bool(strike.told("worker_lost") or strike.told("node_lost")) or _goes_on(strike)


def _answered(strike: Strike) -> bool:
    """A loss, a reset or a new meeting has come of it; or the plan is without the node as it is."""
    return bool(strike.losses()) or _goes_on(strike)


def working_s(cluster: NetCluster) -> float:
    """Processor time that all workers that live have taken."""
    total = 0.0
    for name in cluster.agents:
        with contextlib.suppress(psutil.Error, ClusterError):
            for pid in cluster.worker_pids_of(name):
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
    return total


# ---- signals


def _first_worker(cluster: NetCluster, node: str) -> int:
    """In the middle of a recovery it may have yet to be started."""
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
    """Its agent alone: what it started has to end by itself."""
    injector.kill([cluster.agents.pop(node)])
    return lambda: void(cluster.start_node(node))


def _kill_node(cluster: NetCluster, node: str) -> Callable[[], None]:
    """All processes at once, as when the machine dies."""
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
    """What the node says arrives; what is said to it does not."""
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
    """Between the node and one other; of four, one that is not beside it in the ring."""
    cluster.net.part([node], _others(cluster, node)[1:2])
    return cluster.net.heal


def _slow(cluster: NetCluster, node: str) -> Callable[[], None]:
    cluster.net.slow(node, 100_000)
    return cluster.net.heal


# ---- strangers, clocks and disks


def ports(pid: int) -> set[int]:
    """Where anything listens on the host of a process."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == _LISTENING:
                found.add(int(local.rpartition(":")[2], 16))
    return found


def _garbage(cluster: NetCluster, node: str) -> Callable[[], None]:
    """To every port of all hosts: of the master and of the workers. At those of the node a crowd
    that says nothing stays, too."""
    pids = {HEAD: cluster.master_pid, **cluster.agents}
    places = [(cluster.net.address(host), port) for host in pids for port in ports(pids[host])]
    if not places:
        raise ClusterError(f"nothing listens on {sorted(pids)}")
    crowd = contextlib.ExitStack()
    for port in ports(cluster.agents[node]):
        with contextlib.suppress(OSError):  # it is closed, or the way to it is
            for _ in range(_CROWD):
                place = cluster.net.address(node), port
                crowd.enter_context(socket.create_connection(place, _LET_IN_S))
    strangers = ThreadPoolExecutor(len(places))
    visits = [strangers.submit(injector.garbage, *place, _LET_IN_S) for place in places]
    futures.wait(visits, _VISITS_S)

    def undo() -> None:
        crowd.close()
        strangers.shutdown()
        if not visits[0].result():  # of the master, whatever else listens
            raise AssertionError(f"nobody lets strangers in: {places}")

    return undo


def _twin(cluster: NetCluster, node: str) -> Callable[[], None]:
    """A second agent of the same name, on another host."""
    twin = cluster.start_twin(HEAD, node)

    def undo() -> None:
        # Waited for only now: what is held at an exact point until then is held too long else.
        if (code := twin.wait(_TWIN_S)) != 2:
            raise AssertionError(f"the second {node} ended with {code} instead of being refused")

    return undo


def _disk_full(cluster: NetCluster, node: str) -> Callable[[], None]:
    """The master's; nothing more goes on it."""
    filler = cluster.state_dir / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(_PIECE))
    return filler.unlink


def _clock(offset_s: float) -> Callable[[NetCluster, str], Callable[[], None]]:
    """The wall clocks of a node and of the master jump, each the other way."""

    def strike(cluster: NetCluster, node: str) -> Callable[[], None]:
        cluster.set_clock(node, offset_s)
        cluster.set_clock(HEAD, -offset_s)

        def undo() -> None:
            cluster.set_clock(node, 0.0)
            cluster.set_clock(HEAD, 0.0)

        return undo

    return strike


def void(_: object) -> None:
    """For what is done for its effect."""


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
