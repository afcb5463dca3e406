"""Objectives of training on token rows: inputs and targets as a function of (seed, step, position).

Causal: predict each token from those before it. Masked (BERT, Devlin et al. 2019 §3.1): predict 15%
of a row's tokens from all the others. Owns the choice of tokens and the loss; a row gives the same
result on any worker.
"""

import torch
from torch import Tensor

from oobleck.core.job.families import decode_config, mask_token
from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.worker.models.cross_entropy import cross_entropy
from oobleck.worker.runtime.random import RowKeys, generator

#: Share of a row's tokens to learn; of these, the shares masked and replaced at random.
CHOSEN = 0.15
MASKED = 0.8
RANDOM = 0.1
#: Target of a token that does not count.
IGNORED = -100


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
