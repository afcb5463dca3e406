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
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from simulation.calm import Calm
from simulation.client import Operator
from simulation.faults import Faults
from simulation.peace import Peace
from simulation.watch import Broken
from simulation.world import World

from oobleck.core.ids import NodeName
from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.host.detection import Detection
from oobleck.master.api import operator_service
from oobleck.master.state.job import ENDED, Job
from oobleck.master.storage import journal
from support.jobs import job_spec

#: Faults strike in this span; by the end of it all is mended.
TROUBLE_S = (1.0, 25.0)
#: Longer than that only for second faults, which strike when the job goes on after the first.
_AMBUSH_S = 15
#: In peace, everything must have ended in this time. A thread that hangs and alone has a part of
#: the model is given `Detection.fruitless_s`.
PEACE_S = 1500.0
#: Longer than it takes until files are written for which there was no room before.
_WRITTEN_S = 3.0
#: From one fault to the next, on average.
BETWEEN_S = 3.0
#: Shorter than by default where a run would only be longer by it.
TIMING = Detection(first_step_s=30.0, profile_timeout_s=20.0, start_timeout_s=15.0)
#: How many runs go on in peace.
_CALM = 0.2
#: Bytes of events after which a journal begins anew with what they have led to.
_COMPACT_BYTES = (2 << 20, 10_000)


@dataclass(slots=True)
class Outcome:
    seed: int
    transcript: list[str]
    problem: BaseException | None = None
    faults: Counter[str] = field(default_factory=Counter)
    #: States that the jobs ended in.
    ends: list[str] = field(default_factory=list)
    incidents: int = 0
    reconfigurations: int = 0
    iterations: int = 0
    #: Events of each kind that were journaled.
    facts: Counter[str] = field(default_factory=Counter)
    #: What was done in peace; empty: nothing.
    calm: str = ""


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
        self.faults = Faults(self.world, self.operator, self.draw, self._nodes, self._slots)

    # ---- the run

    def run(self) -> Outcome:
        asyncio._set_running_loop(None)
        journal._COMPACT_BYTES = self.draw.choice(_COMPACT_BYTES)
        try:
            with self.world.disk.installed():
                self.world.loop.run_until_complete(self._main())
        except Broken as broken:
            self.outcome.problem = broken
        except Exception as error:  # noqa: BLE001 - the outcome of a run
            self.outcome.problem = self.world.watch.problem or error
        finally:
            self._end()
            journal._COMPACT_BYTES = _COMPACT_BYTES[0]
        return self.outcome

    def _end(self) -> None:
        world = self.world
        self.outcome.faults, self.outcome.facts = self.faults.struck, world.watch.facts
        self.outcome.reconfigurations = len(world.watch.plans) - len(world.ledgers)
        self.outcome.iterations = world.loop.iterations
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
                self.faults.strike()
        await asyncio.sleep(max(0.0, TROUBLE_S[1] - world.loop.clock))
        for _ in range(_AMBUSH_S):
            if world.in_ambush:
                await asyncio.sleep(1.0)
        self.faults.mend()
        await self._settle()
        if draw.random() < _CALM:
            calm = Calm(world, self.operator, self.faults, draw, self._nodes)
            self.outcome.calm = await calm.play()
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
            restart=int(draw.random() < 0.3),
        )

    # ---- peace

    async def _settle(self) -> None:
        """Until all jobs have ended, or wait for what cannot come."""
        until = self.world.loop.clock + PEACE_S
        lost_since: float | None = None
        stuck_since = self.world.loop.clock
        peace = Peace(self.world)
        while self.world.loop.clock < until:
            await asyncio.sleep(0.5)
            self.faults.revive_all()
            jobs = self._jobs()
            held = self.world.state is None or self.world.state.held
            if self.operator.idle and not held and all(map(self._has_ended, jobs)):
                # What was written on disks that were full until peace is tried again.
                await asyncio.sleep(_WRITTEN_S)
                return
            peace.look()
            waiting = [job for job in jobs if job.state == "waiting for nodes"]
            if not waiting:
                stuck_since = self.world.loop.clock
            elif self.world.loop.clock > stuck_since + 30.0:
                # An operator looks why, and gives it what was taken from it, or gives it up where
                # it began on the stranger, whose like does not come again, or needs a liar that has
                # called its own workers ended.
                stuck_since = self.world.loop.clock
                if self.world.state is not None and self.world.state.superseded is not None:
                    self.faults.heads.go_above()
                for job in waiting:
                    lied = self.world.liar is not None and (
                        f"not ready after 15 s: {self.world.liar}" in job.reason
                        or "to hold the model" in job.reason
                    )
                    if lied or "because the job uses nodes with" in job.reason:
                        self.operator.cancel_now(job.id)
                for name in self._nodes:
                    self.operator.undrain_later(0.0, name)
            waits = [job for job in waiting if "no live worker holds" in job.reason]
            if not waits:
                lost_since = None
            elif lost_since is None:
                lost_since = self.world.loop.clock
            elif self.world.loop.clock > lost_since + 40.0:
                # All that can come back is back, so it must have gone on, or failed.
                raise Broken(f"{waits[0].id} waits in peace: {waits[0].reason}")
        raise Broken(f"not settled after {PEACE_S} s of peace: {self._told()}")

    def _has_ended(self, job: Job) -> bool:
        """Whether it has, and the master waits for none of its records."""
        assert self.world.master is not None
        waits = self.world.master.core.archive.metrics(job.id).waits
        return job.state in ENDED and not waits

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
            self.outcome.incidents += self.faults.truth.check(job.id)


@functools.cache
def _parsed(text: str) -> JobSpec:
    return parse_job(text)


def simulate(seed: int) -> Outcome:
    # Reading a job's text takes longer than all else in a run, and the texts are few.
    operator_service.parse_job = _parsed
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
