"""Arithmetic of an update: learning rate by step, clipping by norm, and the optimizer.

All are functions of their arguments: an optimizer's state is the moments passed in and the number
of the step. Must not know layers, or who holds them.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import TrainingSpec
from oobleck.planner.programs.transfer import CUT_NUMBERS
from oobleck.worker.state import own_optimizer
from oobleck.worker.state.slices import Apart, Slice


def learning_rate(schedule: ScheduleSpec, step: int, steps: int, base: float) -> float:
    """Return the learning rate of step `step` (from 1) of `steps`.

    Linear warm-up reaches `base` in the step after the last warm-up step. Then the rate is
    constant, or a line or half a cosine that would reach `min_lr` in the step after the last one.
    These are torch.optim.lr_scheduler's LinearLR and CosineAnnealingLR.
    """
    if step <= schedule.warmup:
        return base * step / (schedule.warmup + 1)
    if schedule.name == "constant":
        return base
    done = min(1.0, (step - 1 - schedule.warmup) / max(1, steps - schedule.warmup))
    left = 1.0 - done if schedule.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_lr + (base - schedule.min_lr) * left


@lru_cache(maxsize=4)
def rates_of(training: TrainingSpec) -> Callable[[int], float]:
    """Return the job's learning rate as a function of the step."""
    return lambda step: learning_rate(
        training.schedule, step, training.steps, training.optimizer.lr
    )


def clip_scale(grad_norm: float, clip: float | None) -> float:
    """Return the factor that reduces a gradient of norm `grad_norm` to at most `clip`.

    torch.nn.utils.clip_grad_norm_ computes the same.
    """
    return 1.0 if clip is None else min(1.0, clip / (grad_norm + 1e-6))


def update(slices: Iterable[Slice], training: TrainingSpec, step: int) -> None:
    """Take step `step` (from 1) of the job's optimizer on all slices.

    Numbers that are `apart` are copied first, and updated separately or not at all. They are
    written back after the update of the rest. A copy extends to whole cuts, because rounding
    depends on the position in a tensor (see `CUT_NUMBERS`).
    """
    pieces = list(slices)
    aside = [(piece, one, *_cover(piece, one)) for piece in pieces for one in piece.apart]
    _update(pieces, training, step, step - 1)
    late: defaultdict[int, list[Slice]] = defaultdict(list)
    for _, one, _, cover in aside:
        if not one.unused:
            late[step - 1 - one.missed].append(cover)
    for taken, covers in late.items():
        _update(covers, training, step, taken)
    for piece, one, first, cover in aside:
        start, stop = one.numbers.start, one.numbers.stop
        piece.storage[:, start:stop] = cover.storage[:, start - first : stop - first]


def _cover(piece: Slice, one: Apart) -> tuple[int, Slice]:
    """Return a copy of the whole cuts around those numbers, and the number that it begins at."""
    first = one.numbers.start // CUT_NUMBERS * CUT_NUMBERS
    columns = slice(first, -(-one.numbers.stop // CUT_NUMBERS) * CUT_NUMBERS)
    copied = piece.storage[:, columns].clone()
    return first, Slice(storage=copied, gradient=piece.gradient[columns], decayed=piece.decayed)


def _update(slices: Iterable[Slice], training: TrainingSpec, step: int, taken: int) -> None:
    """Take the step on slices that have taken `taken` steps before.

    It calls torch.optim's functions: the first object of its classes would load the compiler
    (torch._dynamo), which costs each process a second and 100 MB. A momentum of zeros has the
    effect of the first step of torch's SGD. `own_optimizer` updates by a class that the job names.
    """
    spec = training.optimizer
    if spec.code is not None:
        own_optimizer.update(slices, spec, step, rates_of(training), taken)
        return
    rate = rates_of(training)(step)
    groups: dict[bool, list[Slice]] = {True: [], False: []}
    for piece in slices:
        groups[piece.decayed].append(piece)
    take = _adamw if spec.name == "adamw" else _sgd
    with torch.no_grad():
        for decayed, group in groups.items():
            if group:
                take(group, spec, taken, rate, decayed)


# Fused kernels read and write everything once. CPU and CUDA have them for both optimizers.


def _adamw(group: list[Slice], spec: OptimizerSpec, taken: int, rate: float, decayed: bool) -> None:
    assert spec.beta1 is not None
    assert spec.beta2 is not None
    assert spec.eps is not None
    assert spec.weight_decay is not None
    adamw(
        [piece.storage[0] for piece in group],
        [piece.gradient for piece in group],
        [piece.storage[1] for piece in group],
        [piece.storage[2] for piece in group],
        [],
        # Filled on the device: a copy from the host would wait for all work queued on a GPU.
        [torch.full((), float(taken), device=piece.storage.device) for piece in group],
        fused=True,
        amsgrad=False,
        beta1=spec.beta1,
        beta2=spec.beta2,
        lr=rate,
        weight_decay=spec.weight_decay if decayed else 0.0,
        eps=spec.eps,
        maximize=False,
    )


def _sgd(group: list[Slice], spec: OptimizerSpec, taken: int, rate: float, decayed: bool) -> None:
    assert spec.momentum is not None
    assert spec.nesterov is not None
    assert spec.weight_decay is not None
    sgd(
        [piece.storage[0] for piece in group],
        [piece.gradient for piece in group],
        [piece.storage[1] if spec.moments else None for piece in group],
        fused=True,
        weight_decay=spec.weight_decay if decayed else 0.0,
        momentum=spec.momentum,
        lr=rate,
        dampening=0.0,
        nesterov=spec.nesterov,
        maximize=False,
    )
