"""A backward in two parts gives what the fused one gives, to the last bit, and frees its memory."""

import gc

import pytest
import torch

from oobleck.core.job.spec import JobSpec
from oobleck.worker.data.objective import loss
from oobleck.worker.models.base import WeightGradients, adding
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.mailbox import wire
from oobleck.worker.step.stage import StageRunner

CPU = torch.device("cpu")
MICROBATCHES = range(3)


class Bench:
    """One stage alone, with random tokens, inputs and output gradients."""

    def __init__(self, job: JobSpec, layers: range) -> None:
        self.job, self.layers = job, layers
        self.state = ModelState(job, CPU)
        for layer in layers:
            self.state.initialise(layer)
        self.state.zero_gradients()
        self.stage = StageRunner(self.state, layers, job, CPU)
        source = torch.Generator().manual_seed(1)
        model, size = job.model, job.training.microbatch
        rows = (size, model.sequence_length)
        shape = wire(job, 0).values.shape
        self.tokens = [
            torch.randint(model.vocabulary, rows, generator=source) for _ in MICROBATCHES
        ]
        self.hidden = [
            torch.randn(size, *shape, generator=source, dtype=torch.float64).to(
                self.stage.activation_dtype
            )
            for _ in MICROBATCHES
        ]

    def forward(self, m: int, *, split: bool, by_layer: bool = True) -> torch.Tensor:
        return self.stage.forward(
            m,
            self.tokens[m] if self.stage.first else self.hidden[m],
            RowKeys(seed=0, step=1, positions=(2 * m, 2 * m + 1)),
            self.tokens[m].flip(1) if self.stage.last else None,
            split=split,
            by_layer=by_layer,
        )

    def gradient(self, m: int) -> torch.Tensor | None:
        return None if self.stage.last else self.hidden[m].flip(1)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {
            f"{layer}.{name}": parameter.grad.clone()
            for layer in self.layers
            for name, parameter in self.state.module(layer).named_parameters()
            if parameter.grad is not None
        }


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp8"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(range(1), id="embedding"),
        pytest.param(range(1, 2), id="block"),
        pytest.param(range(4, 5), id="head"),
        pytest.param(range(3), id="first stage"),
        pytest.param(range(1, 4), id="middle stage"),
        pytest.param(range(2, 5), id="last stage"),
        pytest.param(range(5), id="all"),
    ],
)
def test_both_parts_make_what_the_fused_backward_makes(make_job, layers, tied, precision):
    job = make_job(precision=precision, tied=tied, dropout=0.1)
    fused, split = Bench(job, layers), Bench(job, layers)
    inputs: dict[str, list[torch.Tensor | None]] = {"fused": [], "split": []}
    for m in MICROBATCHES:
        assert torch.equal(fused.forward(m, split=False), split.forward(m, split=True))
    for m in MICROBATCHES:
        inputs["fused"].append(fused.stage.backward(m, fused.gradient(m)))
        inputs["split"].append(split.stage.backward_input(m, split.gradient(m)))
    if layers != range(1):
        assert any(
            not torch.equal(before, after)
            for before, after in zip(
                fused.gradients().values(), split.gradients().values(), strict=True
            )
        ), "nothing was left for later"
    for m in MICROBATCHES:
        split.stage.backward_weight(m)

    for one, other in zip(inputs["fused"], inputs["split"], strict=True):
        assert (one is None) == (other is None) == split.stage.first
        assert one is None or torch.equal(one, other)
    expected, made = fused.gradients(), split.gradients()
    assert expected.keys() == made.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        assert torch.equal(gradient, made[name]), name


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("layers", [range(3), range(1, 4), range(2, 5), range(5)])
def test_layers_in_one_piece_make_what_single_ones_make(make_job, layers, split):
    job = make_job(dropout=0.1)
    single, joined = Bench(job, layers), Bench(job, layers)
    for m in MICROBATCHES:
        found = joined.forward(m, split=split, by_layer=False)
        assert torch.equal(single.forward(m, split=split), found)
    for m in MICROBATCHES:
        inputs = []
        for bench in (single, joined):
            told: list[int] = []
            if split:
                inputs.append(bench.stage.backward_input(m, bench.gradient(m)))
                bench.stage.backward_weight(m, told.append)
            else:
                inputs.append(bench.stage.backward(m, bench.gradient(m), told.append))
            assert told == [*reversed(layers)]
        assert (inputs[0] is None) == (inputs[1] is None) == single.stage.first
        assert inputs[0] is None or torch.equal(*inputs)
    expected, made = single.gradients(), joined.gradients()
    for name, gradient in expected.items():
        assert torch.equal(gradient, made[name]), name


def held_bytes() -> int:
    """Of all tensors that Python holds."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_what_is_kept_for_the_weights_is_freed_with_them(make_job):
    bench = Bench(make_job(dropout=0.1), range(1, 4))
    saved: list[int] = []

    class Saved:
        """What autograd keeps for the backward; counts itself."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            saved.append(1)

        def __del__(self) -> None:
            saved.pop()

    before = held_bytes()
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda kept: kept.tensor):
        bench.forward(0, split=True)
    assert saved
    bench.stage.backward_input(0, bench.gradient(0))
    gc.collect()
    assert not saved, "the input's gradient frees the graph"
    model, rows = bench.job.model, 2 * bench.job.model.sequence_length
    # Inputs and output gradients of the four linear layers of each of three blocks: 7 and 9 widths.
    assert held_bytes() - before == 3 * 16 * model.hidden * rows * 8
    bench.stage.backward_weight(0)
    assert held_bytes() == before


def test_settling_leaves_every_micro_batch_wholly_in_a_gradient_or_not_at_all(make_job):
    layers = range(1, 4)
    bench, plain = Bench(make_job(), layers), Bench(make_job(), layers)
    for m in (0, 1, 2):
        bench.forward(m, split=True)
    for m in (0, 1):
        bench.stage.backward_input(m, bench.gradient(m))
        plain.forward(m, split=False)
        plain.stage.backward(m, plain.gradient(m))
    bench.stage.settle()
    assert {tuple(bench.state.layers[layer].added) for layer in layers} == {(0, 1)}
    expected, made = plain.gradients(), bench.gradients()
    assert all(torch.equal(expected[name], made[name]) for name in expected)
    with pytest.raises(KeyError):
        bench.stage.backward_weight(0)
    with pytest.raises(KeyError):
        bench.stage.backward_input(2)


@pytest.mark.parametrize("split", [False, True])
def test_the_backward_must_be_the_kind_that_the_forward_was_told(make_job, split):
    bench = Bench(make_job(), range(1, 4))
    bench.forward(0, split=split)
    other = bench.stage.backward if split else bench.stage.backward_input
    with pytest.raises(AssertionError, match="the forward expected"):
        other(0, bench.gradient(0))


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("layers", [range(3), range(1, 4), range(2, 5), range(5)])
def test_layer_by_layer_makes_what_one_backward_of_the_whole_stage_makes(
    make_job, layers, precision
):
    job = make_job(precision=precision, dropout=0.1)
    bench, whole = Bench(job, layers), Bench(job, layers)
    for m in MICROBATCHES:
        bench.forward(m, split=False)
        made = bench.stage.backward(m, bench.gradient(m))

        x = whole.tokens[m] if whole.stage.first else whole.hidden[m].clone().requires_grad_()
        hidden = x
        for layer in layers:
            rows = RowKeys(seed=0, step=1, positions=(2 * m, 2 * m + 1))
            with adding(WeightGradients() if precision == "bf16" else None):
                hidden = whole.state.module(layer)(hidden, rows)
            hidden = hidden.to(whole.stage.activation_dtype)
        if whole.stage.last:
            hidden = loss(hidden, whole.tokens[m].flip(1)) * (1 / job.training.microbatches)
        torch.autograd.backward(hidden, whole.gradient(m))
        assert made is None or torch.equal(made, x.grad)
    expected = whole.gradients()
    assert all(torch.equal(expected[name], value) for name, value in bench.gradients().items())
    assert all(bench.state.layers[layer].added == set(MICROBATCHES) for layer in layers)
