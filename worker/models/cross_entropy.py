"""Mean cross entropy of logits, chunk by chunk, whose gradient takes the logits' place.

As torch has it, the logits of a large vocabulary are there several times in float32: widened, their
logarithms of shares, and a gradient of each. Here one chunk at a time is. The gradient is made with
the loss, from the same shares, so nothing is computed twice.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oobleck.planner.profile.memory import LOSS_CHUNK

#: So few logits go through torch's own, which takes fewer operations, and more memory.
_FEW = 1 << 18


def cross_entropy(logits: Tensor, targets: Tensor, *, ignored: int) -> Tensor:
    """Mean over the targets (n) that are not `ignored`, in float32 at least, of logits (n, c).

    Where a gradient is wanted the logits may be used up: nobody may look at them after.
    """
    if logits.numel() <= _FEW and logits.dtype in (torch.float32, torch.float64):
        return F.cross_entropy(logits, targets, ignore_index=ignored)
    wanted = torch.is_grad_enabled() and logits.requires_grad
    total: Tensor = _CrossEntropy.apply(logits, targets, ignored, wanted)  # type: ignore[no-untyped-call]
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignored: int, wanted: bool) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        counted = targets != ignored
        share = counted.sum().to(wide).reciprocal_()
        # Of a target that is ignored, the first class stands for none; it counts with nothing.
        classes, weights = targets.where(counted, 0)[:, None], (counted * share)[:, None]
        less = torch.full((1, 1), -1.0, dtype=wide, device=logits.device)
        losses = []
        rows = max(1, LOSS_CHUNK // logits.shape[1])
        for given, right, weight in zip(
            *(torch.split(each, rows) for each in (logits, classes, weights)), strict=True
        ):
            logarithms = F.log_softmax(given, dim=1, dtype=wide)
            losses.append((logarithms.gather(1, right) * weight).sum())
            if wanted:
                shares = logarithms.exp_().scatter_add_(1, right, less.expand_as(right))
                torch.mul(shares, weight, out=given)
        if wanted:
            ctx.save_for_backward(logits)
        return losses[0].neg() if len(losses) == 1 else torch.stack(losses).sum().neg()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient.mul_(gradients[0]), None, None, None
