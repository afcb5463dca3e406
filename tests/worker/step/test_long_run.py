"""A long run in which nodes fail and join at random trains as an undisturbed one does."""

import random
from dataclasses import replace

import numpy as np
import pytest

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, OptimizerSpec, TrainingSpec
from oobleck.core.messages import PhaseReached
from oobleck.core.schedules import Schedule
from support import foreign
from support.devices import Transport
from support.director import Director, WarmWorkers, make_plan
from support.folders import TEXT
from support.reference import train_reference

MICROBATCHES = 8
LAYERS = 5


def gpt(*, tied: bool) -> ModelSpec:
    return ModelSpec(layers=3, hidden=16, heads=2, sequence_length=8, dropout=0.1, tied=tied)


def llama() -> ModelSpec:
    return foreign.spec("llama", sequence_length=8, num_hidden_layers=3, vocab_size=256)


def make_job(steps: int, precision: str, model: ModelSpec) -> JobSpec:
    return JobSpec(
        name="long",
        model=model,
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(
            steps=steps,
            global_batch=MICROBATCHES,
            precision=precision,  # type: ignore[arg-type]
            optimizer=OptimizerSpec(lr=1e-3),
        ),
    )


Cut = list[tuple[str, int]]


def random_cut(draw: random.Random, nodes: list[str]) -> Cut:
    ends = sorted(draw.sample(range(1, LAYERS), len(nodes) - 1))
    counts = [b - a for a, b in zip([0, *ends], [*ends, LAYERS], strict=True)]
    return list(zip(draw.sample(nodes, len(nodes)), counts, strict=True))


def random_cuts(draw: random.Random, nodes: list[str]) -> list[Cut]:
    """Two pipelines, so that one node may be lost."""
    mixed = draw.sample(nodes, len(nodes))
    split = draw.randint(1, len(nodes) - 1)
    return [random_cut(draw, group) for group in (mixed[:split], mixed[split:])]


class Story:
    """Failures and joins, one after the other, each at a random moment of a step."""

    def __init__(self, cluster: Director, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw
        self.nodes = ["n0", "n1", "n2", "n3"]
        cluster.start(*self.nodes)
        self.generation = 0
        self.go_on(random_cuts(draw, self.nodes))

    def go_on(self, cuts: list[Cut], *, boundary: bool = False) -> None:
        """To a plan of these cuts, with shares and a schedule at random."""
        self.generation += 1
        self.cuts = cuts
        first = self.draw.randint(1, MICROBATCHES - 1)
        plan = make_plan(self.generation, cuts, [first, MICROBATCHES - first])
        schedule: Schedule = self.draw.choice(["1f1b", "gpipe", "zb-h1"])
        self.plan = replace(plan, schedule=schedule)
        self.cluster.assign(self.plan, boundary=boundary)

    def newest(self) -> int:
        return max(self.cluster.records, default=0)

    def under_way(self) -> bool:
        """Whether a step of the newest generation is committed."""
        newest = self.cluster.records.get(self.newest(), [])
        return any(record.generation == self.plan.generation for record in newest)

    def reach(self, step: int) -> None:
        self.cluster.wait(self.under_way, "a step of the newest generation")
        self.cluster.wait(lambda: self.newest() >= step, f"step {step}")

    def fail(self) -> None:
        victim = self.draw.choice(self.nodes)
        self.cluster.wait_a_moment(self.draw.uniform(0, 0.02))
        self.cluster.kill(victim)
        worker = WorkerId(NodeName(victim), 0)
        self.cluster.wait(lambda: self.cluster.workers[worker].gone, "the kill")
        self.nodes.remove(victim)
        (hit,) = [cut for cut in self.cuts if victim in dict(cut)]
        if len(hit) == 1 or self.draw.random() < 0.2:
            return self.go_on(random_cuts(self.draw, self.nodes))
        left = [node for node, _ in hit if node != victim]
        self.go_on([random_cut(self.draw, left) if cut is hit else cut for cut in self.cuts])

    def join(self, name: str) -> None:
        self.cluster.start(name)
        self.nodes.append(name)
        self.go_on(random_cuts(self.draw, self.nodes), boundary=True)


@pytest.mark.parametrize(
    ("steps", "precision", "model", "rtol", "transport"),
    [
        pytest.param(
            *(120, "fp32", gpt(tied=True), 1e-6, "links"), id="tied", marks=pytest.mark.soak
        ),
        pytest.param(110, "fp64", gpt(tied=False), 1e-12, "links", id="untied, float64"),
        pytest.param(*(120, "fp32", llama(), 1e-6, "links"), id="llama", marks=pytest.mark.soak),
        *(
            pytest.param(
                steps,
                "fp64",
                gpt(tied=steps % 2 > 0),
                1e-12,
                "nccl",
                id=f"over NCCL's fake, {steps} steps",
                marks=pytest.mark.soak,
            )
            for steps in range(110, 116)
        ),
    ],
)
def test_ten_failures_and_joins(
    warm: WarmWorkers,
    steps: int,
    precision: str,
    model: ModelSpec,
    rtol: float,
    transport: Transport,
) -> None:
    job = make_job(steps, precision, model)
    draw = random.Random(steps + model.tied)
    with Director(warm, job, transport=transport) as cluster:
        story = Story(cluster, draw)
        # Some steps pass before each of the plans comes, and the last one has to come too.
        for step in sorted(draw.sample(range(1, steps // 3), 10)):
            story.reach(step)
            if len(story.nodes) <= 3 or (len(story.nodes) < 5 and draw.random() < 0.3):
                story.join(f"m{step}")
            else:
                story.fail()
        cluster.wait_finished(story.plan)
        cluster.stop()
        redone = {
            message.committed_step
            for live in cluster.workers.values()
            for message in live.said
            if isinstance(message, PhaseReached) and message.redo
        }
        assert redone, "no step was cut off"
        losses = list(cluster.losses().values())
    reference = train_reference(job).steps
    np.testing.assert_allclose(losses, [step.loss for step in reference], rtol=rtol)
    digests = [cluster.records[step.step][0].samples_digest for step in reference]
    assert digests == [step.samples_digest for step in reference]
