"""Llama of transformers, `LlamaForCausalLM`, as layers."""

import torch
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.base import Family, Layer
from oobleck.worker.models.families.foreign import adapt, configuration, draw, table
from oobleck.worker.models.linear import Linear
from oobleck.worker.models.modes import cached


class Embedding(Layer):
    """Token embedding: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(LlamaConfig, spec)
        self.embed_tokens = table(config.vocab_size, config.hidden_size, config.pad_token_id)

    def compute(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(x)
        return embedded


class _Norm(LlamaRMSNorm):  # type: ignore[misc]  # transformers is not followed
    """The same in float32 and below, and true in float64, which the original rounds to float32: a
    difference in the last bit, as another order of sums gives, would become one of that size."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out: Tensor = self.weight * scaled.to(x.dtype)
        return out


@cached(maxsize=4)
def _rotation(
    spec: ModelSpec, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, T, width of a head): one pair of tables for all blocks of a worker."""
    rotary = LlamaRotaryEmbedding(configuration(LlamaConfig, spec))
    like = torch.empty(0, dtype=dtype)
    cosine, sine = rotary(like, torch.arange(length)[None])
    return cosine.to(device), sine.to(device)


class Block(Layer):
    """Pre-norm causal self-attention with rotated queries and keys, and a gated MLP."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        self._spec = spec
        config = configuration(LlamaConfig, spec)
        swaps = {LlamaRMSNorm: lambda old: _Norm(config.hidden_size, eps=old.variance_epsilon)}
        self.block = adapt(LlamaDecoderLayer(config, layer_idx=layer - 1), layer, swaps)

    def compute(self, x: Tensor) -> Tensor:
        tables = _rotation(self._spec, x.shape[1], x.device, x.dtype)
        out: Tensor = self.block(x, position_embeddings=tables)
        return out


class Head(Layer):
    """Final norm and projection to the vocabulary: (b, T, hidden) to logits (b, T, vocabulary)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(LlamaConfig, spec)
        self.norm = _Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


FAMILY = Family(
    embedding=Embedding,
    block=Block,
    head=Head,
    tied=("embed_tokens.weight", "lm_head.weight"),
    initialise=draw,
)
