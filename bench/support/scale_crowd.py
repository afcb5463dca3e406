"""The bench's view of agents that live in processes of their own (`bench.support.scale_agents`)."""

import asyncio
import json
import os
import random
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from bench.support.daemons import CHECKOUT, with_parent

#: Interval of polling while waiting. It does not affect the times, which are taken where things
#: happen.
_LOOK_S = 0.02
_LIMIT_S = 300.0
#: Longest line: a plan for a thousand nodes.
_LONGEST_LINE = 1 << 24


class Crowd:
    """All agents, by number, and the news of them."""

    def __init__(self, count: int, processes: int) -> None:
        self.alive = set(range(count))
        #: Begin of each agent's newest session.
        self.welcomed_at: dict[int, float] = {}
        #: Nodes of each plan, by rank; and when each node received it.
        self.plans: dict[int, list[int]] = {}
        self.told_at: dict[int, dict[int, float]] = {}
        self._entered: dict[int, set[int]] = {}
        self._shares = [range(count)[i::processes] for i in range(processes)]
        self._processes: list[Process] = []
        self._readers: list[asyncio.Task[None]] = []

    async def start(self, master: str, memory_bytes: int, keys: Path, logs: Path) -> None:
        """Start the agents' processes; `tell` them to start the agents."""
        for share in self._shares:
            told = {
                "master": master,
                "memory_bytes": memory_bytes,
                "keys": str(keys),
                "first": share.start,
                "step": share.step,
                "end": share.stop,
            }
            command = (*with_parent("bench.support.scale_agents"), json.dumps(told))
            with (logs / f"agents{share.start}.log").open("a") as log:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=log,
                    limit=_LONGEST_LINE,
                    env={**os.environ, "GRPC_VERBOSITY": "ERROR", "PYTHONPATH": CHECKOUT},
                )
            self._processes.append(process)
        for process in self._processes:
            assert process.stdout is not None
            await process.stdout.readline()
            self._readers.append(asyncio.create_task(self._listen(process)))

    async def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            await process.wait()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds. Raise SystemExit if it does not in time, or if a process
        of agents has ended."""
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            if any(reader.done() for reader in self._readers):
                raise SystemExit("a process of agents has ended")
            if time.monotonic() > deadline:
                raise SystemExit(f"not within {_LIMIT_S:.0f} s: {what}")
            await asyncio.sleep(_LOOK_S)

    # ---- what happens to them

    def tell(self, do: str, **arguments: object) -> None:
        for process in self._processes:
            _tell(process, do, arguments)

    def tell_one(self, number: int, do: str) -> None:
        _tell(self._processes[number % len(self._processes)], do, {"number": number})

    def cut(self, count: int) -> None:
        """Cut `count` agents' connections, at most all; each process chooses its share."""
        chosen = random.sample(sorted(self.alive), count)
        for index, process in enumerate(self._processes):
            share = sum(1 for number in chosen if number % len(self._processes) == index)
            _tell(process, "cut", {"count": share})

    def die(self, number: int) -> None:
        self.alive.remove(number)
        self.tell_one(number, "die")

    # ---- what they have told

    @property
    def generation(self) -> int:
        """Newest generation that any agent has received; 0: none."""
        return max(self.plans, default=0)

    def all_told(self, after: int) -> bool:
        """Return whether there is a plan newer than `after`, and all nodes of the newest plan have
        it."""
        told = self.told_at.get(self.generation, {})
        members = self.plans.get(self.generation, [])
        return self.generation > after and all(n in told for n in members if n in self.alive)

    @property
    def trains(self) -> bool:
        """True if all workers of the newest plan have entered it."""
        members = self.plans.get(self.generation, [])
        entered = self._entered.get(self.generation, set())
        return bool(members) and entered.issuperset(members) and self.alive.issuperset(members)

    def welcomed_since(self, begun: float) -> list[float]:
        """Return the seconds from `begun` to the newest session of each agent that has a new
        one."""
        return [at - begun for n, at in self.welcomed_at.items() if at > begun and n in self.alive]

    def processor_s(self) -> float:
        return sum(processor_s(psutil.Process(process.pid)) for process in self._processes)

    async def _listen(self, process: Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            news = json.loads(line)
            for number, at in news.get("welcomed", ()):
                self.welcomed_at[number] = at
            for generation, ranks in news.get("plan", ()):
                self.plans[generation] = ranks
            for number, generation, at in news.get("told", ()):
                self.told_at.setdefault(generation, {})[number] = at
            for number, generation in news.get("entered", ()):
                self._entered.setdefault(generation, set()).add(number)


def processor_s(process: psutil.Process) -> float:
    """Return the process's user and system time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _tell(process: Process, do: str, arguments: dict[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")


def neighbours(ranks: Sequence[int], number: int) -> tuple[int, int]:
    """Return the agents whose workers are connected to that of `number`, in the ring of all
    ranks."""
    at = ranks.index(number)
    return ranks[at - 1], ranks[(at + 1) % len(ranks)]
