"""Recomputation keeps layers' inputs alone, and changes no gradient in any bit."""

from dataclasses import replace

import pytest
import torch

from oobleck.core.job.spec import JobSpec
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.mailbox import wire
from oobleck.worker.step.stage import StageRunner
from support import foreign

CPU = torch.device("cpu")
MICROBATCHES = range(3)


def train(job: JobSpec, layers: range, *, split: bool) -> tuple[list[torch.Tensor], int]:
    """Outputs, input gradients and gradients of three micro-batches, and how many tensors
    autograd has kept between forward and backward."""
    state = ModelState(job, CPU)
    for layer in layers:
        state.initialise(layer)
    stage = StageRunner(state, layers, job, CPU)
    source = torch.Generator().manual_seed(1)
    model = job.model
    tokens = torch.randint(model.vocabulary, (3, 2, model.sequence_length), generator=source)
    shape = wire(job, 0).values.shape
    hidden = torch.randn(3, 2, *shape, generator=source, dtype=torch.float64)
    hidden = hidden.to(stage.activation_dtype)
    found: list[torch.Tensor] = []
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for m in MICROBATCHES:
            rows = RowKeys(seed=0, step=1, positions=(2 * m, 2 * m + 1))
            x = tokens[m] if stage.first else hidden[m]
            targets = tokens[m].flip(1) if stage.last else None
            found.append(stage.forward(m, x, rows, targets, split=split).clone())
    for m in reversed(MICROBATCHES):
        gradient = None if stage.last else hidden[m].flip(1)
        if split:
            found.append(stage.backward_input(m, gradient))
        else:
            found.append(stage.backward(m, gradient))
    for m in MICROBATCHES if split else ():
        stage.backward_weight(m)
    found += [state.layers[layer].gradient for layer in layers]
    return found, len(kept)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp8"])
@pytest.mark.parametrize("layers", [range(5), range(2), range(2, 4), range(3, 5)], ids=str)
def test_gradients_are_the_same_to_the_last_bit(make_job, layers, precision, split):
    check(make_job(precision=precision, dropout=0.2), layers, split=split)


@pytest.mark.parametrize("split", [False, True], ids=["fused", "split"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("kind", foreign.TINY)
def test_so_they_are_in_models_of_transformers(make_job, kind, precision, split):
    spec = foreign.spec(kind, sequence_length=8, dropout=0.2)
    # Without the embedding: a block's first part is then the first that knows of gradients.
    for layers in (range(4), range(1, 3)):
        check(replace(make_job(precision=precision), model=spec), layers, split=split)


def check(job: JobSpec, layers: range, *, split: bool) -> None:
    expected, kept = train(job, layers, split=split)
    again = replace(job, training=replace(job.training, recompute="layer"))
    made, kept_again = train(again, layers, split=split)
    assert kept > 0
    assert kept_again == 0, "only the inputs are kept, and not by autograd"
    for one, other in zip(expected, made, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)
    assert all(gradient.any() for gradient in made[-len(layers) :])
