"""What must be once nothing strikes any more: every fit node trains, every drained one does not.

Whatever is unused is explained by the state: it is away, drained, in quarantine, left out, or has
other slots than the job's plan. A drain redoes no step.
"""

from statistics import median
from typing import TYPE_CHECKING

from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node

if TYPE_CHECKING:
    from simulation.world import World

#: Nodes that are up join in less, and drained ones leave in less, where a job trains undisturbed.
SETTLED_S = 20.0
#: A worker is up in less: the longest wait for another start, and the start.
UP_S = 60.0
#: For a job that ends sooner a join, which stands still for 0.1 s, may not be worth it.
LEFT_S = 30.0


class Peace:
    def __init__(self, world: "World") -> None:
        self._world = world
        #: Since when it is so.
        self._since: dict[str, float] = {}
        #: How often each of it was found settled.
        self.settled = 0

    def look(self) -> None:
        master = self._world.master
        if master is None or not master.process.alive:
            self._since.clear()
            return
        state, job = master.core.state, master.core.state.job
        if job is None or not _trains(state, job):
            self._since.clear()
            return
        wrong = dict(_wrong(state, job))
        now = self._world.loop.clock
        self._since = {what: self._since.get(what, now) for what in wrong}
        for what, longest_s in wrong.items():
            if now - self._since[what] > longest_s:
                self._world.watch.broken(f"for {longest_s:.0f} s of peace {what}")
        self.settled += not wrong


def _trains(state: ClusterState, job: Job) -> bool:
    """Undisturbed, and for some more steps."""
    return (
        job.state == "running"
        and not job.current.on_the_way
        and not job.current.losses
        and not job.seen.peers_lost
        and job.seen.steps.furthest_step < job.spec.training.steps
        and all(state.nodes[name].connected for name in job.current.members)
    )


def _usable(job: Job, fit: list[Node]) -> int:
    """So many of the nodes have a place in pipelines. Where a layer was measured on one worker
    alone, no pipeline has more workers than layers."""
    least = job.spec.resources.min_nodes_per_pipeline or 1
    most = job.spec.model.layer_count
    profile = job.profiling.chosen.profile if job.profiling.chosen is not None else None
    if profile is not None and all(set(layer.forward_s) == {1} for layer in profile.layers):
        most //= max((node.facts.worker_slots for node in fit), default=1)
    sizes = {0}
    for _ in fit:
        longer = {size + more for size in sizes for more in range(least, most + 1)}
        sizes |= {size for size in longer if size <= len(fit)}
    return max(sizes)


def _wrong(state: ClusterState, job: Job) -> list[tuple[str, float]]:
    found = []
    fit = [node for node in state.candidates(job) if node.connected]
    most = _usable(job, fit)
    recent = [record.step_seconds for record in job.seen.steps.recent]
    left = job.spec.training.steps - job.seen.steps.furthest_step
    ends_soon = bool(recent) and left * median(recent) < LEFT_S
    for node in fit:
        name = node.facts.node
        if name not in job.current.members and len(job.current.members) < most and not ends_soon:
            longest_s = SETTLED_S if state.is_ready(node, job) else UP_S
            found.append((f"{name} is idle, generation {job.current.generation}", longest_s))
    least = (job.spec.fault_tolerance + 1) * (job.spec.resources.min_nodes_per_pipeline or 1)
    for name in job.current.members:
        node = state.nodes[name]
        others = [other for other in fit if state.is_ready(other, job)]
        needed = bool(node.drain and node.drain.kept) and len(others) < least
        if node.drain is not None and not needed:
            found.append((f"{name} trains, though it is drained by {node.drain.by}", SETTLED_S))
    return found
