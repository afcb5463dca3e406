"""The built-in model: a decoder-only transformer.

No linear layer has a bias. The key bias, for one, has a true gradient of zero. Adam would amplify
its rounding noise into updates that differ from one plan to the next. Dropout acts on the
embedding's sum and on what each block adds to it, not on attention weights.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.base import Dropout, Family, Layer, Linear, draw_parameters

#: Standard deviation of initial weights (GPT-2).
INITIAL_DEVIATION = 0.02


class Embedding(Layer):
    """Token plus learned position embedding: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        # Not nn.Embedding(...): its own draw loads all of torch._dynamo on the meta device.
        make = partial(nn.Embedding.from_pretrained, freeze=False)
        self.token = make(torch.empty(spec.vocabulary, spec.hidden))
        self.position = make(torch.empty(spec.sequence_length, spec.hidden))
        self.drop = Dropout(spec.dropout, layer, "embedding")

    def compute(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.drop(self.token(x) + self.position.weight[: x.shape[1]])
        return embedded


class Block(Layer):
    """Pre-norm causal self-attention and a GELU MLP of four times the width."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        hidden = spec.hidden
        self.heads = spec.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = Linear(hidden, 3 * hidden)
        self.attention_out = Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp_in = Linear(hidden, 4 * hidden)
        self.mlp_out = Linear(4 * hidden, hidden)
        self.attention_drop = Dropout(spec.dropout, layer, "attention")
        self.mlp_drop = Dropout(spec.dropout, layer, "mlp")

    def compute(self, x: Tensor) -> Tensor:
        x = x + self.attention_drop(self._attend(self.attention_norm(x)))
        out: Tensor = x + self.mlp_drop(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)))))
        return out

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
        super().__init__(layer)
        self.norm = nn.LayerNorm(spec.hidden)
        self.token = Linear(spec.hidden, spec.vocabulary)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.token(self.norm(x))
        return logits


def _initialise(module: Layer, spec: ModelSpec, seed: int, tied: str | None) -> None:
    """Draw initial weights as GPT-2 does. Matrices that add to the residual stream are scaled down
    by the root of their number."""
    residual = INITIAL_DEVIATION / math.sqrt(2 * spec.layers)
    scaled = ("attention_out.weight", "mlp_out.weight")
    draw_parameters(
        module,
        seed,
        deviation=lambda name: residual if name in scaled else INITIAL_DEVIATION,
        tied=tied,
    )


FAMILY = Family(
    embedding=Embedding,
    block=Block,
    head=Head,
    tied=("token.weight", "token.weight"),
    initialise=_initialise,
)
