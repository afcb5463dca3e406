"""What a cluster that has settled must take well: one thing at a time, with nothing else amiss.

A drain and the end of an agent redo no step. As many nodes as a plan can lose are lost at once
without a checkpoint, and one more with one. A head with another directory, or with none, stops
nobody.
"""

import asyncio
import random
from collections.abc import Callable

from simulation.client import Operator
from simulation.faults import BOOT_S, Faults
from simulation.machines import MasterHost
from simulation.peace import Peace
from simulation.watch import Broken
from simulation.world import World

from oobleck.core.ids import Incarnation, NodeName
from oobleck.master.config import MasterConfig
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.job import ENDED, Job
from oobleck.master.state.node import Node
from support.jobs import job_spec

#: Since peace, for the last consequences of what struck before.
QUIET_S = 40.0
#: More than all that is waited for takes.
LONGEST_S = 120.0
#: Number of its submission.
NUMBER = 100
#: More than are trained.
_STEPS = 1000
_KINDS = (
    "drain", "end_agent", "lose_claimed", "lose_more", "mistake_directory", "lose_directory",
    "start_old_copy", "part_heads",
)  # fmt: skip


class Calm:
    def __init__(
        self,
        world: World,
        operator: Operator,
        faults: Faults,
        draw: random.Random,
        nodes: list[NodeName],
    ) -> None:
        self._world = world
        self._operator = operator
        self._faults = faults
        self._draw = draw
        self._nodes = nodes
        self._peace = Peace(world)

    async def play(self) -> str:
        """The kind of what was done. Raises Broken."""
        for name in self._nodes:
            self._operator.undrain_later(0.0, name)
        await asyncio.sleep(max(0.0, self._world.peace_at + QUIET_S - self._world.loop.clock))
        draw, f = self._draw, self._draw.randint(0, min(2, len(self._nodes) - 1))
        least = self._draw.randint(1, len(self._nodes) // (f + 1))
        spec = job_spec(
            "calm", steps=_STEPS, f=f, min_nodes=least, checkpoint=int(draw.random() < 0.5)
        )
        self._operator.submit_later(NUMBER, 0.0, spec)
        await self._until("an answer", lambda: NUMBER in self._operator.jobs)
        await self._until("training on all nodes", self._is_whole)
        if self._job.current.made is None or self._job.current.made.can_lose < f:
            raise Broken(f"{self._job.id} with all nodes cannot lose {f} of them")
        kind = draw.choice(_KINDS)
        await getattr(self, f"_{kind}")()
        self._operator.cancel_now(self._job.id)
        await self._until("its end", lambda: self._operator.idle and self._job.state in ENDED)
        return kind

    # ---- what is done

    async def _drain(self) -> None:
        name = self._draw.choice(self._nodes)
        self._world.note(f"! {name} is to be drained in peace")
        self._operator.drain_later(0.0, name, force=False)
        if self._can_spare(1, self._job.spec.fault_tolerance + 1):
            await self._until("the end of the drain", lambda: self._is_drained(name))
        elif not self._can_spare(1):
            await self._until("why it is kept", lambda: self._is_kept(name))
        else:  # shadows may make up for it
            await self._until(
                "the answer to the drain", lambda: self._is_drained(name) or self._is_kept(name)
            )
        if self._is_drained(name) == (name in self._job.current.members):
            raise Broken(f"{name} is drained and trains, or was needed and trains no more")
        self._operator.undrain_later(0.0, name)
        await self._until("training on all nodes again", self._is_whole)

    async def _end_agent(self) -> None:
        name = self._draw.choice(self._nodes)
        if not self._can_spare(1):
            return await self._drain()
        agent = self._world.agents[name]
        self._strike("end_agent", f"agent {name} told to end in peace")
        agent.process.call(agent.supervisor.leave)
        await self._until("the end of the agent", lambda: not agent.process.alive)
        self._faults.revive_all()
        return await self._until("training on all nodes again", self._is_whole)

    async def _lose_claimed(self) -> None:
        assert self._job.current.made is not None
        if not (claimed := self._job.current.made.can_lose):
            return await self._drain()
        restored = self._world.watch.facts["JobRestored"]
        lost = self._lose(self._draw.randint(1, claimed))
        await self._until(f"training without {lost}", lambda: self._trains_without(lost))
        await self._come_back()
        if self._world.watch.facts["JobRestored"] != restored:
            raise Broken(f"{self._job.id} needed a checkpoint, though it could lose {lost}")
        return None

    async def _lose_more(self) -> None:
        """All that it needs is a checkpoint, and nodes."""
        made = self._job.current.made
        assert made is not None
        number = min(len(self._nodes), made.can_lose + 1)
        if saves := self._job.spec.checkpoint is not None:
            self._operator.save_later(0.0, NUMBER)
            await self._until("a checkpoint", lambda: self._job.saves.checkpoint)
        self._lose(number)
        await asyncio.sleep(self._draw.uniform(BOOT_S, 15.0))
        if saves:
            await self._come_back()
            return
        self._faults.revive_all()
        await self._until(
            "what becomes of it",
            lambda: self._is_whole() or "no live worker holds" in self._job.reason,
        )

    async def _mistake_directory(self) -> None:
        """The right one is back some time later."""
        world, before = self._world, self._trained()
        self._kill_head("its head starts on an empty directory")
        world.stand_in = MasterHost(world, world.directory(copied=False))
        await asyncio.sleep(self._draw.uniform(0.5, 20.0))
        world.stand_in.process.kill()
        world.stand_in = None
        world.start_master()
        await self._until_untouched(before)

    async def _lose_directory(self) -> None:
        """All that a job needs is to be adopted."""
        before = self._trained()
        self._kill_head("its head loses its directory")
        self._go_on_from(self._world.directory(copied=False))
        await self._until_untouched(before)

    async def _start_old_copy(self) -> None:
        """Plans that were made since are adopted."""
        world = self._world
        copy = world.directory(copied=True, put_back=self._draw.random() < 0.3)
        if self._job.current.made is not None and self._job.current.made.can_lose:
            trainers = sorted(world.trainers(), key=lambda trainer: trainer.worker)
            victim, generation = self._draw.choice(trainers), self._job.current.generation
            self._strike("kill_worker", f"worker {victim.worker} killed in peace")
            world.end_worker(victim, signal=9)
            await self._until("another plan", lambda: self._job.current.generation > generation)
            await self._until("training on all nodes again", self._is_whole)
        before = self._trained()
        self._kill_head("its head goes on from an old copy")
        self._go_on_from(copy)
        await self._until_untouched(before)

    async def _part_heads(self) -> None:
        """Each goes on with those that it has, and the copy with all of them in the end."""
        world = self._world
        world.in_trouble = True
        if self._faults.strike_with("part_heads"):
            await self._until("end of the other head", lambda: world.rival is None)
        world.in_trouble, world.peace_at = False, world.loop.clock
        self._faults.revive_all()
        await self._until(
            "what becomes of it",
            lambda: (
                self._is_whole()
                or self._job.state in ENDED
                or "no live worker holds" in self._job.reason
            ),
        )

    def _kill_head(self, words: str) -> None:
        self._world.note(f"! {words} in peace")
        assert self._world.live_master is not None
        self._world.live_master.process.kill()

    def _go_on_from(self, config: MasterConfig) -> None:
        self._world.config = config
        self._world.start_master()

    def _trained(self) -> tuple[int, frozenset[Incarnation]]:
        """Return the generation, and the processes that have a part in it."""
        processes = (trainer.incarnation for trainer in self._world.trainers())
        return self._job.current.generation, frozenset(processes)

    async def _until_untouched(self, before: tuple[int, frozenset[Incarnation]]) -> None:
        """All nodes are back, and train on, as if nothing had been. Raises Broken."""
        ledger = self._world.ledger(self._operator.jobs[NUMBER])
        step = max(ledger.steps, default=0)

        def goes_on() -> bool:
            known = ledger.job_id in self._state.jobs and self._is_whole()
            back = known and all(self._node(name).connected for name in self._nodes)
            return back and max(ledger.steps, default=0) > step + 3

        await self._until("training on as before", goes_on)
        if self._trained() != before:
            raise Broken(f"{ledger.job_id} does not go on as it was for another head")

    def _lose(self, number: int) -> list[NodeName]:
        names = sorted(self._draw.sample(self._nodes, number))
        self._strike("lose_several", f"hosts {' '.join(names)} lost at once in peace")
        for name in names:
            if self._draw.random() < 0.5:
                self._world.lose_host(name)
            else:
                self._world.agents[name].process.kill()
        return names

    async def _come_back(self) -> None:
        self._faults.revive_all()
        await self._until("training on all nodes again", self._is_whole)

    def _strike(self, kind: str, words: str) -> None:
        self._world.note(f"! {words}")
        self._faults.truth.struck(kind, words, self._nodes)

    # ---- how it is

    async def _until(self, what: str, holds: Callable[[], object]) -> None:
        until = self._world.loop.clock + LONGEST_S
        while not holds():
            if self._world.loop.clock > until:
                job = self._world.state.job if self._world.state is not None else None
                how = f"{job.state}: {job.reason}" if job is not None else "no job"
                raise Broken(f"in peace, no {what} within {LONGEST_S:.0f} s; {how}")
            self._peace.look()
            await asyncio.sleep(0.2)

    @property
    def _state(self) -> ClusterState:
        assert self._world.state is not None
        return self._world.state

    @property
    def _job(self) -> Job:
        return self._state.jobs[self._operator.jobs[NUMBER]]

    def _node(self, name: NodeName) -> Node:
        return self._state.nodes[name]

    def _is_whole(self) -> bool:
        job = self._job
        return (
            job.state == "running"
            and sorted(job.current.members) == self._nodes
            and job.current.stepped == job.current.generation
        )

    def _trains_without(self, names: list[NodeName]) -> bool:
        job = self._job
        gone = not set(job.current.members) & set(names)
        return job.state == "running" and gone and job.current.stepped == job.current.generation

    def _can_spare(self, number: int, pipelines: int = 1) -> bool:
        """Whether so many pipelines are left."""
        least = self._job.spec.resources.min_nodes_per_pipeline or 1
        return len(self._nodes) - number >= pipelines * least

    def _is_drained(self, name: NodeName) -> bool:
        drain = self._node(name).drain
        return drain is not None and drain.done

    def _is_kept(self, name: NodeName) -> bool:
        drain = self._node(name).drain
        return drain is not None and bool(drain.kept)
