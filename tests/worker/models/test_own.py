"""Initial weights of users' models: the same in one process as on workers, layer by layer."""

import json

import pytest
import torch

from oobleck.core.job.code import Json
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.model import initial, same_parameters
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.model_state import ModelState
from support import own_models
from support.folders import ROOT

SUPPORT = str(ROOT / "tests" / "support")
SAMPLES = {
    "pairs": own_models.Pairs(),
    "crossed": own_models.Pairs(),
    "projected": own_models.Pairs(),
    "sequence": own_models.Points(),
}


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


@pytest.mark.parametrize(
    ("tied", "why"),
    [
        ([("0.w", "0.v")], r"a pair is a parameter of one layer and one of another"),
        ([("0.w",)], r"a pair is a parameter of one layer and one of another"),
        ([("w", "1.w")], r"tied names 'w'; begin with the layer's number"),
        ([("0.w", "4.w")], r"tied names '4\.w', and there are layers 0 to 3"),
        ([("0.w", "1.w"), ("0.v", "1.w")], r"tied makes v and w of layer 0 one parameter"),
    ],
)
def test_what_says_not_which_parameters_are_one_is_refused(
    tied: list[tuple[str, ...]], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        same_parameters(tied, 4)  # type: ignore[arg-type]  # as users may write it


def test_pairs_in_any_order_make_one_parameter() -> None:
    tied = [("3.a", "2.b"), ("0.w", "-1.v"), ("1.c", "2.b")]
    assert same_parameters(tied, 4) == [((0, "w"), (3, "v")), ((1, "c"), (2, "b"), (3, "a"))]


def test_a_layer_shares_with_one_set_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SUPPORT)
    code.allow((code.ANY,))
    job = job_of("both_ways")
    inputs, target = own_models.Pairs()[0]
    with pytest.raises(
        JobError,
        match=r"tied has layer 1 share inner\.0\.weight in the layers \[1, 2\], and "
        r"inner\.2\.weight in \[1, 3\]; a layer may share with one set of layers alone: ",
    ):
        describe(job, (inputs, target))
