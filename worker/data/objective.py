"""Samples of a step, and the objectives of training on token rows, as functions of the seed.

`Order` chooses the samples. Inputs and targets are a function of (seed, step, position). Causal:
each token from those before it. Masked (BERT, Devlin et al. 2019 §3.1): 15% of a row's tokens from
all the others. Owns the choice of tokens and the loss; a row gives the same on any worker.

With a large vocabulary torch's own loss keeps several float32 copies of the logits: the widened
ones, their log-softmax, and a gradient of each. Here only one chunk at a time has such copies. The
gradient is computed together with the loss, from the same softmax.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from oobleck.core.job.families import mask_token
from oobleck.core.job.family import decode_config
from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.core.purpose import derive
from oobleck.planner.profile.memory import LOSS_CHUNK
from oobleck.worker.runtime.random import RowKeys, generator

# ---- Choice of the samples that a step uses.
#
# Every epoch goes through all of them in an order that is a stateless permutation of (seed,
# epoch). So any worker can compute the samples of any step by itself.


_FEISTEL_ROUNDS = 6
#: In place of an epoch: the fixed shuffle whose last samples are held out. It ignores the seed.
_SPLIT = -1


def permute(values: NDArray[np.uint64], size: int, *, seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return the places of `values` in the shuffle of range(`size`) named by (seed, epoch).

    A Feistel network permutes the next power of four. A value that lands outside `size` is permuted
    again until it is inside (Black and Rogaway 2002): less than four rounds on average.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(derive(seed, "order", epoch, i)) for i in range(_FEISTEL_ROUNDS)]
    out = values.astype(np.uint64)
    walking = np.arange(len(out))
    while len(walking):
        left, right = out[walking] >> half, out[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        out[walking] = (left << half) | right
        walking = walking[out[walking] >= np.uint64(size)]
    return out


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finaliser of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Order in which a job's steps use its `samples`.

    The last `held_out` samples of a fixed shuffle are not trained on; every epoch shuffles the
    others anew.
    """

    samples: int
    held_out: int

    @staticmethod
    def of(samples: int, share: float) -> "Order":
        """Hold out `share` of the samples; at least one if the share is positive."""
        return Order(samples=samples, held_out=max(1, round(share * samples)) if share else 0)

    @property
    def trained(self) -> int:
        return self.samples - self.held_out

    def of_step(
        self, seed: int, step: int, positions: Sequence[int], global_batch: int
    ) -> NDArray[np.uint64]:
        """Return the samples of `step` (from 1) at `positions` of its batch."""
        wanted = (step - 1) * global_batch + np.asarray(positions, dtype=np.int64)
        order = np.empty(len(wanted), dtype=np.uint64)
        epochs, places = np.divmod(wanted, self.trained)
        for epoch in sorted(set(epochs.tolist())):  # np.unique would import numpy.ma first
            chosen = epochs == epoch
            order[chosen] = permute(
                places[chosen].astype(np.uint64), self.trained, seed=seed, epoch=epoch
            )
        return self._apart(order)

    def of_held_out(self, positions: Sequence[int]) -> NDArray[np.uint64]:
        """Return the held-out samples at `positions` among those held out.

        They depend only on the number of samples and the held-out share.
        """
        return self._apart(np.asarray(positions, dtype=np.uint64) + np.uint64(self.trained))

    def _apart(self, places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the samples at `places` of the order that has all training samples first."""
        return permute(places, self.samples, seed=0, epoch=_SPLIT) if self.held_out else places


# ---- Objectives of training on token rows.


#: Share of a row's tokens to learn; of these, the shares masked and replaced at random.
CHOSEN = 0.15
MASKED = 0.8
RANDOM = 0.1
#: Target of a token that does not count.
IGNORED = -100
#: Up to this many logits use torch's own loss, which takes fewer operations and more memory.
_FEW = 1 << 18


def inputs_and_targets(spec: AnyModel, tokens: Tensor, rows: RowKeys) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, both (b, T), from token rows (b, T + 1).

    Every row has the same number of targets.
    """
    if not isinstance(spec, ModelSpec) or spec.objective == "causal":
        return tokens[:, :-1], tokens[:, 1:]
    return _masked(spec, tokens[:, :-1], rows)


def _masked(spec: ModelSpec, tokens: Tensor, rows: RowKeys) -> tuple[Tensor, Tensor]:
    mask = mask_token(decode_config(spec.config))
    length = tokens.shape[1]
    count = max(1, round(CHOSEN * length))
    inputs, targets = tokens.clone(), torch.full_like(tokens, IGNORED)
    for row, position in enumerate(rows.positions):
        draws = generator(rows.seed, "masked", rows.step, position)
        chosen = torch.randperm(length, generator=draws)[:count]
        fate = torch.rand(count, generator=draws)
        others = torch.randint(spec.vocabulary, (count,), generator=draws)
        kept = tokens[row, chosen]
        changed = torch.where(fate < MASKED + RANDOM, others, kept)
        inputs[row, chosen] = torch.where(fate < MASKED, mask, changed)
        targets[row, chosen] = kept
    return inputs, targets


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over the micro-batch's targets, in float32 at least.

    It overwrites the logits: see `cross_entropy`.
    """
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignored=IGNORED)


def cross_entropy(logits: Tensor, targets: Tensor, *, ignored: int) -> Tensor:
    """Return the mean cross entropy of logits (n, c) over the targets (n) that are not `ignored`,
    in float32 at least.

    If a gradient is wanted, the logits may be overwritten, so do not use them afterwards.
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
        # An ignored target gets class 0 as a placeholder, with weight 0.
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
