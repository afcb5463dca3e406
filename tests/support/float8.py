"""Linear layers in float8 by the formula alone: factors are rounded to float8, and multiplied as
the float32 numbers that they stand for."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oobleck.core.job.spec import Float8Recipe
from oobleck.model import Model
from oobleck.worker.models.base import Deferring, TransposedLinear

#: A model of transformers, whose first weights are large enough for float8 to matter.
LLAMA, LENGTH, WORDS = "LlamaForCausalLM", 16, 32
CONFIG = {
    "initializer_range": 0.3,
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": None,
}
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def rounded(factor: Tensor, recipe: Float8Recipe, dtype: torch.dtype, *, whole: bool) -> Tensor:
    """The numbers of `factor` (rows, summed) as float8 holds them, scaled by row or as a whole."""
    factor = factor.float()
    if recipe == "tensorwise" or whole:
        largest = factor.abs().max().expand(len(factor), 1)
    else:
        largest = factor.abs().max(dim=1, keepdim=True).values
    scale = (torch.finfo(dtype).max / largest.double().clamp(min=1e-12)).float()
    if recipe != "tensorwise":
        scale = 2.0 ** scale.log2().floor()
    return (factor * scale).to(dtype).float() / scale


def output(x: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
    """Of x (n, inputs) and weight (outputs, inputs)."""
    return rounded(x, recipe, E4M3, whole=False) @ rounded(weight, recipe, E4M3, whole=False).t()


def gradients(
    x: Tensor, weight: Tensor, gradient: Tensor, recipe: Float8Recipe
) -> tuple[Tensor, Tensor]:
    """Of x and of the weight, from `gradient` (n, outputs)."""
    kind = E5M2 if recipe == "tensorwise" else E4M3
    back = rounded(weight.t(), recipe, E4M3, whole=recipe == "rowwise_with_gw_hp")
    of_x = rounded(gradient, recipe, kind, whole=False) @ back.t()
    if recipe == "rowwise_with_gw_hp" or len(x) % 16:
        return of_x, gradient.float().t() @ x.float()
    left = rounded(gradient.t(), recipe, kind, whole=False)
    by_weight = left @ rounded(x.t(), recipe, E4M3, whole=False).t()
    return of_x, by_weight.bfloat16().float()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, recipe: Float8Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        with torch.autocast("cpu", enabled=False):
            found = output(x.flatten(0, -2), weight, recipe).bfloat16()
        return found.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x, of_weight = gradients(x.flatten(0, -2), weight, rows, ctx.recipe)
        return of_x.bfloat16().reshape(x.shape), of_weight.to(weight.dtype), None


def _forward(layer: nn.Module, recipe: Float8Recipe, kind: torch.dtype, x: Tensor) -> Tensor:
    weight, bias = layer.weight, layer.bias
    weight = weight.t() if isinstance(layer, TransposedLinear) else weight
    found: Tensor = _Linear.apply(x.bfloat16(), weight.to(kind), recipe)
    return found if bias is None else found + bias.bfloat16()


def emulate(layers: Iterable[nn.Module], recipe: Float8Recipe, kind: torch.dtype) -> None:
    """Have the linear layers in `layers` compute so. `kind`: the type that their weights have."""
    for layer in layers:
        for part in layer.modules():
            linear = isinstance(part, nn.Linear | Deferring)
            if linear and not any(size % 16 for size in part.weight.shape):
                part.forward = partial(_forward, part, recipe, kind)


class Points:
    """Data of the models below."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((32,), index / 64), torch.tensor(index / 64)


class Texts:
    """Rows of tokens, and the next ones, for the model below."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draws = torch.Generator().manual_seed(index)
        tokens = torch.randint(WORDS, (LENGTH + 1,), generator=draws)
        return tokens[:-1], tokens[1:]


def llama() -> Model:
    """The model of transformers, whose loss of a row is the mean over its tokens."""
    from oobleck.worker.models.huggingface.causal_lm import causal_lm

    made = causal_lm(LLAMA, CONFIG, sequence_length=LENGTH)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        sums, counts = made.loss(output, targets)
        return sums / counts

    return Model(layers=made.layers, loss=loss)


def chain(sizes: list[list[int]]) -> Model:
    """A layer of nn.Linear for each (inputs, outputs), and a last one with one output."""
    return Model(
        layers=[
            *(partial(nn.Linear, *size) for size in sizes),
            partial(nn.Linear, sizes[-1][1], 1),
        ],
        loss=lambda output, target: (output[:, 0] - target).square(),
    )


def normed() -> Model:
    """Layers whose weights are made of other parameters."""
    layers = [lambda: nn.utils.weight_norm(nn.Linear(32, 32)), partial(nn.Linear, 32, 1)]
    return Model(layers=layers, loss=lambda output, target: (output[:, 0] - target).square())
