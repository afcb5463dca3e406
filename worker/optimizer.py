"""The rules of an update: learning rate by step, clipping by norm, and the optimizer's own.

All are functions of their arguments: an optimizer's state is the moments that are handed in and
the number of the step, and nothing is remembered here. Must not know layers, or who holds them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oobleck.planner.job import TrainingSpec
from oobleck.planner.optimization import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, step: int, steps: int, base: float) -> float:
    """The rate of step `step` (from 1) of `steps`.

    Linear warm-up that reaches `base` in the step after the last warm-up step; then constant, or
    a line or half a cosine that would reach `min_lr` in the step after the last one. These are
    torch.optim.lr_scheduler's LinearLR and CosineAnnealingLR.
    """
    if step <= schedule.warmup:
        return base * step / (schedule.warmup + 1)
    if schedule.name == "constant":
        return base
    done = min(1.0, (step - 1 - schedule.warmup) / max(1, steps - schedule.warmup))
    left = 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_lr + (base - schedule.min_lr) * left


def clip_scale(grad_norm: float, clip: float | None) -> float:
    """Factor that brings a gradient of `grad_norm` to at most `clip`.

    As torch.nn.utils.clip_grad_norm_ computes it, with its 1e-6 against division by zero.
    """
    return 1.0 if clip is None else min(1.0, clip / (grad_norm + 1e-6))


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A piece of flat state that is updated as one tensor, in place."""

    #: (1 + moments, n): weights, then the moments in the optimizer's order.
    storage: Tensor
    #: (n), of the mean loss, clipped.
    gradient: Tensor
    #: Whether weight decay acts on it.
    decayed: bool


def update(slices: Iterable[Slice], training: TrainingSpec, step: int) -> None:
    """Take step `step` (from 1) of the job's optimizer on all slices.

    The optimizer object is made anew each time, over views; that costs microseconds, and nothing
    but storage and step number need travel with a layer. A momentum of zeros before the first
    step gives what torch's SGD does there, where it takes the gradient as the momentum.
    """
    spec = training.optimizer
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    moments: dict[Tensor, dict[str, Tensor]] = {}
    for piece in slices:
        parameter = nn.Parameter(piece.storage[0])
        parameter.grad = piece.gradient
        groups[piece.decayed].append(parameter)
        if spec.name == "adamw":
            moments[parameter] = {
                "step": torch.tensor(step - 1.0, device=piece.storage.device),
                "exp_avg": piece.storage[1],
                "exp_avg_sq": piece.storage[2],
            }
        elif spec.moments:
            moments[parameter] = {"momentum_buffer": piece.storage[1]}
    decayed: list[dict[str, object]] = [
        {"params": parameters, "weight_decay": spec.weight_decay if decays else 0.0}
        for decays, parameters in groups.items()
        if parameters
    ]
    if not decayed:
        return
    optimizer = _optimizer(decayed, training, step)
    optimizer.state.update(moments)
    optimizer.step()


def _optimizer(
    groups: list[dict[str, object]], training: TrainingSpec, step: int
) -> torch.optim.Optimizer:
    """Fused: one kernel reads and writes everything once. CPU and CUDA have it for both."""
    spec = training.optimizer
    rate = learning_rate(training.schedule, step, training.steps, spec.lr)
    if spec.name == "adamw":
        assert spec.beta1 is not None
        assert spec.beta2 is not None
        assert spec.eps is not None
        return torch.optim.AdamW(
            groups, lr=rate, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True
        )
    assert spec.momentum is not None
    assert spec.nesterov is not None
    return torch.optim.SGD(
        groups, lr=rate, momentum=spec.momentum, nesterov=spec.nesterov, fused=True
    )
