"""GPT-2 of transformers, `GPT2LMHeadModel`, as layers; the GPT-3 sizes are of this kind too."""

import math

import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.base import Dropout, Family, Layer
from oobleck.worker.models.families.foreign import adapt, configuration, draw, table
from oobleck.worker.models.linear import Linear, TransposedLinear


class Embedding(Layer):
    """Token plus learned position embedding: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(GPT2Config, spec)
        self.wte = table(config.vocab_size, config.n_embd)
        self.wpe = table(config.n_positions, config.n_embd)
        self.drop = Dropout(config.embd_pdrop, layer, "embedding")

    def compute(self, x: Tensor) -> Tensor:
        dropped: Tensor = self.drop(self.wte(x) + self.wpe.weight[: x.shape[1]])
        return dropped


class _QueryKeyValue(TransposedLinear):
    """The three projections in one.

    A constant added to every key adds the same to all scores of a query, so the key bias has no
    effect and a true gradient of zero. Its rounding noise, which Adam would amplify into updates
    that differ from one plan to the next, is kept out.
    """

    def offset(self) -> Tensor:
        assert self.bias is not None, "it was asked for"
        query, key, value = self.bias.chunk(3)
        return torch.cat([query, key.detach(), value])


class Block(Layer):
    """Pre-norm causal self-attention and an MLP."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(GPT2Config, spec)
        self.block = adapt(GPT2Block(config, layer_idx=layer - 1), layer)
        attention = self.block.get_submodule("attn")
        attention.c_attn = _QueryKeyValue(config.n_embd, 3 * config.n_embd)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


class Head(Layer):
    """Final norm and projection to the vocabulary: (b, T, hidden) to logits (b, T, vocabulary)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(GPT2Config, spec)
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = Linear(config.n_embd, config.vocab_size)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def _initialise(module: Layer, spec: ModelSpec, seed: int, tied: str | None) -> None:
    """Draw the initial values. Scale what a block adds to the residual stream down by the root of
    the number of such additions."""
    scale = 1.0 / math.sqrt(2 * spec.layers)
    draw(module, spec, seed, tied, scaled=("c_proj.weight",), scale=scale)


FAMILY = Family(
    embedding=Embedding,
    block=Block,
    head=Head,
    tied=("wte.weight", "lm_head.weight"),
    initialise=_initialise,
)
