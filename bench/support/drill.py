"""Job on a cluster that is struck by one fault after the other, and checks after each.

Owns the order: strike, wait until the fault shows, undo it, wait until the cluster is whole again.
`bench.support.faults` has the faults; callers with a reference check the losses.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil

from bench.support.client import ClusterError, Record
from bench.support.faults import Fault, Strike, working_s
from bench.support.goodput import Cost, Span
from bench.support.netcluster import NetCluster

#: Time-out for anything that a cluster does; far more than it ever takes, even on a loaded machine.
PATIENCE_S = 240.0
#: Steps that a job must commit to count as settled.
_STEPS = 3


@dataclass(frozen=True)
class Struck:
    """Effects of one fault; seconds from the strike."""

    fault: str
    node: str
    phase: str
    step: int
    seen_s: float
    whole_s: float
    #: Cost until the cluster was whole again.
    cost: Cost


class Drill:
    def __init__(self, cluster: NetCluster, job: Mapping[str, object]) -> None:
        self.cluster = cluster
        self.nodes = set(cluster.agents)
        self.job_id = cluster.submit(job)
        self.struck: list[Struck] = []

    def strike(
        self,
        fault: Fault,
        node: str,
        *,
        phase: str = "step",
        then: Callable[[], None] = lambda: None,
    ) -> Struck:
        """Strike with `fault`, wait until it shows, undo it, and wait until the cluster is whole.

        `then` is called between the strike and that wait.
        """
        cluster = self.cluster
        span = Span(cluster, self.job_id)
        struck_at = time.monotonic()
        begun = Strike(
            at=struck_at,
            cluster=cluster,
            job_id=self.job_id,
            node=node,
            events=len(cluster.events(self.job_id)),
            step=cluster.last_step(self.job_id),
            worked_before_s=working_s(cluster),
        )
        undo = fault.strike(cluster, node)
        try:
            then()
            cluster.wait(lambda: fault.seen(begun), f"{fault.name} of {node} to show", PATIENCE_S)
            seen_s = time.monotonic() - struck_at
        finally:
            undo()
        if phase == "step" and not fault.deadly and (taken := begun.losses()):
            raise ClusterError(f"{fault.name} was taken for a loss: {taken}")
        self.settle(f"after {fault.name} of {node}")
        struck = Struck(
            fault=fault.name,
            node=node,
            phase=phase,
            step=begun.step,
            seen_s=seen_s,
            whole_s=time.monotonic() - struck_at,
            cost=span.cost(),
        )
        self.struck.append(struck)
        return struck

    def settle(self, when: str) -> None:
        """Wait until the job trains on all nodes."""
        what = f"the cluster to be whole {when}"
        self.cluster.wait(self.is_whole, what, PATIENCE_S, poll_s=0.2)
        self.cluster.wait_step(self.job_id, self.cluster.last_step(self.job_id) + _STEPS)
        orphans = f"whoever belongs to nobody to be gone {when}"
        self.cluster.wait(lambda: not self.cluster.orphans(), orphans, PATIENCE_S, poll_s=0.1)

    def is_whole(self) -> bool:
        """Return whether every node is in the job's plan, and all workers have entered it."""
        try:
            status, nodes = self.cluster.status(self.job_id), self.cluster.nodes()
        except ClusterError:
            return False
        plan = status["plan"] or {"generation": 0, "pipelines": []}
        planned = {node for pipeline in plan["pipelines"] for node in pipeline["nodes"]}
        entered = {
            name
            for name, node in nodes.items()
            if node["state"] == "live"
            and any(worker["generation"] == plan["generation"] for worker in node["workers"])
        }
        return status["state"] == "running" and planned == entered == self.nodes

    def steps(self) -> list[Record]:
        """Return the job's metrics, checked to have each step once and in order."""
        lines = self.cluster.metrics(self.job_id)
        if (steps := [line["step"] for line in lines]) != list(range(1, len(lines) + 1)):
            raise ClusterError(f"steps are missing or come twice: {steps}")
        return lines


@dataclass(frozen=True)
class Use:
    """Resources of daemons that outlive all faults."""

    descriptors: dict[str, int]
    bytes: dict[str, int]

    @classmethod
    def of(cls, cluster: NetCluster) -> "Use":
        pids = {"master": cluster.master_pid, **cluster.agents}
        found = {name: psutil.Process(pid) for name, pid in pids.items()}
        return cls(
            descriptors={f"{n} {p.pid}": p.num_fds() for n, p in found.items()},
            bytes={f"{n} {p.pid}": p.memory_info().rss for n, p in found.items()},
        )

    def grown(self, before: "Use", *, descriptors: int, megabytes: int) -> list[str]:
        """Return the daemons of both moments that have grown by more than the limits."""
        out = []
        for name in self.descriptors.keys() & before.descriptors.keys():
            more = self.descriptors[name] - before.descriptors[name]
            if more > descriptors:
                out.append(f"{name}: {more} descriptors more than {before.descriptors[name]}")
            grown = (self.bytes[name] - before.bytes[name]) >> 20
            if grown > megabytes:
                out.append(f"{name}: {grown} MiB more than {before.bytes[name] >> 20}")
        return sorted(out)
