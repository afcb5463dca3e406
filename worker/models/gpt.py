"""The built-in model: a decoder-only transformer.

No linear layer has a bias: the key bias, for one, has a true gradient of zero, so Adam would
amplify its rounding noise into updates that differ from one plan to the next. Dropout acts on the
embedding's sum and on what each block adds to it, not on attention weights.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.planner.job import ModelSpec
from oobleck.worker.linear import Linear
from oobleck.worker.models.base import Layer
from oobleck.worker.random import RowKeys, generator

#: Standard deviation of initial weights (GPT-2).
INITIAL_DEVIATION = 0.02


class Embedding(Layer):
    """Token plus learned position embedding: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        # Not nn.Embedding(...): its own draw loads all of torch._dynamo on the meta device.
        make = partial(nn.Embedding.from_pretrained, freeze=False)
        self.token = make(torch.empty(spec.vocabulary, spec.hidden))
        self.position = make(torch.empty(spec.sequence_length, spec.hidden))

    def forward(self, x: Tensor, rows: RowKeys) -> Tensor:
        return self.drop(self.token(x) + self.position.weight[: x.shape[1]], rows, "embedding")


class Block(Layer):
    """Pre-norm causal self-attention and a GELU MLP of four times the width."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        hidden = spec.hidden
        self.heads = spec.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention_out = Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = Linear(hidden, 4 * hidden)
        self.mlp_out = Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, rows: RowKeys) -> Tensor:
        x = x + self.drop(self._attend(self.attention_norm(x)), rows, "attention")
        return x + self.drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))), rows, "mlp")

    def _attend(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        fused = self.qkv(x).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = fused.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return out


class Head(Layer):
    """Final norm and projection to the vocabulary: (b, T, hidden) to logits (b, T, vocabulary).

    When tied, `token` is this layer's own copy of the embedding's weight; the two are kept equal
    by summing their gradients.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.norm = nn.LayerNorm(spec.hidden)
        self.token = Linear(spec.hidden, spec.vocabulary)

    def forward(self, x: Tensor, rows: RowKeys) -> Tensor:
        logits: Tensor = self.token(self.norm(x))
        return logits


def build_layer(spec: ModelSpec, layer: int) -> Layer:
    """Layer number `layer` of the model; its weights are not yet the job's initial ones."""
    if layer == 0:
        return Embedding(spec, layer)
    if layer == spec.layer_count - 1:
        return Head(spec, layer)
    return Block(spec, layer)


def tied_parameter(spec: ModelSpec, layer: int) -> str | None:
    """Name of the parameter that `layer` shares with another one; None where there is none."""
    return "token.weight" if spec.tied and layer in (0, spec.layer_count - 1) else None


@torch.no_grad()
def initialise_parameters(module: Layer, spec: ModelSpec, seed: int) -> None:
    """Give `module` its initial weights: a function of (spec, seed, layer) alone.

    All draws are on the CPU and in float64 and rounded to the parameter's type, so that they
    depend neither on the device nor on the precision. What a block adds to the residual stream is
    scaled down by the number of such additions (GPT-2).
    """
    residual = INITIAL_DEVIATION / math.sqrt(2 * spec.layers)
    draws = generator(seed, "initial", module.layer)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        # The head's copy of the tied weight is the embedding's first draw again.
        tied = name == tied_parameter(spec, module.layer)
        source = generator(seed, "initial", 0) if tied and module.layer else draws
        deviation = residual if name in ("attention_out.weight", "mlp_out.weight") else None
        values = torch.randn(parameter.shape, generator=source, dtype=torch.float64)
        parameter.copy_(values.mul_(deviation or INITIAL_DEVIATION))
