"""What strikes the head itself: its directory is mistaken, lost, or an old copy, or there are two.

The rules for each method are those of `faults`. One at a time: while another head answers, or one
is to be replaced, nothing else of this kind strikes.
"""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from simulation.client import Operator
from simulation.machines import MasterHost

from oobleck.core.ids import NodeName
from oobleck.master import process
from oobleck.master.config import MasterConfig
from support.jobs import job_spec

if TYPE_CHECKING:
    from simulation.world import World

#: Longest that another head answers, and that one is stopped.
_ANSWERS_S, _STOPPED_S = 20.0, 60.0
#: From one turn of a node's way to the next.
_TURNS_S = (3.0, 15.0)


class Heads:
    def __init__(
        self,
        world: "World",
        operator: Operator,
        draw: random.Random,
        nodes: list[NodeName],
        for_a_while: Callable[..., float],
    ) -> None:
        self._world = world
        self._operator = operator
        self._draw = draw
        self._nodes = nodes
        self._for_a_while = for_a_while
        self._under_way = False

    @property
    def _strikes(self) -> bool:
        world = self._world
        return world.live_master is not None and not self._under_way and not world.disk_full

    # ---- each kind

    def mistake_directory(self) -> str:
        """A head with an empty one answers for a while; now and then somebody gives it a job."""
        if not self._strikes:
            return ""
        self._under_way = True
        self._kill(self._answer_with_nothing)
        return "the head is to be started on an empty directory by mistake"

    def lose_directory(self) -> str:
        """For good: nobody but the agents knows anything."""
        if not self._strikes:
            return ""
        self._under_way = True
        self._kill(lambda: self._go_on_from(self._world.directory(copied=False)))
        return "the head is to lose its disk"

    def start_old_copy(self) -> str:
        """One of now goes on for good some time later, mostly elsewhere."""
        if not self._strikes:
            return ""
        self._under_way = True
        copy = self._world.directory(copied=True, put_back=self._draw.random() < 0.5)

        def strike() -> None:
            if self._world.live_master is None:
                self._go_on_from(copy)
            else:
                self._kill(lambda: self._go_on_from(copy))

        after_s = self._for_a_while(strike)
        return f"after {after_s:.1f} s an old copy of the head's directory is to go on"

    def part_heads(self) -> str:
        """A copy and its original both live, each with some of the nodes, and the copy goes on. Now
        and then the way of a node leads to the other one."""
        if not self._strikes:
            return ""
        world = self._world
        self._under_way = True
        world.rival = world.live_master
        rival = world.rival
        assert rival is not None
        world.config = world.directory(copied=True)
        world.start_master()
        there = self._draw.sample(self._nodes, self._draw.randint(0, len(self._nodes)))
        for name, wire in world.wires.items():
            if name in there:
                wire.head = rival
            else:
                wire.turn()
        if self._draw.random() < 0.5:
            rival.process.stop()
            world.look_over()
            self._for_a_while(lambda: self._go_on(rival), _STOPPED_S, 1.0)

        def end() -> None:
            self._go_on(rival)
            rival.process.kill()
            world.rival, self._under_way = None, False
            for wire in world.wires.values():
                wire.head = None

        span_s = self._for_a_while(end, _STOPPED_S, 1.0)
        self._world.by_itself(self._draw.uniform(*_TURNS_S), lambda: self._turn_one(rival))
        return f"two heads for {span_s:.1f} s, the one before with {' '.join(sorted(there))}"

    def go_above(self) -> None:
        """Do what `status` says where nodes follow a head that is lost for good."""
        if self._world.rival is None and self._world.stand_in is None:
            self._go_on_from(self._world.directory(copied=True))

    # ---- how

    def _turn_one(self, rival: MasterHost) -> None:
        if self._world.rival is not rival:
            return
        wire = self._world.wires[self._draw.choice(sorted(self._world.wires))]
        wire.head = rival if wire.head is None else None
        wire.turn()
        self._world.by_itself(self._draw.uniform(*_TURNS_S), lambda: self._turn_one(rival))

    def _kill(self, then: Callable[[], None]) -> None:
        """At once, or at some point of an iteration; `then` comes when it is dead."""
        master, done = self._world.live_master, False
        assert master is not None

        def after() -> None:
            nonlocal done
            if not done:
                done = True
                self._world.by_itself(0.0, then)

        master.process.on_end.append(after)
        if self._draw.random() < 0.4:
            master.process.kill()
        else:
            self._world.disk.arm(self._draw.choice(process.POINTS), self._draw.randint(1, 3))
            # What it is armed with may never be reached.
            self._for_a_while(master.process.kill, 2.0)

    def _answer_with_nothing(self) -> None:
        world = self._world
        if world.disk_full or not world.in_trouble:
            self._under_way = False
            world.restart_master()
            return
        if world.live_master is not None:  # somebody was quicker
            world.live_master.process.kill()
        world.note("! a head with an empty directory answers")
        world.stand_in = MasterHost(world, world.directory(copied=False))
        if self._draw.random() < 0.5:
            spec = job_spec(f"other{self._draw.randrange(1000)}", steps=50, f=0, min_nodes=1)
            self._operator.submit_to(world.stand_in, spec)

        def end() -> None:
            assert world.stand_in is not None
            world.note("! the right directory is back")
            world.stand_in.process.kill()
            world.stand_in, self._under_way = None, False
            world.restart_master()

        self._for_a_while(end, _ANSWERS_S)

    def _go_on_from(self, config: MasterConfig) -> None:
        world = self._world
        if world.live_master is not None:
            world.live_master.process.kill()
        self._under_way = False
        world.config = config
        world.note(f"! the head goes on from {config.state_dir.name}")
        world.restart_master()

    def _go_on(self, rival: MasterHost) -> None:
        if rival.process.stopped:
            rival.process.go_on()
            self._world.look_over()
