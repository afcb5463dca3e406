"""One run of the simulation: a cluster, jobs, faults for a while, and then peace.

Everything is drawn from the seed. `python tests/simulation/drill.py SEED` plays one again and
prints what happened and what was decided.
"""

import asyncio
import functools
import logging
import random
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from scenario import job_spec
from simulation.client import Operator
from simulation.peace import Peace
from simulation.truth import Truth
from simulation.upkeep import Upkeep
from simulation.watch import Broken
from simulation.world import World

from oobleck.agent import assignments
from oobleck.host.detection import Detection
from oobleck.master import service
from oobleck.master.__main__ import Unusable, locked
from oobleck.master.job import ENDED, Job
from oobleck.planner.ids import NodeName
from oobleck.planner.job import JobSpec
from oobleck.planner.jobfile import parse_job

#: Faults strike in this span; by the end of it all is mended.
TROUBLE_S = (1.0, 25.0)
#: In peace, everything must have ended in this time. A thread that hangs and alone has a part of
#: the model is given `Detection.fruitless_s`.
PEACE_S = 1500.0
#: From one fault to the next, on average.
BETWEEN_S = 3.0
#: No host is back sooner.
BOOT_S = 3.0
#: Shorter than by default where a run would only be longer by it.
TIMING = Detection(first_step_s=30.0, profile_timeout_s=20.0, start_timeout_s=15.0)
#: How often each kind of fault strikes, beside the others.
_WEIGHTS = {
    "kill_worker": 4,
    "kill_agent": 4,
    "lose_host": 3,
    "kill_warm": 1,
    "freeze_worker": 3,
    "hang_worker": 2,
    "freeze_host": 2,
    "freeze_agent": 1,
    "cut_control": 3,
    "cut_data": 3,
    "cut_both": 2,
    "kill_master": 3,
    "kill_master_at_commit": 3,
    "freeze_master": 2,
    "fill_disk": 1,
    "jump_calendar": 1,
    "fail_forks": 1,
    "drain_node": 3,
    "undrain_node": 1,
    "end_agent": 3,
    "flap_node": 1,
    "break_warm": 1,
    "sicken_node": 1,
    "fail_job": 1,
    "strike_twice": 4,
    "start_second_master": 1,
}
#: Where on the way into the next generation a second fault strikes.
_PHASES = ("aborted", "joined", "transferred", "first step")
_FIRST = ("kill_worker", "lose_host", "kill_agent", "freeze_worker", "end_agent", "drain_node")
_SECOND = ("kill_worker", "lose_host", "kill_agent", "freeze_worker", "cut_data", "kill_master")
FAULTS = frozenset(_WEIGHTS) | frozenset(f"second when {phase}" for phase in _PHASES)


@dataclass(slots=True)
class Outcome:
    seed: int
    transcript: list[str]
    problem: BaseException | None = None
    faults: dict[str, int] = field(default_factory=dict)
    #: States that the jobs ended in.
    ends: list[str] = field(default_factory=list)
    decisions: int = 0
    incidents: int = 0
    reconfigurations: int = 0
    turns: int = 0


class Drill:
    def __init__(self, seed: int, state_dir: Path) -> None:
        self.draw = random.Random(f"drill {seed}")
        self.world = World(seed, state_dir, TIMING, TROUBLE_S[1] + PEACE_S + 60.0)
        self.outcome = Outcome(seed, self.world.transcript)
        self.world.loop.at_rest = self._at_rest
        self._slots = self.draw.choice((1, 1, 1, 2))
        count = self.draw.randint(2, 6)
        self._nodes = [NodeName(f"n{number + 1}") for number in range(count)]
        self.operator = Operator(self.world)
        self._frozen: list[Callable[[], None]] = []
        self.upkeep = Upkeep(
            self.world, self.operator, self.draw, self._nodes, self._for_a_while, self._revive
        )
        self.truth = Truth(self.world)

    # ---- the run

    def run(self) -> Outcome:
        asyncio._set_running_loop(None)
        try:
            self.world.loop.run_until_complete(self._main())
        except Broken as broken:
            self.outcome.problem = broken
        except Exception as error:  # noqa: BLE001 - the outcome of a run
            self.outcome.problem = self.world.watch.problem or error
        finally:
            self._end()
        return self.outcome

    def _end(self) -> None:
        world = self.world
        self.outcome.decisions = world.watch.facts.total()
        self.outcome.reconfigurations = len(world.watch.plans) - len(world.ledgers)
        self.outcome.turns = world.loop.turns
        self.operator.process.kill()
        world.end()

    def _at_rest(self) -> None:
        self.world.watch.look()
        if self.world.watch.problem is not None:
            raise self.world.watch.problem
        if self.world.loop.troubles:
            raise self.world.loop.troubles[0]

    async def _main(self) -> None:
        draw, world = self.draw, self.world
        world.start_master()
        for name in self._nodes:
            world.loop.call_later(draw.uniform(0.0, 2.0), world.start_agent, name, self._slots)
        for number in range(draw.choice((1, 1, 1, 2, 4))):
            spec = self._job(number)
            self.operator.submit_later(number, draw.uniform(0.0, 3.0), spec)
            if draw.random() < 0.1:
                self.operator.cancel_later(draw.uniform(3.0, 30.0), number)
            if spec.checkpoint is not None and draw.random() < 0.5:
                self.operator.save_later(draw.uniform(3.0, 20.0), number)
        await asyncio.sleep(TROUBLE_S[0] + 2.0)
        while world.loop.clock < TROUBLE_S[1]:
            await asyncio.sleep(draw.expovariate(1.0 / BETWEEN_S))
            if world.loop.clock < TROUBLE_S[1]:
                self._strike()
        await asyncio.sleep(max(0.0, TROUBLE_S[1] - world.loop.clock))
        self._mend()
        await self._settle()
        self._check_ends()

    def _job(self, number: int) -> JobSpec:
        draw = self.draw
        f = draw.randint(0, min(2, len(self._nodes) - 1))
        return job_spec(
            f"job{number}",
            steps=draw.choice((10, 25, 50, 90) if number == 0 else (10, 25)),
            f=f,
            # Now and then it has to wait for all nodes, and others train meanwhile.
            min_nodes=draw.randint(1, len(self._nodes) // (f + 1)),
            measure=int(draw.random() < 0.2),
            checkpoint=int(draw.random() < 0.4),
            evaluate=draw.choice((0, 0, 7)),
        )

    # ---- faults

    def _strike(self) -> None:
        kind = self.draw.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))[0]
        self._strike_with(kind)

    def _strike_with(self, kind: str) -> bool:
        """Whether there was anything to strike."""
        own: Callable[[], str] | None = getattr(self, f"_{kind}", None)
        if not (done := own() if own is not None else getattr(self.upkeep, kind)()):
            return False
        self._count(kind)
        self.world.note(f"! {done}")
        self.truth.struck(kind, done, self._nodes)
        return True

    def _count(self, kind: str) -> None:
        self.outcome.faults[kind] = self.outcome.faults.get(kind, 0) + 1

    def _strike_twice(self) -> str:
        """The second one when the first worker tells that it has got to a phase."""
        phase, second = self.draw.choice(_PHASES), self.draw.choice(_SECOND)

        def strike() -> None:
            if self.world.in_trouble and self._strike_with(second):
                self._count(f"second when {phase}")

        if not self._strike_with(self.draw.choice(_FIRST)):
            return ""
        newest = max((generation for _, generation in self.world.watch.plans), default=0)
        self.world.ambush(phase, newest, strike)
        return f"{second} to come when {phase}"

    def _start_second_master(self) -> str:
        """On the same state directory, which it is refused."""
        master = self.world.master
        if master is None or not master.process.alive:
            return ""
        try:
            with locked(self.world.config.state_dir):
                self.world.watch.broken("two masters have the same state directory")
        except Unusable:
            pass
        return "another master refused"

    def _for_a_while(
        self, undo: Callable[[], None], longest_s: float = 12.0, least_s: float = 0.0
    ) -> float:
        """Have it undone after some time, and at the latest when peace comes."""
        done = False

        def once() -> None:
            nonlocal done
            if not done:
                done = True
                undo()

        span_s = least_s + self.draw.choice((0.2, 2.0, longest_s)) * self.draw.uniform(0.2, 1.0)
        self.world.loop.call_later(span_s, once)
        self._frozen.append(once)
        return span_s

    def _a_node(self) -> NodeName | None:
        live = [name for name, agent in self.world.agents.items() if agent.process.alive]
        return self.draw.choice(sorted(live)) if live else None

    def _kill_worker(self) -> str:
        trainers = sorted(self.world.trainers(), key=lambda trainer: trainer.worker)
        if not trainers:
            return ""
        trainer = self.draw.choice(trainers)
        self.world.end_worker(trainer, signal=9)
        return f"worker {trainer.worker} killed"

    def _kill_agent(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        self.world.agents[name].process.kill()
        self._for_a_while(lambda: self._revive(name), 15.0)
        return f"agent {name} killed"

    def _lose_host(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        self.world.lose_host(name)
        self._for_a_while(lambda: self._revive(name), 20.0, BOOT_S)
        return f"host {name} lost"

    def _revive(self, name: NodeName) -> None:
        if not self.world.agents[name].process.alive:
            self.world.note(f"! agent {name} started")
            self.world.start_agent(name, self._slots)

    def _kill_warm(self) -> str:
        name = self._a_node()
        if name is None or (warm := self.world.agents[name].warm) is None:
            return ""
        warm.kill()
        return f"warm process of {name} killed"

    def _freeze_worker(self) -> str:
        trainers = sorted(self.world.trainers(), key=lambda trainer: trainer.worker)
        if not trainers:
            return ""
        process = self.draw.choice(trainers).process
        process.stop()
        span_s = self._for_a_while(process.go_on, 60.0)
        return f"{process.name} stopped for {span_s:.1f} s"

    def _hang_worker(self) -> str:
        trainers = sorted(self.world.trainers(), key=lambda trainer: trainer.worker)
        if not trainers:
            return ""
        trainer = self.draw.choice(trainers)
        trainer.stuck = self.world.hung = True
        return f"the training thread of {trainer.worker} gets stuck"

    def _freeze_host(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        agent = self.world.agents[name]
        agent.stop_host()
        self.world.look_over()
        span_s = self._for_a_while(lambda: (agent.continue_host(), self.world.look_over()))  # type: ignore[arg-type,return-value]
        return f"host {name} stopped for {span_s:.1f} s"

    def _freeze_agent(self) -> str:
        if (name := self._a_node()) is None:
            return ""
        process = self.world.agents[name].process
        process.stop()
        self.world.look_over()
        span_s = self._for_a_while(lambda: (process.go_on(), self.world.look_over()))  # type: ignore[arg-type,return-value]
        return f"agent {name} stopped for {span_s:.1f} s"

    def _cut_control(self) -> str:
        name = self.draw.choice(self._nodes)
        if name not in self.world.wires:
            return ""
        wire = self.world.wires[name]
        up, down = self.draw.choice(((False, False), (True, False), (False, True)))
        wire.set(up=up, down=down)
        span_s = self._for_a_while(lambda: wire.set(up=True, down=True))
        return f"{name} and the master cut for {span_s:.1f} s (up {up}, down {down})"

    def _cut_data(self) -> str:
        aside = self.draw.sample(self._nodes, self.draw.randint(1, len(self._nodes) - 1))
        cut = {(a, b) for a in aside for b in self._nodes if b not in aside}
        if self.draw.random() < 0.5:
            cut |= {(b, a) for a, b in cut}
        self.world.set_cut(self.world.cut | cut)
        span_s = self._for_a_while(lambda: self.world.set_cut(set()))
        return f"{' '.join(aside)} cut from the other workers for {span_s:.1f} s"

    def _cut_both(self) -> str:
        aside = self.draw.sample(self._nodes, self.draw.randint(1, len(self._nodes)))
        cut = {(a, b) for a in aside for b in self._nodes if b not in aside}
        self.world.set_cut(self.world.cut | cut | {(b, a) for a, b in cut})
        wires = [self.world.wires[name] for name in aside if name in self.world.wires]

        def heal() -> None:
            self.world.set_cut(set())
            for wire in wires:
                wire.set(up=True, down=True)

        for wire in wires:
            wire.set(up=False, down=False)
        span_s = self._for_a_while(heal)
        return f"{' '.join(aside)} cut off for {span_s:.1f} s"

    def _kill_master(self) -> str:
        master = self.world.master
        if master is None or not master.process.alive:
            return ""
        self.world.torn = self.draw.random() < 0.5
        master.process.kill()
        self._for_a_while(self._restart_master)
        return "master killed"

    def _kill_master_at_commit(self) -> str:
        master = self.world.master
        if master is None or not master.process.alive:
            return ""
        self.world.torn = self.draw.random() < 0.5
        master.journal.dies_in = self.draw.randint(1, 4)
        master.journal.dies_after = self.draw.random() < 0.5
        master.process.on_end.append(lambda: self._for_a_while(self._restart_master) and None)
        return "master to be killed at a commit"

    def _restart_master(self) -> None:
        master = self.world.master
        if master is not None and not master.process.alive and not self.world.disk_full:
            self.world.note("! master started")
            self.world.start_master()

    def _freeze_master(self) -> str:
        master = self.world.master
        if master is None or not master.process.alive:
            return ""
        process = master.process
        process.stop()
        self.world.look_over()
        span_s = self._for_a_while(lambda: (process.go_on(), self.world.look_over()), 30.0)  # type: ignore[arg-type,return-value]
        return f"master stopped for {span_s:.1f} s"

    def _fill_disk(self) -> str:
        self.world.disk_full = True

        def free() -> None:
            self.world.disk_full = False
            self._restart_master()

        return f"disk full for {self._for_a_while(free):.1f} s"

    def _jump_calendar(self) -> str:
        self.world.jump(self.draw.uniform(-7200.0, 7200.0))
        return f"the calendar is {self.world.calendar_jump_s:.0f} s off"

    def _fail_forks(self) -> str:
        self.world.fork_failures = 0.5

        def mend() -> None:
            self.world.fork_failures = 0.0

        return f"half of all forks fail for {self._for_a_while(mend):.1f} s"

    # ---- peace

    def _mend(self) -> None:
        self.world.note("! peace")
        self.world.in_trouble = False
        self.world.peace_at = self.world.loop.clock
        for undo in list(self._frozen):
            undo()
        if self.world.master is not None:
            self.world.master.journal.dies_in = None
        self._revive_all()
        self._restart_master()

    def _revive_all(self) -> None:
        for name in self._nodes:
            if name in self.world.agents:
                self._revive(name)

    async def _settle(self) -> None:
        """Until all jobs have ended, or wait for what cannot come."""
        until = self.world.loop.clock + PEACE_S
        lost_since: float | None = None
        stuck_since = self.world.loop.clock
        peace = Peace(self.world)
        while self.world.loop.clock < until:
            await asyncio.sleep(0.5)
            self._restart_master()
            self._revive_all()
            jobs = self._jobs()
            if self.operator.idle and all(job.state in ENDED for job in jobs):
                return
            peace.look()
            if not any(job.state == "waiting for nodes" for job in jobs):
                stuck_since = self.world.loop.clock
            elif self.world.loop.clock > stuck_since + 30.0:
                # An operator looks why, and gives it what was taken from it.
                stuck_since = self.world.loop.clock
                for name in self._nodes:
                    self.operator.undrain_later(0.0, name)
            waits = [job for job in jobs if "no live worker holds" in job.reason]
            if not waits:
                lost_since = None
            elif lost_since is None:
                lost_since = self.world.loop.clock
            elif self.world.loop.clock > lost_since + 40.0:
                self.operator.cancel_now(waits[0].id)
                lost_since = None
        raise Broken(f"not settled after {PEACE_S} s of peace: {self._told()}")

    def _jobs(self) -> list[Job]:
        assert self.world.master is not None
        return list(self.world.master.core.state.jobs.values())

    def _told(self) -> str:
        return "; ".join(f"{job.id} {job.state}: {job.reason}" for job in self._jobs())

    def _check_ends(self) -> None:
        """Every job ends where it should, with every step recorded once and in order."""
        for job in self._jobs():
            self.outcome.ends.append(job.state)
            self.operator.check_end(job)
            self.outcome.incidents += self.truth.check(job.id)


@functools.cache
def _parsed(text: str) -> JobSpec:
    return parse_job(text)


def simulate(seed: int) -> Outcome:
    # Reading a job's text takes longer than all else in a run, and the texts are few.
    service.parse_job, assignments._job = _parsed, _parsed
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="oobleck-simulation.", dir=place) as folder:
        return Drill(seed, Path(folder)).run()


def report(outcome: Outcome) -> str:
    lines = list(outcome.transcript)
    problem = outcome.problem
    if problem is not None and not isinstance(problem, Broken):
        lines += traceback.format_exception(problem)
    return "\n".join([*lines, f"seed {outcome.seed}: {problem or outcome.ends}"])


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    for argument in sys.argv[1:]:
        print(report(simulate(int(argument))))  # noqa: T201
