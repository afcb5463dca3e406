"""What people and hosts do to a cluster beside breaking it: drains, ends, and errors of their own.

Each method strikes once, says in words what it did, and names the nodes that it did it to; ''
where there is nothing to do it to. Must not know when it strikes, or what must come of it.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.client import Operator

from oobleck.core.ids import NodeName
from oobleck.master.rules.faults import MOST_FAILURES

if TYPE_CHECKING:
    from simulation.world import World

#: Between the ends of the workers of a node that flaps.
_FLAP_S = (1.0, 3.0)


class Upkeep:
    def __init__(
        self,
        world: "World",
        operator: Operator,
        draw: random.Random,
        nodes: list[NodeName],
        for_a_while: Callable[..., float],
        revive: Callable[[NodeName], None],
    ) -> None:
        self._world = world
        self._operator = operator
        self._draw = draw
        self._nodes = nodes
        self._for_a_while = for_a_while
        self._revive = revive

    def drain_node(self) -> str:
        name, force = self._draw.choice(self._nodes), self._draw.random() < 0.3
        self._operator.drain_later(0.0, name, force=force)
        if self._draw.random() < 0.5:
            self._operator.undrain_later(self._draw.uniform(0.5, 15.0), name)
        return f"{name} is to be drained{', by force' if force else ''}"

    def undrain_node(self) -> str:
        name = self._draw.choice(self._nodes)
        self._operator.undrain_later(0.0, name)
        return f"{name} is to be undrained"

    def end_agent(self) -> str:
        """SIGTERM, and now and then another one from somebody who cannot wait."""
        live = sorted(name for name, agent in self._world.agents.items() if agent.process.alive)
        if not live:
            return ""
        name = self._draw.choice(live)
        agent = self._world.agents[name]
        agent.process.call(agent.supervisor.leave)
        if self._draw.random() < 0.2:
            agent.process.later(self._draw.uniform(0.1, 3.0), agent.supervisor.leave)
        agent.process.on_end.append(lambda: self._for_a_while(lambda: self._revive(name)) and None)
        return f"agent {name} told to end"

    def flap_node(self) -> str:
        """Its workers end again and again, as long as they do."""
        name = self._draw.choice(self._nodes)
        self._world.flapped = True
        at_s = 0.0
        for _ in range(MOST_FAILURES + 1):
            self._world.loop.call_later(at_s, self._end_workers, name)
            at_s += self._draw.uniform(*_FLAP_S)
        return f"workers of {name} killed again and again"

    def _end_workers(self, name: NodeName) -> None:
        agent = self._world.agents.get(name)
        if agent is None or not self._world.in_trouble:
            return
        for trainer in list(agent.trainers.values()):
            self._world.end_worker(trainer, signal=9)

    def break_warm(self) -> str:
        """What workers are forked from cannot be started."""
        name = self._draw.choice(self._nodes)
        agent = self._world.agents.get(name)
        if agent is None:
            return ""
        self._world.unstartable.add(name)
        if agent.warm is not None:
            agent.warm.kill()
        span_s = self._for_a_while(lambda: self._world.unstartable.discard(name), 30.0)
        return f"no warm process starts on {name} for {span_s:.1f} s"

    def sicken_node(self) -> str:
        """Its workers find that it is at fault."""
        name = self._draw.choice(self._nodes)
        self._world.sick.add(name)
        span_s = self._for_a_while(lambda: self._world.sick.discard(name), 20.0)
        return f"the disk of {name} is broken for {span_s:.1f} s"

    def fail_job(self) -> str:
        """Its model raises an exception at a step that is to come."""
        jobs = sorted(set(self._world.ledgers) - set(self._world.fails_at))
        if not jobs:
            return ""
        job_id = self._draw.choice(jobs)
        step = max(self._world.ledgers[job_id].steps, default=0) + self._draw.randint(1, 30)
        self._world.fails_at[job_id] = step
        return f"the model of {job_id} is to fail at step {step}"
