"""What the layers of all families share: their number, and dropout by sample instead of by call.

Knows no family, and nothing of stages, flat state, devices of others or plans.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.planner.job import ModelSpec
from oobleck.worker.random import RowKeys, Site, keep_mask


class Layer(nn.Module):
    """A unit of placement and state: int64 ids (b, T) or (b, T, hidden) in, (b, T, hidden) out."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.dropout = spec.dropout

    def forward(self, x: Tensor, rows: RowKeys) -> Tensor:
        raise NotImplementedError

    def drop(self, x: Tensor, rows: RowKeys, site: Site) -> Tensor:
        if self.dropout == 0.0:
            return x
        keep = keep_mask(
            rows, self.layer, site, width=x[0].numel(), dropout=self.dropout, device=x.device
        )
        return x * keep.view(x.shape) / (1.0 - self.dropout)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy over all tokens of the micro-batch, in float32 at least."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())
