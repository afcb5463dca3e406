"""Dropout and attention for modules of transformers, whose forwards do not know the samples.

The layer says whose rows it computes; dropout modules inside of it, and the attention function,
take their masks from that, never from the process's generator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.worker.models.base import drop
from oobleck.worker.runtime.random import RowKeys, Site

_rows: ContextVar[RowKeys] = ContextVar("rows")


@contextmanager
def keyed(rows: RowKeys) -> Iterator[None]:
    """Modules within compute these samples."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


class Dropout(nn.Module):
    """nn.Dropout whose mask is a function of (seed, step, sample position, layer, site)."""

    def __init__(self, share: float, layer: int, site: Site) -> None:
        super().__init__()
        #: Under nn.Dropout's name: attention modules read it and apply it themselves.
        self.p = share
        self.layer = layer
        self.site = site

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        return drop(x, _rows.get(), self.layer, self.site, self.p)


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
    """An attention function of transformers: (b, heads, T, width) to (b, T, heads, width).

    `module` says with `is_causal` what a token sees, and with `layer_idx` its place in the model.
    Keys and values may have fewer heads than queries, each for a group of these.
    """
    assert attention_mask is None, "all rows are full"
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    causal = bool(module.is_causal)
    if dropout == 0.0 or not _rows.get().training:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling)
        return mixed.transpose(1, 2), None
    scores = query.mul(query.shape[-1] ** -0.5 if scaling is None else scaling) @ key.mT
    if causal:
        length = scores.shape[-1]
        later = torch.ones(length, length, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(dim=-1, dtype=wide).to(value.dtype)
    assert isinstance(module.layer_idx, int)
    shares = drop(shares, _rows.get(), module.layer_idx + 1, "probabilities", dropout)
    return (shares @ value).transpose(1, 2), None
