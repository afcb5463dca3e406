"""Hooks of parameters, weights that layers keep beside their modules, and parameters without a
gradient: on real worker processes as in a plain loop of torch, also while one of them is lost."""

import functools
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oobleck.host.ipc.messages import FaultRule
from oobleck.planner.job.optimization import OptimizerSpec
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.planner.programs.plan import Plan
from oobleck.worker.checkpoint.output import read_output
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from support import gradient_models
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import ROOT
from support.plain_loop import BATCH, MICROBATCH, RATE, SEED, plain_loop

SUPPORT = str(ROOT / "tests" / "support")
STEPS = 8


def make_job(model: str, output: Path, **training: object) -> JobSpec:
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
    )
    inputs, target = gradient_models.Keyed()[0]
    return replace(job, model=replace(spec, described=describe(job, (inputs, target.double()))))


@functools.cache
def alone(model: str) -> tuple[list[float], dict[str, np.ndarray]]:
    losses, net = plain_loop(
        getattr(gradient_models, model),
        gradient_models.Keyed(),
        torch.float64,
        drawing=True,
        steps=STEPS,
    )
    named = net.named_parameters(remove_duplicate=False)
    return losses, {name: parameter.detach().numpy() for name, parameter in named}


def check(cluster: Director, output: Path, model: str) -> None:
    losses, expected = alone(model)
    assert list(cluster.losses().values()) == pytest.approx(losses, rel=1e-12, abs=0)
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
    from oobleck.worker.data.order import Order

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
        ("branches", "shared resident", {}),
        ("masked", "shared", {"recompute": "layer"}),
        ("masked", "shared resident", {}),
        ("hooked", "split backward", {}),
        ("hooked", "two pipelines", {}),
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
    ("point", "step"),
    # Amid a backward, with all sums in hand, and with the vote's result on its way.
    [("after:Backward", 5), ("reduced", 4), ("voting", 6)],
)
@pytest.mark.parametrize("model", ["branches", "masked"])
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
