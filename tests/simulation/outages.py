"""What strikes the network, the master, its disk and the calendars of hosts.

The rules for each method are those of `faults`.
"""

import random
from collections.abc import Callable

from simulation.world import World

from oobleck.core.ids import NodeName
from oobleck.master import process
from oobleck.master.config import Unusable
from oobleck.master.process import locked


class Outages:
    def __init__(
        self,
        world: World,
        draw: random.Random,
        nodes: list[NodeName],
        for_a_while: Callable[..., float],
    ) -> None:
        self._world = world
        self._draw = draw
        self._nodes = nodes
        self._for_a_while = for_a_while

    # ---- the network

    def cut_control(self) -> str:
        name = self._draw.choice(self._nodes)
        if name not in self._world.wires:
            return ""
        wire = self._world.wires[name]
        up, down = self._draw.choice(((False, False), (True, False), (False, True)))
        wire.set(up=up, down=down)
        span_s = self._for_a_while(lambda: wire.set(up=True, down=True))
        return f"{name} and the master cut for {span_s:.1f} s (up {up}, down {down})"

    def cut_data(self) -> str:
        aside = self._draw.sample(self._nodes, self._draw.randint(1, len(self._nodes) - 1))
        cut = {(a, b) for a in aside for b in self._nodes if b not in aside}
        if self._draw.random() < 0.5:
            cut |= {(b, a) for a, b in cut}
        self._world.set_cut(self._world.cut | cut)
        span_s = self._for_a_while(lambda: self._world.set_cut(set()))
        return f"{' '.join(aside)} cut from the other workers for {span_s:.1f} s"

    def cut_both(self) -> str:
        aside = self._draw.sample(self._nodes, self._draw.randint(1, len(self._nodes)))
        cut = {(a, b) for a in aside for b in self._nodes if b not in aside}
        self._world.set_cut(self._world.cut | cut | {(b, a) for a, b in cut})
        wires = [self._world.wires[name] for name in aside if name in self._world.wires]

        def heal() -> None:
            self._world.set_cut(set())
            for wire in wires:
                wire.set(up=True, down=True)

        for wire in wires:
            wire.set(up=False, down=False)
        span_s = self._for_a_while(heal)
        return f"{' '.join(aside)} cut off for {span_s:.1f} s"

    # ---- the master

    def kill_master(self) -> str:
        if (master := self._world.live_master) is None:
            return ""
        self._world.torn = self._draw.random() < 0.5
        master.process.kill()
        self._for_a_while(self._world.restart_master)
        return "master killed"

    def kill_master_at_commit(self) -> str:
        if (master := self._world.live_master) is None:
            return ""
        self._world.torn = self._draw.random() < 0.5
        master.journal.dies_in = self._draw.randint(1, 4)
        master.journal.dies_after = self._draw.random() < 0.5
        master.process.on_end.append(lambda: self._for_a_while(self._world.restart_master) and None)
        return "master to be killed at a commit"

    def kill_master_at_point(self) -> str:
        """In the middle of an iteration, or of a write."""
        if (master := self._world.live_master) is None:
            return ""
        point = self._draw.choice(process.POINTS)
        self._world.torn = False
        self._world.disk.arm(point, self._draw.randint(1, 3))
        master.process.on_end.append(lambda: self._for_a_while(self._world.restart_master) and None)
        return f"master to be killed when {point}"

    def freeze_master(self) -> str:
        if (master := self._world.live_master) is None:
            return ""
        process = master.process
        process.stop()
        self._world.look_over()

        def go_on() -> None:
            process.go_on()
            self._world.look_over()

        return f"master stopped for {self._for_a_while(go_on, 30.0):.1f} s"

    def start_second_master(self) -> str:
        """On the same state directory, which it is refused."""
        if self._world.live_master is None:
            return ""
        try:
            with locked(self._world.config.state_dir):
                self._world.watch.broken("two masters have the same state directory")
        except Unusable:
            pass
        return "another master refused"

    # ---- its disk

    def fill_disk(self) -> str:
        """Not even the journal has room."""
        self._world.disk_full = self._world.disk.full = True
        return f"disk full for {self._for_a_while(self._free_disk):.1f} s"

    def fill_files(self) -> str:
        """There is room for the journal alone: metrics, evaluations and events have to wait."""
        self._world.disk.full = True
        return f"disk full but for the journal for {self._for_a_while(self._free_disk):.1f} s"

    def _free_disk(self) -> None:
        self._world.disk_full = self._world.disk.full = False
        self._world.restart_master()

    # ---- calendars

    def jump_calendar(self) -> str:
        """Of all hosts, of the master's alone, or of a node's."""
        hosts = ["master", *self._nodes]
        host = self._draw.choice(hosts)
        seconds = self._draw.choice((1.0, 60.0, 7200.0)) * self._draw.uniform(-1.0, 1.0)
        whose = hosts if self._draw.random() < 0.3 else [host]
        for each in whose:
            self._world.jump(each, seconds)
        return f"calendars of {' '.join(whose)} jump by {seconds:.0f} s"
