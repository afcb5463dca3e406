"""Adapters: GPT-2, Llama and BERT of transformers as layers, from modules of transformers.

They have over `causal_lm`:

- dropout by sample
- norms that are true in float64
- no rounding noise in gradients that are zero
- weight gradients that may be left for later (GPT-2's are transposed)
- BERT's masked tokens

The GPT-3 sizes are of kind gpt2. Importing this imports transformers, which takes two seconds.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertLayer, BertPredictionHeadTransform
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.pytorch_utils import Conv1D

from oobleck.core.job.families import Kind, family_of
from oobleck.core.job.family import decode_config
from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.base import (
    Dropout,
    Family,
    Layer,
    Linear,
    TransposedLinear,
    draw_parameters,
    drop,
    drops,
)
from oobleck.worker.models.tree import cached
from oobleck.worker.runtime.errors import JobError

_ATTENTION = "oobleck"

Swap = Callable[[Any], nn.Module]


def options(spec: ModelSpec) -> dict[str, Any]:
    """Return the keys of the model's config, without those that keep transformers' default None."""
    family = family_of(spec.kind)
    assert family is not None
    return {
        name: value
        for name, value in decode_config(spec.config).items()
        if value is not None or family.keys[name].default is not None
    }


@cached(maxsize=16)
def _configuration(kind: Callable[..., Any], text: str) -> Any:
    try:
        # Leave out special tokens: training ignores them, and transformers warns about those
        # beyond the vocabulary.
        config = kind(**json.loads(text), bos_token_id=None, eos_token_id=None)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise JobError(f"model.config: transformers refuses it: {why}; correct it") from error
    config._attn_implementation = _ATTENTION
    return config


def configuration(kind: Callable[..., Any], spec: ModelSpec) -> Any:
    """Return the config object of `spec`, of transformers' class `kind`. Raises JobError."""
    return _configuration(kind, json.dumps(options(spec)))


def table(rows: int, width: int, padding: int | None = None) -> nn.Embedding:
    """Return an embedding table with uninitialised values. The row `padding` gets no gradient."""
    # Pass values, since on the meta device Embedding's own draw loads all of torch._dynamo.
    values = torch.empty(rows, width)
    return nn.Embedding(rows, width, padding_idx=padding, _weight=values)


def adapt(module: nn.Module, layer: int, swaps: Mapping[type, Swap] | None = None) -> nn.Module:
    """Replace parts of a `module` of transformers, and return it: linear layers, dropout, the slow
    form of GELU, and the types in `swaps`. Parameters keep their names."""
    chosen: dict[type, Swap] = {
        nn.Linear: lambda old: Linear(old.in_features, old.out_features, bias=old.bias is not None),
        Conv1D: lambda old: TransposedLinear(old.nx, old.nf),
        NewGELUActivation: lambda old: nn.GELU(approximate="tanh"),
        **(swaps or {}),
    }
    for path, old in list(module.named_modules()):
        if isinstance(old, nn.Dropout):
            module.set_submodule(path, Dropout(old.p, layer, path))
        elif type(old) in chosen:
            module.set_submodule(path, chosen[type(old)](old))
    return module


def draw(
    module: Layer,
    spec: ModelSpec,
    seed: int,
    tied: str | None,
    *,
    scaled: tuple[str, ...] = (),
    scale: float = 1.0,
) -> None:
    """Draw the initial weights as transformers' `_init_weights` does. Multiply the deviation of
    matrices whose names end with one of `scaled` by `scale`. The row of the padding token is
    zero."""
    base = options(spec)["initializer_range"]
    draw_parameters(
        module,
        seed,
        deviation=lambda name: base * scale if name.endswith(scaled) else base,
        tied=tied,
    )
    padding = options(spec).get("pad_token_id")
    if padding is not None:
        for part in module.modules():
            if isinstance(part, nn.Embedding) and part.padding_idx is not None:
                zero_row(part.weight, padding)
        if tied is not None:
            zero_row(module.get_parameter(tied), padding)


@torch.no_grad()
def zero_row(weight: Tensor, row: int) -> None:
    weight[row] = 0.0


def _kernels_take_groups(query: Tensor) -> bool:
    """Return whether fused attention accepts fewer heads of keys and values than of queries. GPU
    kernels for wide numbers do not: torch would fall back to whole matrices of scores."""
    return query.device.type == "cpu" or query.dtype in (torch.bfloat16, torch.float16)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention as a function of transformers: (b, heads, T, width) to (b, T, heads,
    width). Keys and values may have fewer heads than queries, each for a group of these."""
    assert attention_mask is None, "all rows are full"
    groups = query.shape[1] // key.shape[1]
    fused = not drops(dropout)
    grouped = fused and groups > 1 and _kernels_take_groups(query)
    if groups > 1 and not grouped:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    causal = bool(module.is_causal)
    if fused:
        mixed = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scaling, enable_gqa=grouped
        )
        return mixed.transpose(1, 2), None
    scores = query.mul(query.shape[-1] ** -0.5 if scaling is None else scaling) @ key.mT
    if causal:
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
    assert isinstance(module.layer_idx, int)
    shares = drop(shares, module.layer_idx + 1, "probabilities", dropout)
    return (shares @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, attend)

# ---- GPT-2: `GPT2LMHeadModel`


class Gpt2Embedding(Layer):
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

    The key bias adds the same to all scores of a query, so its true gradient is zero. Adam would
    amplify the gradient's rounding noise into updates that differ from plan to plan. So the key
    bias is cut from autograd.
    """

    def offset(self) -> Tensor:
        assert self.bias is not None, "it was asked for"
        query, key, value = self.bias.chunk(3)
        return torch.cat([query, key.detach(), value])


class Gpt2Block(Layer):
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


class Gpt2Head(Layer):
    """Final norm and projection to the vocabulary: (b, T, hidden) to logits (b, T, vocabulary)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(GPT2Config, spec)
        self.ln_f = nn.LayerNorm(config.n_embd, eps=config.layer_norm_epsilon)
        self.lm_head = Linear(config.n_embd, config.vocab_size)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.ln_f(x))
        return logits


def _initialise_gpt2(module: Layer, spec: ModelSpec, seed: int, tied: str | None) -> None:
    """Draw the initial values. Scale what a block adds to the residual stream down by the root of
    the number of such additions."""
    scale = 1.0 / math.sqrt(2 * spec.layers)
    draw(module, spec, seed, tied, scaled=("c_proj.weight",), scale=scale)


_GPT2 = Family(
    embedding=Gpt2Embedding,
    block=Gpt2Block,
    head=Gpt2Head,
    tied=("wte.weight", "lm_head.weight"),
    initialise=_initialise_gpt2,
)

# ---- Llama: `LlamaForCausalLM`


class LlamaEmbedding(Layer):
    """Token embedding: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(LlamaConfig, spec)
        self.embed_tokens = table(config.vocab_size, config.hidden_size, config.pad_token_id)

    def compute(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.embed_tokens(x)
        return embedded


class _LlamaNorm(LlamaRMSNorm):  # type: ignore[misc]  # transformers is not followed
    """Norm of Llama that computes in float64 if its input is; otherwise the original. The original
    would round float64 to float32, and so magnify differences in the last bit, as another order of
    sums gives."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        out: Tensor = self.weight * scaled.to(x.dtype)
        return out


@cached(maxsize=4)
def _rotation(
    spec: ModelSpec, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines, each (1, T, width of a head). All blocks of a worker share one pair
    of tables."""
    rotary = LlamaRotaryEmbedding(configuration(LlamaConfig, spec))
    like = torch.empty(0, dtype=dtype)
    cosine, sine = rotary(like, torch.arange(length)[None])
    return cosine.to(device), sine.to(device)


class LlamaBlock(Layer):
    """Pre-norm causal self-attention with rotated queries and keys, and a gated MLP."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        self._spec = spec
        config = configuration(LlamaConfig, spec)
        swaps = {LlamaRMSNorm: lambda old: _LlamaNorm(config.hidden_size, eps=old.variance_epsilon)}
        self.block = adapt(LlamaDecoderLayer(config, layer_idx=layer - 1), layer, swaps)

    def prepare(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, *_rotation(self._spec, x.shape[1], x.device, x.dtype)

    def compute(self, prepared: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        x, *tables = prepared
        out: Tensor = self.block(x, position_embeddings=tuple(tables))
        return out


class LlamaHead(Layer):
    """Final norm and projection to the vocabulary: (b, T, hidden) to logits (b, T, vocabulary)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(LlamaConfig, spec)
        self.norm = _LlamaNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


_LLAMA = Family(
    embedding=LlamaEmbedding,
    block=LlamaBlock,
    head=LlamaHead,
    tied=("embed_tokens.weight", "lm_head.weight"),
    initialise=draw,
)

# ---- BERT: `BertForMaskedLM`. All tokens are of type 0: one segment.


class BertEmbedding(Layer):
    """Token, position and type embedding, normed: int64 ids (b, T) to (b, T, hidden)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(BertConfig, spec)
        hidden = config.hidden_size
        self.word_embeddings = table(config.vocab_size, hidden, config.pad_token_id)
        self.position_embeddings = table(config.max_position_embeddings, hidden)
        self.token_type_embeddings = table(config.type_vocab_size, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob, layer, "embedding")

    def compute(self, x: Tensor) -> Tensor:
        embedded = self.word_embeddings(x) + self.token_type_embeddings.weight[0]
        embedded = embedded + self.position_embeddings.weight[: x.shape[1]]
        dropped: Tensor = self.dropout(self.LayerNorm(embedded))
        return dropped


class _BertKey(Linear):
    """The key projection, with its bias cut from autograd: see `_QueryKeyValue`."""

    def offset(self) -> Tensor:
        assert self.bias is not None, "it was asked for"
        offset: Tensor = self.bias.detach()
        return offset


class BertBlock(Layer):
    """Self-attention over all tokens and an MLP, each normed after its sum."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(BertConfig, spec)
        self.block = adapt(BertLayer(config, layer_idx=layer - 1), layer)
        attention = self.block.get_submodule("attention.self")
        attention.key = _BertKey(config.hidden_size, config.hidden_size, bias=True)

    def compute(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x)
        return out


class BertHead(Layer):
    """Head of BERT, a transform and a projection to the vocabulary: (b, T, hidden) to logits (b, T,
    vocabulary)."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(layer)
        config = configuration(BertConfig, spec)
        self.transform = adapt(BertPredictionHeadTransform(config), layer)
        self.decoder = Linear(config.hidden_size, config.vocab_size, bias=True)

    def compute(self, x: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.transform(x))
        return logits


_BERT = Family(
    embedding=BertEmbedding,
    block=BertBlock,
    head=BertHead,
    tied=("word_embeddings.weight", "decoder.weight"),
    initialise=draw,
)

FAMILIES: Mapping[Kind, Family] = {"gpt2": _GPT2, "llama": _LLAMA, "bert": _BERT}
