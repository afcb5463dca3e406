"""`oobleck.model.step()`: the step that is computed, in forwards, losses and metrics alone."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from oobleck.core.job.code import Json
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.model import at_step, step
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.models.compiled import Compilation
from oobleck.worker.runtime import code
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner
from support import step_models
from support.folders import ROOT

CPU = torch.device("cpu")
POSITIONS = (0, 1)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "support"))
    code.allow((code.ANY,))
    yield
    code.allow(())


def stage_of(recompute: str) -> StageRunner:
    support = str(ROOT / "tests" / "support")
    spec = OwnModelSpec(python="step_models:warmed", path=support, arguments=Json(json.dumps({})))
    training = TrainingSpec(
        steps=9, global_batch=2, microbatch=2, seed=7, precision="fp64", recompute=recompute
    )
    job = JobSpec(
        name="steps",
        fault_tolerance=0,
        model=spec,
        data=DataSpec(python="step_models:Points", path=support),
        training=training,
    )
    inputs, target = step_models.Points()[0]
    job = replace(job, model=replace(spec, described=describe(job, (inputs, target))))
    state = ModelState(job, CPU)
    for layer in range(5):
        state.initialise(layer)
    return StageRunner(state, range(5), job, CPU)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [step_models.Points()[i] for i in POSITIONS]
    points, targets = (torch.stack(list(side)).double() for side in zip(*pairs, strict=True))
    return points, targets


def test_a_layer_that_is_computed_again_and_the_loss_have_the_step_of_their_rows() -> None:
    points, targets = rows()
    found = {}
    for recompute in ("none", "layer"):
        stage = stage_of(recompute)
        gradients = []
        for number in (1, 3, 8):
            keys = RowKeys(seed=7, step=number, positions=POSITIONS)
            loss = stage.forward(0, points, keys, targets)
            stage.backward(0)
            layer = stage._state.layers[0]
            gradients.append((loss[0].item(), layer.gradient.clone()))
            layer.gradient.zero_()
        found[recompute] = gradients
    for (loss, gradient), (again, same) in zip(found["none"], found["layer"], strict=True):
        assert loss == again
        assert torch.equal(gradient, same)
    # The inner layer comes in by the fourth step, and the loss counts fully from the sixth.
    sizes = [gradient.norm().item() for _, gradient in found["none"]]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3


def test_an_evaluation_has_the_step_whose_state_it_evaluates() -> None:
    points, targets = rows()
    metrics = Counter[str]()
    keys = RowKeys(seed=7, step=0, positions=POSITIONS, training=False, evaluated=6)
    stage_of("none").forward(0, points, keys, targets, lowest=5, metrics=metrics)
    assert metrics["step"] == 2 * 6


def test_it_is_unknown_anywhere_else() -> None:
    with pytest.raises(RuntimeError, match=r"known only in a layer's forward, in the loss and in"):
        step()
    seen: list[object] = []

    def ask() -> None:
        try:
            seen.append(step())
        except RuntimeError as error:
            seen.append(type(error))

    with at_step(4):
        assert step() == 4
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert seen == [RuntimeError], "another thread may be at another step"


def test_a_layer_that_asks_for_it_is_not_compiled() -> None:
    class Caught(step_models.Warmed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            except RuntimeError:
                return x

    x = torch.randn(2, step_models.WIDTH, requires_grad=True)
    for layer in (step_models.Warmed(), Caught()):
        with at_step(2):
            number, reason = Compilation().look(layer, x, draws=False)
        assert number is None
        assert reason == "it asks for the step (oobleck.model.step()), another number in each"
