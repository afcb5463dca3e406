"""What strikes a simulated cluster, how often, and how it is mended.

Processes and hosts are struck here, networks, the master and its disk in `outages`, and what people
do is in `upkeep`. Each method strikes once, says in words what it did, and names the nodes that it
did it to; '' where there is nothing to do it to. Must not know what must come of it.
"""

import random
from collections import Counter
from collections.abc import Callable
from itertools import cycle

from simulation.client import Operator
from simulation.heads import Heads
from simulation.lies import Lies
from simulation.outages import Outages
from simulation.trainer import Trainer
from simulation.truth import Truth
from simulation.upkeep import Upkeep
from simulation.world import World

from oobleck.core.ids import NodeName

#: No host is back sooner.
BOOT_S = 3.0
#: How often each kind of fault strikes, beside the others.
_WEIGHTS = {
    "kill_worker": 4,
    "kill_agent": 4,
    "lose_host": 3,
    "lose_several": 3,
    "replace_host": 2,
    "start_twin": 2,
    "kill_warm": 1,
    "freeze_worker": 3,
    "hang_worker": 2,
    "freeze_host": 2,
    "freeze_agent": 1,
    "cut_control": 3,
    "cut_data": 3,
    "cut_both": 2,
    "kill_master": 3,
    "kill_master_at_commit": 2,
    "kill_master_at_point": 3,
    "freeze_master": 2,
    "fill_disk": 1,
    "fill_files": 2,
    "jump_calendar": 2,
    "fail_forks": 1,
    "drain_node": 3,
    "undrain_node": 2,
    "end_agent": 3,
    "flap_node": 2,
    "break_warm": 1,
    "sicken_node": 1,
    "fail_job": 1,
    "strike_twice": 8,
    "start_second_master": 1,
    "mistake_directory": 2,
    "lose_directory": 2,
    "start_old_copy": 2,
    "part_heads": 2,
    "lie_outside": 2,
    "lie_inside": 2,
}
#: Where on the way into the next generation a second fault strikes.
_PHASES = ("aborted", "joined", "transferred", "first step")
_FIRST = ("kill_worker", "lose_host", "kill_agent", "freeze_worker", "end_agent", "drain_node")
_SECOND = (
    "kill_worker", "lose_host", "kill_agent", "freeze_worker", "cut_data", "kill_master",
    "lose_several", "fill_files",
)  # fmt: skip
FAULTS = frozenset(_WEIGHTS) | frozenset(f"second when {phase}" for phase in _PHASES)


class Faults:
    def __init__(
        self,
        world: World,
        operator: Operator,
        draw: random.Random,
        nodes: list[NodeName],
        slots: int,
    ) -> None:
        self._world = world
        self._draw = draw
        self._nodes = nodes
        self._slots = slots
        #: What is undone when peace comes at the latest.
        self._undo: list[Callable[[], None]] = []
        self.heads = Heads(world, operator, draw, nodes, self.for_a_while)
        self._sources = (
            self,
            Outages(world, draw, nodes, self.for_a_while),
            Upkeep(world, operator, draw, nodes, self.for_a_while, self.revive),
            Lies(world, draw, slots, self.for_a_while),
            self.heads,
        )
        self.truth = Truth(world)
        #: Of second strikes, in turn.
        self._phases = cycle(draw.sample(_PHASES, len(_PHASES)))
        #: How often each kind has struck.
        self.struck: Counter[str] = Counter()

    def strike(self) -> None:
        kind = self._draw.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        self.strike_with(kind)

    def strike_with(self, kind: str) -> bool:
        """Whether there was anything to strike."""
        own: Callable[[], str] = next(
            getattr(source, kind) for source in self._sources if hasattr(source, kind)
        )
        if not (done := own()):
            return False
        self.struck[kind] += 1
        self._world.note(f"! {done}")
        self.truth.struck(kind, done, self._nodes)
        return True

    def mend(self) -> None:
        """Nothing is broken any more, and nothing will break."""
        self._world.note("! peace")
        self._world.in_trouble = False
        self._world.peace_at = self._world.loop.clock
        for undo in list(self._undo):
            undo()
        if self._world.master is not None:
            self._world.master.journal.dies_in = None
        self._world.disk.armed = ""
        self.revive_all()

    def revive_all(self) -> None:
        """What has ended is started again."""
        for name in self._nodes:
            if name in self._world.agents:
                self.revive(name)
        self._world.restart_master()

    def revive(self, name: NodeName) -> None:
        if not self._world.agents[name].process.alive:
            self._world.note(f"! agent {name} started")
            self._world.start_agent(name, self._slots)

    def for_a_while(
        self, undo: Callable[[], None], longest_s: float = 12.0, least_s: float = 0.0
    ) -> float:
        """Have it undone after some time, and at the latest when peace comes."""
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                undo()

        span_s = least_s + self._draw.choice((0.2, 2.0, longest_s)) * self._draw.uniform(0.2, 1.0)
        self._world.loop.call_later(span_s, once)
        self._undo.append(once)
        return span_s

    def strike_twice(self) -> str:
        """The second one when the first worker tells that it has got to a phase."""
        phase, seconds = next(self._phases), self._draw.sample(_SECOND, len(_SECOND))

        def strike() -> None:
            # Of some kinds there may be nothing to strike by then.
            if self._world.in_trouble and any(map(self.strike_with, seconds)):
                self.struck[f"second when {phase}"] += 1

        if not self.strike_with(self._draw.choice(_FIRST)):
            return ""
        newest = max((generation for _, generation in self._world.watch.plans), default=0)
        self._world.ambush(phase, newest, strike)
        return f"{seconds[0]} to come when {phase}"

    def _live(self) -> list[NodeName]:
        return sorted(name for name, agent in self._world.agents.items() if agent.process.alive)

    def _a_node(self) -> NodeName | None:
        live = self._live()
        return self._draw.choice(live) if live else None

    def _a_trainer(self) -> Trainer | None:
        trainers = sorted(self._world.trainers(), key=lambda trainer: trainer.endpoint)
        return self._draw.choice(trainers) if trainers else None

    # ---- processes

    def kill_worker(self) -> str:
        if (trainer := self._a_trainer()) is None:
            return ""
        self._world.end_worker(trainer, signal=9)
        return f"worker {trainer.worker} killed"

    def kill_agent(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        self._world.agents[name].process.kill()
        self.for_a_while(lambda: self.revive(name), 15.0)
        return f"agent {name} killed"

    def kill_warm(self) -> str:
        name = self._a_node()
        if name is None or (warm := self._world.agents[name].warm) is None:
            return ""
        warm.kill()
        return f"warm process of {name} killed"

    def freeze_worker(self) -> str:
        if (trainer := self._a_trainer()) is None:
            return ""
        process = trainer.process
        process.stop()
        span_s = self.for_a_while(process.go_on, 60.0)
        return f"{process.name} stopped for {span_s:.1f} s"

    def hang_worker(self) -> str:
        if (trainer := self._a_trainer()) is None:
            return ""
        trainer.stuck = self._world.hung = True
        return f"the training thread of {trainer.worker} gets stuck"

    def freeze_agent(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        process = self._world.agents[name].process
        process.stop()
        self._world.look_over()

        def go_on() -> None:
            process.go_on()
            self._world.look_over()

        return f"agent {name} stopped for {self.for_a_while(go_on):.1f} s"

    def fail_forks(self) -> str:
        self._world.fork_failures = 0.5

        def mend() -> None:
            self._world.fork_failures = 0.0

        return f"half of all forks fail for {self.for_a_while(mend):.1f} s"

    # ---- hosts

    def lose_host(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        self._lose(name)
        return f"host {name} lost"

    def lose_several(self) -> str:
        """At the same moment: as many as the job can lose, or one more."""
        live, state = self._live(), self._world.state
        if len(live) < 2 or state is None:
            return ""
        f = state.job.spec.fault_tolerance if state.job is not None else 0
        number = min(len(live), max(2, f + self._draw.choice((0, 1))))
        names = sorted(self._draw.sample(live, number))
        for name in names:
            self._lose(name)
        return f"hosts {' '.join(names)} lost at once"

    def _lose(self, name: NodeName) -> None:
        self._world.lose_host(name)
        self.for_a_while(lambda: self.revive(name), 20.0, BOOT_S)

    def replace_host(self) -> str:
        """Another machine has its name before anybody can have found out that it is gone."""
        if (name := self._a_node()) is None:
            return ""
        self._world.lose_host(name)
        self._world.loop.call_later(self._draw.uniform(0.05, 1.0), self.revive, name)
        return f"host {name} replaced"

    def start_twin(self) -> str:
        """Another machine with the name of one that is up, and mostly cannot be reached."""
        name = self._a_node()
        if name is None or name in self._world.twins or name in self._world.dark:
            return ""
        wire = self._world.wires[name]
        if cut := self._draw.random() < 0.8:
            wire.set(up=False, down=False)
            self.for_a_while(lambda: wire.set(up=True, down=True))
        self._world.start_twin(name, self._slots)
        span_s = self.for_a_while(lambda: self._world.end_twin(name), 20.0)
        reached = ", which is cut off" if cut else ""
        return f"a second agent {name} for {span_s:.1f} s, beside the first one{reached}"

    def freeze_host(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        agent = self._world.agents[name]
        agent.stop_host()
        self._world.look_over()

        def go_on() -> None:
            agent.continue_host()
            self._world.look_over()

        return f"host {name} stopped for {self.for_a_while(go_on):.1f} s"
