"""What a worker says of an exception in the user's code."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models import own
from oobleck.worker.models.checks.describe import describe as describe_model
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, of_the_device, whose_fault
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.session import describe
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner
from support import bad_models

ROWS = RowKeys(seed=0, step=1, positions=(0, 1))
TIRED = r"ValueError: tired \(bad_models\.py:\d+\)"


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


def layer(where: str, patience: int, patch: pytest.MonkeyPatch) -> own.OwnLayer:
    """Layer 1 of the model that is tired of so many calls `where`."""
    patch.setitem(bad_models._patience, where, bad_models.Patience(patience))
    model = tiring(where).model
    assert isinstance(model, OwnModelSpec)
    return own.empty_layer(model, 0, 1)


def tiring(where: str) -> JobSpec:
    return parse_job(
        'name: demo\nmodel: {python: "support.bad_models:tiring", arguments: '
        f"{{where: {where}}}}}\n"
        'data: {python: "support.bad_models:Points"}\ntraining: {steps: 1, global_batch: 4}\n'
    )


def test_a_layer_is_named_with_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = layer("layer", 1, monkeypatch)
    x = torch.zeros(2, bad_models.WIDTH)
    assert torch.equal(tired(x, ROWS), x)
    with pytest.raises(JobError) as raised:
        tired(x, ROWS)
    assert re.fullmatch(rf"model: layer 1 \(Tired\) failed: {TIRED}", str(raised.value))


def test_a_text_of_any_length_leaves_place_cause_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = layer("layer", 0, monkeypatch)

    def lose() -> None:
        raise ValueError("begin " + "1.0, " * 1_000_000)

    monkeypatch.setattr(bad_models._patience["layer"], "lose", lose)
    with pytest.raises(JobError) as raised:
        tired(torch.zeros(2, bad_models.WIDTH), ROWS)
    told = str(raised.value)
    assert re.fullmatch(
        r"model: layer 1 \(Tired\) failed: ValueError: begin [^(]*… \(test_process\.py:\d+\)", told
    )
    assert len(told.encode()) <= 1024


def test_the_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = layer("loss", 0, monkeypatch)
    with pytest.raises(JobError) as raised:
        tired.row_losses(torch.zeros(2, 4), torch.zeros(2))
    begin = re.escape("model: the loss failed on float32[2, 4] and float32[2]: ")
    assert re.fullmatch(begin + TIRED, str(raised.value))


@pytest.mark.parametrize(
    ("by_layer", "which"), [(True, "layer 1"), (False, "layers 0 to 2")], ids=["layer", "stage"]
)
def test_a_backward_is_known_by_its_layer_and_line(
    monkeypatch: pytest.MonkeyPatch, by_layer: bool, which: str
) -> None:
    monkeypatch.setitem(bad_models._patience, "backward", bad_models.Patience(100))
    job = tiring("backward")
    samples = bad_models.Points()
    text = describe_model(job, tuple(map(torch.as_tensor, samples[0])))
    job = replace(job, model=replace(job.model, described=text))
    state = ModelState(job, torch.device("cpu"))
    for number in range(3):
        state.initialise(number)
    stage = StageRunner(state, range(3), job, torch.device("cpu"))
    rows = [torch.as_tensor(side).unsqueeze(0) for side in samples[0]]
    keys = RowKeys(seed=0, step=1, positions=(0,))
    stage.forward(0, rows[0], keys, rows[1], by_layer=by_layer)
    monkeypatch.setitem(bad_models._patience, "backward", bad_models.Patience(0))
    with pytest.raises(JobError) as raised:
        stage.backward(0)
    begin = re.escape(f"model: the backward of {which} failed: ")
    assert re.fullmatch(begin + TIRED, str(raised.value))


def test_want_of_memory_in_a_layer_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = layer("layer", 1, monkeypatch)

    def lose() -> None:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(bad_models._patience["layer"], "lose", lose)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        greedy(torch.zeros(2, bad_models.WIDTH), ROWS)
    assert describe(raised.value).startswith("out of memory (none is left); lower training.micro")


@pytest.mark.parametrize(
    ("said", "at_fault"),
    [
        ("CUDA error: uncorrectable ECC error encountered", "node"),
        ("CUDA error: an illegal memory access was encountered", "node"),
        ("CUDA error: unspecified launch failure", "node"),
        # An index beyond a table is so on every GPU.
        ("CUDA error: device-side assert triggered", "user"),
    ],
)
def test_a_sick_gpu_is_the_nodes(said: str, at_fault: str) -> None:
    error = torch.AcceleratorError(said)
    assert whose_fault(error) == at_fault
    assert of_the_device(error) == (at_fault == "node")


def test_a_sick_gpu_in_a_users_layer_is_not_the_layers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sick = layer("layer", 9, monkeypatch)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    monkeypatch.setattr(sick.module, "forward", fail)
    with pytest.raises(torch.AcceleratorError):
        sick(torch.zeros(2, bad_models.WIDTH), ROWS)
