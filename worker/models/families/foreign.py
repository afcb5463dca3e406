"""Shared parts of the Hugging Face families: configs, and fitting modules of transformers for
training.

Importing this imports transformers (two seconds), so only the families' own modules do.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from oobleck.core.job.families import decode_config, family_of
from oobleck.core.job.model import ModelSpec
from oobleck.worker.models.base import Dropout, Layer, draw_parameters, drop, drops
from oobleck.worker.models.linear import Linear, TransposedLinear
from oobleck.worker.models.modes import cached
from oobleck.worker.runtime.errors import JobError

_ATTENTION = "oobleck"

Swap = Callable[[Any], nn.Module]


def options(spec: ModelSpec) -> dict[str, Any]:
    """The keys of the model's config, without those that keep transformers' default None."""
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
        # Without the special tokens, which mean nothing to training and draw a warning where they
        # are beyond the vocabulary.
        config = kind(**json.loads(text), bos_token_id=None, eos_token_id=None)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise JobError(f"model.config: transformers refuses it: {why}; correct it") from error
    config._attn_implementation = _ATTENTION
    return config


def configuration(kind: Callable[..., Any], spec: ModelSpec) -> Any:
    """The config object of `spec`, of transformers' class `kind`; raises JobError."""
    return _configuration(kind, json.dumps(options(spec)))


def table(rows: int, width: int, padding: int | None = None) -> nn.Embedding:
    """An embedding table with nothing in it; the row `padding` gets no gradient."""
    # Given, since its own draw loads all of torch._dynamo on the meta device.
    values = torch.empty(rows, width)
    return nn.Embedding(rows, width, padding_idx=padding, _weight=values)


def adapt(module: nn.Module, layer: int, swaps: Mapping[type, Swap] | None = None) -> nn.Module:
    """`module` of transformers with parts replaced: linear layers, dropout, the slow form of GELU,
    and what `swaps` says by type. Parameters keep their names."""
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
    """Initial weights as transformers' `_init_weights` draws them, with one deviation for matrices:
    times `scale` where a name ends with one of `scaled`. The row of the padding token is zero."""
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
    """Return whether fused attention reads keys and values of fewer heads as they are. GPUs'
    kernels for wide numbers do not, and torch would fall back on whole matrices of scores."""
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
    """An attention function of transformers: (b, heads, T, width) to (b, T, heads, width). Keys and
    values may have fewer heads than queries, each for a group of these."""
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
