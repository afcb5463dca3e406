"""Models that are put together in another way than a job needs: refused where they are made."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oobleck.core.job.file import parse_job
from oobleck.model import initial
from oobleck.worker.describe import look_at
from oobleck.worker.runtime import code
from support import refused_models

JOB = """\
name: demo
model: {{python: "support.refused_models:{model}"{more}}}
data: {{python: "support.refused_models:Samples", arguments: {{of: plain}}}}
training: {{steps: 1, global_batch: 4, optimizer: {{no_decay: [{no_decay}]}}}}
"""
#: What is said of each, and the line of the user's code that it is of.
REFUSED = {
    "built": "layers[0] is a nn.Linear that was built already; give a builder, as "
    "partial(nn.Linear, ...), or nn.Sequential(*layers) for all",
    "one_built": "layers[1] is a Block that was built already; give a builder, as "
    "partial(Block, ...)",
    "module_list": "layers[0] is a nn.Linear that was built already; give a builder",
    "missing": "layers[1] is NoneType; give a builder of a layer, as partial(nn.Linear, ...)",
    "no_list": "layers is nn.Linear; give a list with a builder for each layer",
    "mapping": "layers is dict; give a list with a builder for each layer",
    "class_of_loss": "loss is the class nn.CrossEntropyLoss; give an instance, as "
    'nn.CrossEntropyLoss(reduction="none")',
    "name_of_loss": "loss is str; give a function of (output, targets)",
    "doubled": "layers is Doubled, whose forward is its own, and only its children are called",
    "hooked": "layers is an nn.Sequential with a hook, and only its children are called",
}


#: What is said of runs.
RUN = {
    "growing": "model: layer 1 (Growing) makes scale in forward, or changes there whether it is",
    "freezing": "model: layer 1 (Freezing) makes inner.weight in forward, or changes there whether",
    "inference": "model: layer 1 (Inference) gives a tensor of inference mode, which no layer",
    "wide": "model: layer 1 (Wide) calls torch.set_default_dtype while it is built or run, which",
    "blind": "model: layer 1 (Blind) calls torch.set_grad_enabled while it is built or run, which",
    "own_backward": "layer 1 (OwnBackward): adds to its parameters' gradients in forward, once",
    "learned_loss": "loss: has a parameter of its own, of shape [], which would not be trained",
    "writing_loss": "loss: writes into its targets; make new tensors",
    "same_data": "layer 0 (Linear): has weight, and so has layer 1 (Linear) as weight, but layers "
    'may be on different workers; tied=[("0.weight", "1.weight")] has both trained as one',
}


@pytest.fixture(autouse=True)
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


@pytest.fixture
def _settings_of_torch() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)
    torch.set_grad_enabled(True)


def said(model: str, *, no_decay: str = "", more: str = "") -> list[str]:
    job = parse_job(JOB.format(model=model, no_decay=no_decay, more=more))
    return [str(problem) for problem in look_at(job, always=True).problems]


@pytest.mark.parametrize("model", REFUSED)
def test_what_was_put_together_wrong_is_told_with_the_line_and_the_fix(model: str) -> None:
    (line,) = said(model)
    start = f"model: support.refused_models:{model} failed: ValueError: {REFUSED[model]}"
    assert line.startswith(start)
    assert " (refused_models.py:" in line


@pytest.mark.parametrize("model", RUN)
@pytest.mark.usefixtures("_settings_of_torch")
def test_what_only_a_run_shows_is_refused(model: str) -> None:
    *_, line = said(model)
    assert line.startswith(RUN[model])


def test_other_things_than_a_model_are_refused() -> None:
    (line,) = said("no_model")
    assert line.endswith(
        "returned Sequential; return an oobleck.model.Model(layers=[...], loss=...)"
    )
    (line,) = said("tied_without_pairs")
    assert line.startswith("model: tied has '0.weight'; give pairs of parameters, as [('0.weight'")
    (line,) = said("from_generatr")
    assert " has no from_generatr on this machine (did you mean from_generator?)" in line
    assert line.startswith("model: ")


def test_builders_may_come_one_after_the_other() -> None:
    assert said("from_generator") == []
    whole = initial(refused_models.from_generator, 3)
    assert [type(layer).__name__ for layer in whole] == ["Linear", "Block", "Linear"]
    assert whole(torch.zeros(2, refused_models.FEATURES)).shape == (2, refused_models.CLASSES)


def test_a_pattern_without_a_parameter_is_found_before_anything_starts() -> None:
    assert said("from_generator", no_decay='"*.inner.bias", "0.*"') == []
    (line,) = said("from_generator", no_decay='"*.inner.bias", "7.*"')
    assert line == (
        "training.optimizer.no_decay: no parameter's name matches 7.*; names are 0.weight, 0.bias, "
        "1.inner.weight, 1.inner.bias, 2.weight, 2.bias and so on"
    )


def test_a_lock_that_a_killed_compiler_left_ends_the_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code, "STALE_S", 0.1)
    monkeypatch.setattr(code, "_LOOK_S", 0.01)
    folder = tmp_path / "extension"
    folder.mkdir()
    (folder / "lock").touch()
    (line,) = said("with_extension", more=f", arguments: {{folder: {folder}}}")
    assert f"{folder}/lock is the lock of a process that was killed" in line
    assert f"remove it, as by rm {folder}/lock, and start again (refused_models.py:" in line
