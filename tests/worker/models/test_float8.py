"""Linear layers in float8 compute what the formula of their recipe says."""

import copy
import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from oobleck.core.job.code import Json
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import Float8Recipe, JobSpec
from oobleck.model import Model
from oobleck.planner.profile.estimate import float8_weights, layer_counts
from oobleck.worker.describe import look_at
from oobleck.worker.models.base import (
    DeferredGradients,
    Deferring,
    Linear,
    TransposedLinear,
    WeightGradients,
    adding,
    narrow_products,
)
from oobleck.worker.models.compiled import compiled
from oobleck.worker.models.float8 import RECIPES
from oobleck.worker.models.registry import build_layer
from oobleck.worker.runtime import code
from support import float8, foreign
from support.director import Director, WarmWorkers, make_plan
from support.folders import ROOT
from support.plain_loop import BATCH, MICROBATCH, RATE, SEED, plain_loop

#: bfloat16 rounds what is compared to 8 bits.
CLOSE = {"rtol": 2.0**-8, "atol": 1e-4}
recipes = pytest.mark.parametrize("recipe", get_args(Float8Recipe))


def narrow(layer: nn.Module, recipe: Float8Recipe) -> nn.Module:
    torch.manual_seed(0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.bfloat16()
    for parameter in layer.parameters():
        parameter.grad_dtype = None
    narrow_products(layer, RECIPES[recipe])
    return layer


def passed(layer: nn.Module, x: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Its output, and the gradients of the input and of the parameters."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    return output.detach(), x.grad, [parameter.grad for parameter in layer.parameters()]


@recipes
@pytest.mark.parametrize("rows", [32, 24])
@pytest.mark.parametrize("kind", [Linear, TransposedLinear])
def test_outputs_and_gradients_are_those_of_the_formula(
    recipe: Float8Recipe, rows: int, kind: type[Linear]
) -> None:
    layer = narrow(kind(48, 64), recipe)
    x, gradient = torch.randn(2, rows // 2, 48).bfloat16(), torch.randn(2, rows // 2, 64).bfloat16()
    x[0, 0] *= 100  # rows of one scale are rounded by the largest
    output, of_x, (of_weight, *of_bias) = passed(layer, x, gradient)
    transposed = kind is TransposedLinear
    weight = layer.weight.detach().t() if transposed else layer.weight.detach()
    flat, of_output = x.flatten(0, 1), gradient.flatten(0, 1)
    expected = float8.output(flat, weight, recipe)
    if transposed:
        expected = expected.bfloat16().float() + layer.bias.detach().float()
        torch.testing.assert_close(
            of_bias[0].float(), of_output.float().sum(0), rtol=0.02, atol=0.1
        )
    by_x, by_weight = float8.gradients(flat, weight, of_output, recipe)
    torch.testing.assert_close(output.flatten(0, 1).float(), expected, **CLOSE)
    torch.testing.assert_close(of_x.flatten(0, 1).float(), by_x, **CLOSE)
    found = of_weight.t() if transposed else of_weight
    torch.testing.assert_close(found.float(), by_weight, **CLOSE)
    assert not torch.equal(output.flatten(0, 1), nn.functional.linear(flat, weight)), "it rounds"


@recipes
@pytest.mark.parametrize("kind", [Linear, TransposedLinear])
@pytest.mark.parametrize("rows", [16, 5])
def test_gradients_that_are_left_for_later_are_the_same_to_the_bit(
    recipe: Float8Recipe, kind: type[Linear], rows: int
) -> None:
    """Of several micro-batches, in float32."""
    layer = narrow(kind(32, 16), recipe)
    pairs = [(torch.randn(rows, 32).bfloat16(), torch.randn(rows, 16).bfloat16()) for _ in range(3)]
    found = []
    for added in (WeightGradients(), DeferredGradients()):
        layer.weight.grad = torch.zeros(layer.weight.shape)
        with adding(added):
            results = [passed(layer, *pair)[:2] for pair in pairs]
        if isinstance(added, DeferredGradients):
            added.add()
        found.append([*(one for pair in results for one in pair), layer.weight.grad])
    assert all(map(torch.equal, *found))
    by_autograd = torch.zeros(layer.weight.shape)
    for x, gradient in pairs:
        layer.weight.grad = None
        output, of_x, (of_weight, *_) = passed(layer, x, gradient)
        by_autograd += of_weight.float()
    assert torch.equal(output, found[0][-3])
    assert torch.equal(of_x, found[0][-2])
    # Autograd rounds the gradient of each micro-batch to bfloat16.
    torch.testing.assert_close(by_autograd, found[0][-1], rtol=2.0**-8, atol=0.1)


@recipes
def test_a_row_does_not_depend_on_others_unless_the_tensor_has_one_scale(
    recipe: Float8Recipe,
) -> None:
    layer = narrow(Linear(32, 32), recipe)
    x, gradient = torch.randn(16, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    x[0] *= 3
    gradient[0] *= 3
    whole, few = passed(layer, x, gradient), passed(layer, x[1:], gradient[1:])
    same = [torch.equal(whole[at][1:], few[at]) for at in (0, 1)]
    assert same == [recipe != "tensorwise"] * 2


def test_what_does_not_fit_is_multiplied_as_in_bf16() -> None:
    layers = nn.Sequential(Linear(32, 24), Linear(24, 32), nn.Linear(32, 32), nn.Linear(32, 20))
    narrow(layers, "tensorwise")
    assert [hasattr(one, "recipe") and one.recipe is not None for one in layers] == [
        *(False, False, True, False)
    ]
    fitting = layers[2]
    single = torch.randn(32).bfloat16()
    assert torch.equal(fitting(single), nn.functional.linear(single, fitting.weight, fitting.bias))
    assert fitting(torch.randn(0, 32).bfloat16()).shape == (0, 32)
    wide = torch.randn(16, 32)
    assert torch.equal(
        fitting.float()(wide), nn.functional.linear(wide, fitting.weight, fitting.bias)
    )


@recipes
def test_weights_under_autocast_are_rounded_once(recipe: Float8Recipe) -> None:
    """Those of a user's model are in float32. Autocast rounds neither them nor the product."""
    layer = nn.Linear(32, 16, bias=False)
    narrow_products(layer, RECIPES[recipe])
    x, gradient = torch.randn(32, 32).bfloat16(), torch.randn(32, 16).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output, of_x, (of_weight,) = passed(layer, x, gradient)
    expected = float8.output(x, layer.weight.detach(), recipe)
    by_x, by_weight = float8.gradients(x, layer.weight.detach(), gradient, recipe)
    assert torch.equal(output, expected.bfloat16())
    torch.testing.assert_close(of_x.float(), by_x, **CLOSE)
    torch.testing.assert_close(of_weight, by_weight, **CLOSE)


def test_a_frozen_layer_keeps_no_input() -> None:
    layer = nn.Linear(32, 48).requires_grad_(False)
    narrow_products(layer, RECIPES["tensorwise"])
    kept: list[torch.Size] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    x = torch.randn(2, 8, 32).bfloat16().requires_grad_()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
    ):
        output = layer(x)
    assert kept == [layer.weight.shape]
    output.backward(torch.ones_like(output))
    assert x.grad.shape == x.shape


@recipes
def test_numbers_that_are_not_finite_are_not_hidden(recipe: Float8Recipe) -> None:
    layer = narrow(Linear(32, 32), recipe)
    for odd in (float("inf"), float("nan")):
        x = torch.randn(16, 32).bfloat16()
        x[3, 4] = odd
        assert not layer(x)[3].isfinite().any()


@recipes
def test_zeros_give_zeros(recipe: Float8Recipe) -> None:
    layer = narrow(Linear(32, 32), recipe)
    zeros = torch.zeros(16, 32).bfloat16()
    assert all(not one.any() for one in (*passed(layer, zeros, zeros)[:2], layer.weight.grad))


@recipes
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_code_computes_the_same(recipe: Float8Recipe) -> None:
    """As it is traced, forward and backward: no machine code is made of it."""
    plain = narrow(nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16)), recipe)
    traced = copy.deepcopy(plain)
    x, gradient = torch.randn(16, 32).bfloat16(), torch.randn(16, 16).bfloat16()
    run = compiled(backend="aot_eager")
    expected = passed(plain, x, gradient)
    with torch.compiler.set_stance("default"):
        leaf = x.clone().requires_grad_()
        output = run(traced, leaf)
    output.backward(gradient)
    torch.compiler.reset()
    assert torch.equal(output, expected[0])
    assert torch.equal(leaf.grad, expected[1])
    for one, other in zip(traced.parameters(), expected[2], strict=True):
        assert torch.equal(one.grad, other)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("gpt2", {"n_embd": 32, "n_inner": 40}),
        ("llama", {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 1}),
        ("bert", {"hidden_size": 32, "intermediate_size": 40}),
    ],
)
def test_plans_count_the_weights_that_multiply_in_float8(kind: str, sizes: dict[str, int]) -> None:
    spec = foreign.spec(kind, sequence_length=8, **sizes)
    block = build_layer(spec, 1)
    narrow_products(block, RECIPES["tensorwise"])
    linear = [part for part in block.modules() if isinstance(part, Deferring)]
    narrow = sum(part.weight.numel() for part in linear if part.recipe is not None)
    counted = layer_counts(spec).block
    assert float8_weights(counted)[0] == narrow
    everything = sum(one.inputs * one.outputs for group in counted.linear for one in group)
    assert everything == sum(part.weight.numel() for part in linear) > narrow


JOB = """\
name: own
model: {{python: "{model}", path: {folder}, arguments: {{{arguments}}}}}
data: {{python: "{data}", path: {folder}}}
training: {{steps: 4, global_batch: {batch}, microbatch: {microbatch}, seed: {seed}, precision: fp8,
  fp8_recipe: {recipe}, optimizer: {{lr: {rate}}}}}
"""


def own(
    model: str, arguments: str, folder: Path, data: str, recipe: Float8Recipe = "tensorwise"
) -> JobSpec:
    return parse_job(
        JOB.format(
            model=model,
            arguments=arguments,
            folder=folder,
            data=data,
            batch=BATCH,
            microbatch=MICROBATCH,
            seed=SEED,
            rate=RATE,
            recipe=recipe,
        )
    )


@pytest.fixture
def _allowed() -> Iterator[None]:
    code.allow((code.ANY,))
    yield
    code.allow(())


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ("[32, 48], [48, 32]", []),
        (
            "[32, 48], [48, 20], [20, 20]",
            [
                "layer 1 (Linear): multiplies with its weight [20, 48] in bfloat16: fp8",
                "layer 2 (Linear): multiplies with its weight [20, 20] in bfloat16: fp8",
            ],
        ),
        (
            "[32, 24], [24, 24], [24, 24], [24, 32], [32, 32]",
            [
                "layer 0 (Linear): multiplies with its weight [24, 32] in bfloat16: fp8",
                "layer 1 (Linear): multiplies with its weight [24, 24] in bfloat16, in 2 layers",
                "layer 3 (Linear): multiplies with its weight [32, 24] in bfloat16: fp8",
            ],
        ),
        ("[32, 20]", ["training.precision: fp8 is for nn.Linear layers whose sizes are"]),
    ],
)
@pytest.mark.usefixtures("_allowed")
def test_what_stays_in_bfloat16_is_said_where_a_job_is_submitted(
    sizes: str, said: list[str]
) -> None:
    job = own("support.float8:chain", f"sizes: [{sizes}]", ROOT / "tests", "support.float8:Points")
    found = list(map(str, look_at(job, always=False).problems))
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True)), found


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.usefixtures("_allowed")
def test_a_model_without_a_weight_that_fits_is_refused() -> None:
    job = own("support.float8:normed", "", ROOT / "tests", "support.float8:Points")
    (found,) = look_at(job, always=False).problems
    assert str(found).startswith("training.precision: fp8 is for nn.Linear layers whose")


def check_training(
    warm: WarmWorkers, job: JobSpec, make: Callable[[], Model], data: Any, *, rtol: float
) -> None:
    """Losses by workers are those of the formula, and not those of bfloat16."""
    assert isinstance(job.model, OwnModelSpec)
    known = look_at(job, always=False).descriptions["model"]
    job = dataclasses.replace(job, model=dataclasses.replace(job.model, described=Json(known)))
    plan = make_plan(1, [[("a", 2), ("b", 2)]], [8], schedule="zb-h1")
    with Director(warm, job) as cluster:
        cluster.start("a", "b")
        cluster.assign(plan)
        cluster.wait_finished(plan)
        cluster.stop()
        losses = [*cluster.losses().values()]
    recipe, steps = job.training.fp8_recipe, job.training.steps
    loop = functools.partial(plain_loop, make, data, torch.float32, narrow=True, steps=steps)
    assert losses == pytest.approx(loop(recipe=recipe)[0], rel=rtol)
    assert losses != pytest.approx(loop()[0], rel=rtol)


@recipes
@pytest.mark.usefixtures("_allowed")
def test_a_model_of_ones_own_trains_as_in_a_plain_loop(
    recipe: Float8Recipe, warm: WarmWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ROOT / "examples"
    monkeypatch.syspath_prepend(folder)
    job = own("tagger:tagger", "width: 16, blocks: 2", folder, "tagger:Sentences", recipe)
    tagger = importlib.import_module("tagger")
    make = functools.partial(tagger.tagger, width=16, blocks=2)
    check_training(warm, job, make, tagger.Sentences(), rtol=2e-5)


@pytest.mark.usefixtures("_allowed")
def test_a_model_of_transformers_trains_as_in_a_plain_loop(warm: WarmWorkers) -> None:
    job = own("support.float8:chain", "", ROOT / "tests", "support.float8:Texts", "rowwise")
    model = OwnModelSpec(
        architecture=float8.LLAMA,
        config=Json(json.dumps(float8.CONFIG)),
        sequence_length=float8.LENGTH,
    )
    job = dataclasses.replace(job, model=model)
    check_training(warm, job, float8.llama, float8.Texts(), rtol=1e-4)
