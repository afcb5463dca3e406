"""Hooks of parameters, weights that layers keep beside their modules, and parameters without a
gradient: on real worker processes as in a plain loop of torch, also while one of them is lost."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import CheckpointSpec, DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule, PhaseReached
from oobleck.core.plan import Plan
from oobleck.host.storage.checkpoints import list_checkpoints
from oobleck.host.storage.folder import LocalFolder
from oobleck.worker.data.objective import Order
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from support import gradient_models
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import ROOT
from support.outputs import read_output
from support.plain_loop import BATCH, MICROBATCH, RATE, SEED, plain_loop

SUPPORT = str(ROOT / "tests" / "support")
STEPS = 8
#: A plan for a step boundary is prepared while so many go on.
MANY = 24


def make_job(
    model: str, output: Path, checkpoint: CheckpointSpec | None = None, **training: object
) -> JobSpec:
    spec = OwnModelSpec(python=f"gradient_models:{model}", path=SUPPORT)
    values: dict[str, object] = {
        "steps": STEPS,
        "global_batch": BATCH,
        "microbatch": MICROBATCH,
        "seed": SEED,
        "precision": "fp64",
        "optimizer": OptimizerSpec(lr=RATE),
    }
    job = JobSpec(
        name="gradients",
        model=spec,
        data=DataSpec(python="gradient_models:Keyed", path=SUPPORT),
        training=TrainingSpec(**{**values, **training}),  # type: ignore[arg-type]
        output=str(output),
        checkpoint=checkpoint,
    )
    inputs, target = gradient_models.Keyed()[0]
    return replace(job, model=replace(spec, described=describe(job, (inputs, target.double()))))


@functools.cache
def alone(model: str, steps: int) -> tuple[list[float], dict[str, np.ndarray]]:
    losses, net = plain_loop(
        getattr(gradient_models, model),
        gradient_models.Keyed(),
        torch.float64,
        drawing=True,
        steps=steps,
    )
    named = net.named_parameters(remove_duplicate=False)
    return losses, {name: parameter.detach().numpy() for name, parameter in named}


def check(cluster: Director, output: Path, model: str, first: int = 1) -> None:
    found = list(cluster.losses().values())
    losses, expected = alone(model, first - 1 + len(found))
    assert found == pytest.approx(losses[first - 1 :], rel=1e-12, abs=0)
    weights = read_output(output)
    assert weights.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(weights[name], value, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, SUPPORT])
    code.allow((code.ANY,))


def test_the_loops_steps_differ_in_what_they_use() -> None:
    """Otherwise nothing would be tested here: an expert misses some steps and takes others."""
    data = gradient_models.Keyed()
    order = Order.of(len(data), 0.0)
    wanted = []
    for step in range(1, STEPS + 1):
        rows = order.of_step(SEED, step, range(BATCH), BATCH)
        wanted.append(
            {(place, int(data[int(i)][0]["keys"][place])) for i in rows for place in (0, 1)}
        )
    for place in (0, 1):
        taken = [(place, 1) in keys for keys in wanted]
        assert True in taken[taken.index(False) :], taken
        assert False in taken[taken.index(True) :], taken
    both = [{(0, 2), (1, 2)} & keys for keys in wanted]
    assert {len(keys) for keys in both} >= {0, 1}, both


#: Plans of the five layers of `masked` and `hooked`, and of the four of `branches`.
PLANS = {
    "one": lambda n: make_plan(1, [[("a", n)]], [8]),
    "two pipelines": lambda n: make_plan(1, [[("a", 2), ("b", n - 2)], [("c", n)]], [5, 3]),
    "split backward": lambda n: make_plan(1, [[("a", 2), ("b", n - 2)]], [8], schedule="zb-h1"),
    "shared": lambda n: make_plan(1, [[("a", n, 2)], [("b", 2, 2), ("b", n - 2, 1)]], [4, 4]),
    "shared resident": lambda n: make_plan(
        1, [[("a", n, 2)], [("b", 2, 2), ("b", n - 2, 1)]], [4, 4], resident=True
    ),
}


def workers_of(plan: Plan) -> list[str]:
    return [f"{worker.node}/{worker.slot}" for worker in plan.workers]


@pytest.mark.parametrize(
    ("model", "plan", "training"),
    [
        ("branches", "one", {}),
        ("branches", "two pipelines", {"recompute": "layer"}),
        ("branches", "shared", {}),
        pytest.param("branches", "shared resident", {}, marks=pytest.mark.soak),
        ("masked", "shared", {"recompute": "layer"}),
        ("masked", "shared resident", {}),
        ("hooked", "split backward", {}),
        pytest.param("hooked", "two pipelines", {}, marks=pytest.mark.soak),
    ],
)
def test_equals_a_plain_loop(
    warm: WarmWorkers, tmp_path: Path, model: str, plan: str, training: dict[str, object]
) -> None:
    job = make_job(model, tmp_path / "weights", **training)
    made = PLANS[plan](job.model.layer_count)
    with Director(warm, job) as cluster:
        cluster.start(*workers_of(made))
        cluster.assign(made)
        cluster.wait_finished(made)
        cluster.stop()
        check(cluster, tmp_path / "weights", model)


@pytest.mark.parametrize(
    ("model", "point", "step"),
    # Amid a backward, with all sums in hand, and with the vote's result on its way.
    [
        ("branches", "after:Backward", 5),
        ("masked", "reduced", 4),
        ("branches", "voting", 6),
        pytest.param("masked", "after:Backward", 5, marks=pytest.mark.soak),
        pytest.param("branches", "reduced", 4, marks=pytest.mark.soak),
        pytest.param("masked", "voting", 6, marks=pytest.mark.soak),
    ],
)
def test_a_loss_changes_nothing(
    warm: WarmWorkers, tmp_path: Path, model: str, point: str, step: int
) -> None:
    job = make_job(model, tmp_path / "weights")
    count = job.model.layer_count
    before = make_plan(1, [[("a", 2), ("b", count - 2)], [("c", count, 2)]], [4, 4])
    after = make_plan(2, [[("a", 1), ("b", count - 1)], [("d", count)]], [5, 3])
    dies = FaultRule(worker=worker_named("c/1"), point=point, step=step, action="kill_worker")
    with Director(warm, job, [dies]) as cluster:
        cluster.start("a", "b", "c/0", "c/1", "d")
        cluster.assign(before)
        cluster.wait(lambda: cluster.workers[worker_named("c/1")].gone, "the kill")
        cluster.assign(after)
        cluster.wait_finished(after)
        cluster.stop()
        check(cluster, tmp_path / "weights", model)


def test_what_was_left_out_is_in_checkpoints(warm: WarmWorkers, tmp_path: Path) -> None:
    saves = CheckpointSpec(path=str(tmp_path / "checkpoints"), every=3, keep=9)
    job = make_job("branches", tmp_path / "weights", saves)
    plans = [make_plan(1, [[("a", 4, 2)]], [8]), make_plan(1, [[("a", 1), ("b", 3)]], [8])]
    for steps, plan in zip((3, STEPS), plans, strict=True):
        part = replace(job, training=replace(job.training, steps=steps))
        with Director(warm, part) as cluster:
            cluster.start(*workers_of(plan))
            cluster.assign(plan)
            cluster.wait_finished(plan)
            cluster.stop()
        found = cluster
    check(found, tmp_path / "weights", "branches", first=4)
    manifests = list_checkpoints(LocalFolder(tmp_path / "checkpoints")).checkpoints
    missed = {one.manifest.step: one.manifest.missed for one in manifests}
    assert missed[3]["0.spare"] == 3
    assert missed[STEPS]["0.spare"] == STEPS
    assert 0 < missed[STEPS]["1.experts.1.weight"] < STEPS
    assert not any(key.startswith("2.experts.2") for key in missed[STEPS]), "it is layer 1's"


def test_what_is_left_out_is_fed_to_who_joins(warm: WarmWorkers, tmp_path: Path) -> None:
    job = make_job("branches", tmp_path / "weights", steps=MANY)
    before = make_plan(1, [[("a", 2), ("b", 2)]], [8])
    after = make_plan(2, [[("a", 1), ("c", 2, 2), ("b", 1)]], [8])
    holds = FaultRule(worker=worker_named("a"), point="before:LoadTokens", step=3, action="stop")
    with Director(warm, job, [holds]) as cluster:
        cluster.start(*workers_of(before), "c/0", "c/1")
        cluster.assign(before)
        cluster.wait(lambda: cluster.has_faulted("a/0"), "step 3")
        cluster.assign(after, boundary=True)
        cluster.let_go("a")
        cluster.wait_finished(after)
        cluster.stop()
        fed = [
            word.fed_bytes
            for worker in after.workers
            for word in cluster.said(worker, PhaseReached, after.generation)
            if isinstance(word, PhaseReached) and word.phase == "transferred"
        ]
        assert sum(fed) > 0
        check(cluster, tmp_path / "weights", "branches")
