"""What a worker says of an exception in the user's code."""

import re
from collections.abc import Iterator

import pytest
import torch

from oobleck.planner.job.file import parse_job
from oobleck.planner.job.own import OwnModelSpec
from oobleck.worker.models import own
from oobleck.worker.process import describe
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.random import RowKeys
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
    job = parse_job(
        'name: demo\nmodel: {python: "support.bad_models:tiring", arguments: '
        f"{{where: {where}}}}}\n"
        'data: {python: "support.bad_models:Points"}\ntraining: {steps: 1, global_batch: 4}\n'
    )
    assert isinstance(job.model, OwnModelSpec)
    return own.empty_layer(job.model, 0, 1)


def test_a_layer_is_named_with_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = layer("layer", 1, monkeypatch)
    x = torch.zeros(2, bad_models.WIDTH)
    assert torch.equal(tired(x, ROWS), x)
    with pytest.raises(JobError) as raised:
        tired(x, ROWS)
    assert re.fullmatch(rf"model: layer 1 \(Tired\) failed: {TIRED}", str(raised.value))


def test_the_loss_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tired = layer("loss", 0, monkeypatch)
    with pytest.raises(JobError) as raised:
        tired.row_losses(torch.zeros(2, 4), torch.zeros(2))
    begin = re.escape("model: the loss failed on float32[2, 4] and float32[2]: ")
    assert re.fullmatch(begin + TIRED, str(raised.value))


def test_a_backward_is_known_by_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2, bad_models.WIDTH, requires_grad=True)
    output = layer("backward", 0, monkeypatch)(x, ROWS)
    with pytest.raises(ValueError, match="tired") as raised:
        output.sum().backward()
    assert re.fullmatch(TIRED, describe(raised.value))


def test_want_of_memory_in_a_layer_is_said_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = layer("layer", 1, monkeypatch)

    def lose() -> None:
        raise torch.OutOfMemoryError("none is left")

    monkeypatch.setattr(bad_models._patience["layer"], "lose", lose)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        greedy(torch.zeros(2, bad_models.WIDTH), ROWS)
    assert describe(raised.value).startswith("out of memory (none is left); lower training.micro")
