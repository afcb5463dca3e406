"""Parameters that any layers share, on real worker processes that lose one of them: the same losses
and weights as of one process, in which they are truly one."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, OptimizerSpec, TrainingSpec
from oobleck.core.messages import FaultRule
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from support import own_models
from support.director import Director, WarmWorkers, make_plan
from support.folders import ROOT
from support.outputs import read_output
from support.plain_loop import BATCH, MICROBATCH, RATE, SEED, plain_loop

SUPPORT = str(ROOT / "tests" / "support")
STEPS, HIT = 5, 3
#: Layers 1, 3 and 5 share, 2 and 4, 0 and 7: some within a worker, some between two, all between
#: pipelines that are cut otherwise. D's layers go to C.
BEFORE = make_plan(1, [[("a", 4), ("b", 4)], [("c", 2), ("d", 6)]], [4, 4])
AFTER = make_plan(2, [[("a", 4), ("b", 4)], [("c", 8)]], [5, 3])


def make_job(output: Path) -> JobSpec:
    spec = OwnModelSpec(python="own_models:crossed", path=SUPPORT)
    job = JobSpec(
        name="crossed",
        model=spec,
        data=DataSpec(python="own_models:Pairs", path=SUPPORT),
        training=TrainingSpec(
            steps=STEPS,
            global_batch=BATCH,
            microbatch=MICROBATCH,
            seed=SEED,
            precision="fp64",
            optimizer=OptimizerSpec(lr=RATE),
        ),
        output=str(output),
    )
    inputs, target = own_models.Pairs()[0]
    sample = inputs, target.double()
    return replace(job, model=replace(spec, described=describe(job, sample)))


def test_a_loss_changes_nothing(
    warm: WarmWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, SUPPORT])
    code.allow((code.ANY,))
    job = make_job(tmp_path / "weights")
    assert isinstance(job.model, OwnModelSpec)
    assert job.model.ties == ((0, 7), (1, 3, 5), (2, 4))
    victim = WorkerId(NodeName("d"), 0)
    dies = FaultRule(worker=victim, point="before:Backward", step=HIT, action="kill_worker")
    with Director(warm, job, [dies]) as cluster:
        cluster.start("a", "b", "c", "d")
        cluster.assign(BEFORE)
        cluster.wait(lambda: cluster.workers[victim].gone, "the kill")
        cluster.assign(AFTER)
        cluster.wait_finished(AFTER)
        found = list(cluster.losses().values())
        cluster.stop()
    losses, net = plain_loop(own_models.crossed, own_models.Pairs(), torch.float64, steps=STEPS)
    assert found == pytest.approx(losses, rel=1e-12, abs=0)
    weights = read_output(tmp_path / "weights")
    parameters = dict(net.named_parameters(remove_duplicate=False))
    assert weights.keys() == parameters.keys()
    for name, parameter in parameters.items():
        np.testing.assert_allclose(weights[name], parameter.detach().numpy(), rtol=1e-9, atol=1e-12)
