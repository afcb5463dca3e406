"""Balancing of senders: the largest load of any sender is made as small as possible.

This is makespan scheduling of tasks on machines, where each task allows some machines. The biggest
tasks are placed first, each on the least loaded of its senders. Then chains of moves are searched
from the most loaded sender. It hands a task to another sender, which hands a task of the same size
to the next, until one has room.

For tasks of one size, such as the blocks of a transformer, a load that no such chain lessens is the
least possible. (Harvey, Ladner, Lovász and Tamir, Semi-matchings for bipartite graphs, 2006.) For
mixed sizes the problem is NP-hard; `least_load` bounds the result from below.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Bytes to send to one destination, and the possible senders."""

    size: int
    #: Senders on the destination's node; one of them sends if there are any.
    near: tuple[WorkerId, ...]
    #: All senders.
    far: tuple[WorkerId, ...]

    @property
    def senders(self) -> tuple[WorkerId, ...]:
        return self.near or self.far


def balance(tasks: Sequence[Task]) -> list[WorkerId]:
    """Assign a sender to each task; the result depends only on the tasks and their order."""
    loads = _Loads(tasks)
    for number in sorted(range(len(tasks)), key=lambda n: (-tasks[n].size, n)):
        senders = tasks[number].senders
        loads.give(number, min(senders, key=lambda w: (loads.of[w], w.node, w.slot)))
    while loads.improve():
        pass
    return [loads.sender[number] for number in range(len(tasks))]


def least_load(tasks: Sequence[Task]) -> int:
    """Return a lower bound of the largest load: the biggest task, and the average load of groups of
    tasks that share their senders."""
    together: dict[frozenset[WorkerId], int] = {}
    for task in tasks:
        senders = frozenset(task.senders)
        together[senders] = together.get(senders, 0) + task.size
    bound = max((task.size for task in tasks), default=0)
    for senders in (*together, frozenset().union(*together)) if together else ():
        inside = sum(size for others, size in together.items() if others <= senders)
        bound = max(bound, -(-inside // len(senders)))
    return bound


class _Loads:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tasks
        self.of: dict[WorkerId, int] = {w: 0 for task in tasks for w in task.senders}
        self.sender: dict[int, WorkerId] = {}
        self._least = least_load(tasks)
        #: Numbers of each sender's tasks, in the order in which it got them.
        self._tasks_of: dict[WorkerId, dict[int, None]] = {w: {} for w in self.of}

    def give(self, number: int, worker: WorkerId) -> None:
        """Move the task to `worker` from its sender, if it has one."""
        size = self._tasks[number].size
        before = self.sender.get(number)
        if before is not None:
            self.of[before] -= size
            del self._tasks_of[before][number]
        self.sender[number] = worker
        self.of[worker] += size
        self._tasks_of[worker][number] = None

    def improve(self) -> bool:
        """Take load off one of the most loaded senders without making another one as loaded.

        If one of them cannot be relieved, the maximum stays, so the others need no try.
        """
        most = max(self.of.values(), default=0)
        worker = next((w for w, load in self.of.items() if load == most), None)
        if worker is None or most <= self._least:
            return False
        for size in dict.fromkeys(self._tasks[n].size for n in self._tasks_of[worker]):
            chain = self._chain(worker, size, most) if size else None
            if chain is not None:
                for number, receiver in chain:
                    self.give(number, receiver)
                return True
        return False

    def _chain(self, worker: WorkerId, size: int, most: int) -> list[tuple[int, WorkerId]] | None:
        """Find moves of tasks of that size, from `worker` to the next and on to one that
        has room.
        """
        reached: dict[WorkerId, tuple[int, WorkerId] | None] = {worker: None}
        queue = deque([worker])
        while queue:
            here = queue.popleft()
            if here != worker and self.of[here] + size < most:
                chain = []
                step = reached[here]
                while step is not None:
                    number, before = step
                    chain.append((number, here))
                    here, step = before, reached[before]
                return chain
            for number in self._tasks_of[here]:
                if self._tasks[number].size != size:
                    continue
                for there in self._tasks[number].senders:
                    if there not in reached:
                        reached[there] = number, here
                        queue.append(there)
        return None


def writers(plan: Plan, sizes: Sequence[int]) -> Mapping[WorkerId, tuple[int, ...]]:
    """Return the layers that each worker of the plan writes, each layer once by one of its holders.
    The largest load of a writer is as small as possible. `sizes`: bytes per layer."""
    owners: dict[int, list[WorkerId]] = {layer: [] for layer in range(plan.layer_count)}
    for worker in plan.workers:
        for layer in plan.held[worker]:
            owners[layer].append(worker)
    tasks = [
        Task(size=sizes[layer], near=(), far=tuple(holders)) for layer, holders in owners.items()
    ]
    chosen: dict[WorkerId, list[int]] = {worker: [] for worker in plan.workers}
    for layer, worker in zip(owners, balance(tasks), strict=True):
        chosen[worker].append(layer)
    return {worker: tuple(layers) for worker, layers in chosen.items()}
