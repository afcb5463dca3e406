"""Initial weights of users' models: the same in one process as on workers, layer by layer."""

import json

import pytest
import torch

from oobleck.model import initial
from oobleck.planner.job.code import Json
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.state.model_state import ModelState
from support import own_models
from support.folders import ROOT

SUPPORT = str(ROOT / "tests" / "support")
SAMPLES = {"pairs": own_models.Pairs(), "sequence": own_models.Points()}


def job_of(name: str) -> JobSpec:
    spec = OwnModelSpec(python=f"own_models:{name}", path=SUPPORT, arguments=Json(json.dumps({})))
    return JobSpec(
        name="own",
        model=spec,
        data=DataSpec(python="own_models:Pairs", path=SUPPORT),
        training=TrainingSpec(steps=1, global_batch=4, microbatch=2, seed=7),
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_workers_begin_with_the_weights_of_one_process(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    code.allow((code.ANY,))
    job = job_of(name)
    inputs, target = SAMPLES[name][0]
    if not isinstance(inputs, dict):
        inputs = torch.as_tensor(inputs)
    text = describe(job, (inputs, torch.as_tensor(target)))
    known = OwnModelSpec(python=f"own_models:{name}", path=SUPPORT, described=text)
    job = JobSpec(name="own", model=known, data=job.data, training=job.training)
    state = ModelState(job, torch.device("cpu"))
    torch.manual_seed(1)  # what was drawn before has no part in it
    expected = initial(getattr(own_models, name), 7)
    for number, layer in reversed(list(enumerate(expected))):
        state.initialise(number)
        found = dict(state.module(number).trained())
        assert set(found) == {name for name, _ in layer.named_parameters()}
        for parameter, value in layer.named_parameters():
            assert torch.equal(found[parameter], value), (number, parameter)
        for buffer, value in layer.named_buffers():
            held = state.module(number).get_buffer(f"module.{buffer}")
            assert torch.equal(held, value), (number, buffer)
