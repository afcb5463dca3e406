"""Whatever happens in whatever order, the core neither breaks nor contradicts itself."""

import random
from dataclasses import replace

import pytest

from oobleck.core.ids import NodeName
from oobleck.host.detection import DETECTIONS
from support.scenario import Player

NODES = ("n1", "n2", "n3", "n4", "n5", "n6")
COMMANDS_PER_WALK = 60
#: Longer than all that is waited for, so short is it here.
TIMING = replace(DETECTIONS["fast"], fruitless_s=60.0, first_step_s=10.0)
LONG_S = 600.0


class Walk:
    """Draws commands that could happen in the player's present state."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.player = Player(TIMING)
        self.text: list[str] = []
        self.now = 0.0

    def step(self) -> None:
        self.now = round(self.now + self.draw.choice((0.0, 0.01, 0.1, 1.0, 1.7, 6.0)), 2)
        command = self.draw.choice(self._choices())
        self.text.append(f"{self.now} {command}")
        self.player.play(self.text[-1])
        self.now = max(self.now, round(self.player.now + 0.01, 2))

    def _choices(self) -> list[str]:
        state = self.player.state
        choices = ["look", "restart", self._submit()]
        choices += [f"cancel {job.id}" for job in state.jobs.values() if job.finished_at == 0.0]
        for name in NODES:
            choices += self._about_node(name)
        if (job := state.job) is not None and job.profiling.under_way is not None:
            attempt = job.profiling.under_way.wish.attempt
            for worker, _ in job.profiling.under_way.workers:
                agent = self.player.agents[worker.node]
                if self._connected(worker.node) and agent.status.worker(worker.slot) is not None:
                    choices += [f"measured {worker} {attempt}"] * 2
                    choices += [f"measured {worker} {attempt}!", f"link {worker} {attempt}"]
        if (job := state.job) is not None and job.current.made is not None:
            generation = job.current.generation
            members = " ".join(name for name in job.current.members if self._connected(name))
            choices += [f"enter {generation} {members}"] * 4 if members else []
            step = job.seen.steps.committed_step + 1
            choices += [f"steps {step} {step} {generation}"] * 4
        return choices

    def _submit(self) -> str:
        options = f"f={self.draw.randint(0, 2)} min_nodes=1 measure={self.draw.randint(0, 1)}"
        return f"submit job {options} profile_only={int(self.draw.random() < 0.2)}"

    def _connected(self, name: str) -> bool:
        node = self.player.state.nodes.get(NodeName(name))
        return node is not None and node.connected

    def _about_node(self, name: str) -> list[str]:
        if name not in self.player.agents:
            return [f"register {name}"] * 3
        if not self._connected(name):
            return [f"reconnect {name}", f"register {name}"]
        agent, job = self.player.agents[name], self.player.state.job
        choices = [f"close {name}"]
        if self.player.state.nodes[NodeName(name)].desired.job_id is not None:
            choices += [f"ready {name}"] * 3 if not agent.status.workers else []
        elif agent.status.workers:
            choices += [f"bare {name}"] * 3
        if job is None or agent.status.job_id != job.id:
            return choices
        if agent.status.worker(0) is None:
            return [*choices, f"replace {name}/0", f"replace {name}/0"]
        choices += [f"exit {name}/0", f"swap {name}/0", f"finish {name}"]
        return [*choices, f"peer_lost {name}/0 {job.current.generation}"]


class SlowWalk(Walk):
    """Of a job that trains, on workers that are slow at times; now and then something is lost, the
    end of the journal too. What is missing comes back at once."""

    def _choices(self) -> list[str]:
        self.text.append(f"{self.now} look")  # what is due by now is no part of the choice
        self.player.play(self.text[-1])
        if missing := self._missing():
            return missing[:1]
        job = self.player.state.job
        if job is None:
            return [self._submit()]
        if job.current.made is None:
            return ["look"]
        members, generation = " ".join(job.current.members), job.current.generation
        step = job.seen.steps.committed_step + 1
        choices = [f"steps {step} {step} {generation}"] * 8
        if job.state != "running":
            return [*choices, *[f"enter {generation} {members}"] * 4, "restart"]
        name = self.draw.choice(NODES)
        choices += [f"close {name}", f"exit {name}/0", "restart"]
        choices += [f"compute 4 7 {self._paces()}"] * 8
        if job.current.made.policy == "uneven":
            choices += ["tear PlanMade", "tear RateChanged" if job.slow else "restart"]
        for name in sorted(job.standing_by):
            if self.player.state.nodes[NodeName(name)].desired.alone:
                pace = self.draw.choice((1, 2, 8, 20))
                choices += [f"alone {len(self.text)} {name}/0={pace}"] * 8
        return choices

    def _missing(self) -> list[str]:
        """What brings nodes and workers back that are not there."""
        found = []
        for name in NODES:
            about = self._about_node(name)
            back = ("register", "reconnect", "bare", "ready", "replace")
            found += [each for each in about if each.split()[0] in back][:1]
        return found

    def _submit(self) -> str:
        return f"submit job f={self.draw.randint(0, 1)} hidden=1024 steps=100000"

    def _paces(self) -> str:
        slow = self.draw.sample(NODES[:3], self.draw.choice((0, 1, 1, 2)))
        return " ".join(f"{name}/0={self.draw.choice((1.5, 2, 4, 20))}" for name in slow)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(each, marks=pytest.mark.soak) for each in range(2, 50))]
)
def test_random_walk_with_slow_workers(seed: int) -> None:
    walk = SlowWalk(seed)
    try:
        for _ in range(COMMANDS_PER_WALK):
            walk.step()  # the player checks purity, termination, replay and what always holds
            for job_id, lines in walk.player.event_lines.items():
                told = [r["incident"] for r in lines if r["event"] == "incident"]
                assert len(told) == len(set(told)), told
                assert set(told) <= set(range(1, walk.player.state.jobs[job_id].incidents + 1))
    except Exception as error:
        error.add_note("the walk:\n" + "\n".join(walk.text))
        raise


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(each, marks=pytest.mark.soak) for each in range(4, 200))]
)
def test_random_walk(seed: int) -> None:
    walk = Walk(seed)
    generations: dict[str, int] = {}
    versions: dict[str, int] = {}
    try:
        for _ in range(COMMANDS_PER_WALK):
            walk.step()  # the player checks purity, termination and replay
            state = walk.player.state
            for job in state.jobs.values():
                assert job.current.generation >= generations.get(job.id, 0)
                generations[job.id] = job.current.generation
                assert (job.finished_at > 0) == (job.state in ("succeeded", "failed", "cancelled"))
            for name, node in state.nodes.items():
                assert node.desired.version >= versions.get(name, 0)
                versions[name] = node.desired.version
                state.assignment(node)
                assert node.registered or node.desired.job_id is None
            for lines in walk.player.event_lines.values():
                told = [r["to_generation"] for r in lines if r["event"] == "reconfigured"]
                assert told == sorted(set(told))
        # Then nobody says anything any more: no job may wait for ever for what does not come.
        for job in range(1, len(walk.player.state.jobs) + 1):  # each may need the others' end
            walk.player.play(f"{walk.now + job * LONG_S} look")
        states = {job.state for job in walk.player.state.jobs.values()}
        assert states <= {"waiting for nodes", "queued", "succeeded", "failed", "cancelled"}
    except Exception as error:
        error.add_note("the walk:\n" + "\n".join(walk.text))
        raise
