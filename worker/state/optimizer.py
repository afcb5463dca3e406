"""Arithmetic of an update: learning rate by step, clipping by norm, and the optimizer.

All are functions of their arguments: an optimizer's state is the moments passed in and the number
of the step. The optimizer is ours, or a class that the job names. Must not know layers, or who
holds them.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from oobleck.core.job.code import Code
from oobleck.core.job.optimization import OptimizerSketch, OptimizerSpec, ScheduleSpec
from oobleck.core.job.spec import TrainingSpec
from oobleck.planner.programs.transfer import CUT_NUMBERS
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError

# ---- Pieces of a layer's flat state, as an update takes them: data only.


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """Numbers of a parameter that this update, or an earlier one, leaves out."""

    numbers: range
    unused: bool
    #: Number of earlier updates that left them out.
    missed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Piece of flat state that is updated as one tensor, in place."""

    #: (1 + moments, n): weights, then the moments in the optimizer's order.
    storage: Tensor
    #: (n), of the mean loss, clipped.
    gradient: Tensor
    #: Whether weight decay applies to it.
    decayed: bool
    #: Numbers to treat separately, counted from the slice's first one.
    apart: Sequence[Apart] = ()
    #: Index of a number that is not `apart`. A class's single numbers, equal for all, are read
    #: there.
    typical: int = 0


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
    pieces = [replace(one, typical=_first_but(one.apart)) for one in slices]
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


def _first_but(apart: Sequence[Apart]) -> int:
    """Return the first number outside of `apart`."""
    reached = 0
    for one in sorted(apart, key=lambda one: one.numbers.start):
        if one.numbers.start > reached:
            break
        reached = one.numbers.stop
    return reached


def _cover(piece: Slice, one: Apart) -> tuple[int, Slice]:
    """Return a copy of the whole cuts around those numbers, and the number that it begins at."""
    first = one.numbers.start // CUT_NUMBERS * CUT_NUMBERS
    columns = slice(first, -(-one.numbers.stop // CUT_NUMBERS) * CUT_NUMBERS)
    copied = piece.storage[:, columns].clone()
    return first, Slice(
        storage=copied,
        gradient=piece.gradient[columns],
        decayed=piece.decayed,
        typical=one.numbers.start - first,
    )


def _update(slices: Iterable[Slice], training: TrainingSpec, step: int, taken: int) -> None:
    """Take the step on slices that have taken `taken` steps before.

    It calls torch.optim's functions: the first object of its classes would load the compiler
    (torch._dynamo), which costs each process a second and 100 MB. A momentum of zeros has the
    effect of the first step of torch's SGD. `update_own` updates by a class that the job names.
    """
    spec = training.optimizer
    if spec.code is not None:
        update_own(slices, spec, rates_of(training)(step), taken)
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


# ---- Update by a class that the job names: any torch.optim.Optimizer with state per parameter.
#
# A new object of the class is made for each update. It gets one flat piece of a layer at a time
# as its parameter, and its state is set from the rows of the piece. So an update is a function of
# the pieces and of the step, and the code that moves, saves or cuts rows need not know the class.
# A count of steps follows from the number of the step; any other single number has a row too, the
# same in all its columns. `describe_optimizer` decides before the job whether a class can be used.


def load() -> bool:
    """Import the modules that the first step of a torch optimizer needs.

    They take 1.5 s. It starts no thread. Return whether any was new.
    """
    new = "torch._dynamo" not in sys.modules
    torch.optim.SGD([nn.Parameter(torch.zeros(()))]).step()
    return new


def update_own(slices: Iterable[Slice], spec: OptimizerSpec, rate: float, taken: int) -> None:
    """Take one step of the job's class on all slices, in place.

    `taken`: steps that these have taken before. Raise JobError if the class cannot do it.
    """
    pieces = list(slices)
    if not pieces:
        return
    like = pieces[0].storage
    optimizer = make(spec, [_dummy(like.dtype, like.device)])
    begun, first = _entries(spec, like.dtype, like.device)
    (group,) = optimizer.param_groups
    group["lr"] = rate
    for piece in pieces:
        group["weight_decay"] = spec.weight_decay if piece.decayed else 0.0
        _take(optimizer, piece, spec.sketch, first if taken else begun, taken)


def _take(
    optimizer: torch.optim.Optimizer,
    piece: Slice,
    sketch: OptimizerSketch,
    entries: Mapping[str, Any],
    taken: int,
) -> None:
    """Update one piece. `entries`: a parameter's state at that point, whose numbers are others."""
    weights, *rows = piece.storage
    parameter = nn.Parameter(weights)
    parameter.grad = piece.gradient
    (group,) = optimizer.param_groups
    group["params"] = [parameter]
    held = list(zip(sketch.rows, rows, strict=True))
    number = min(piece.typical, len(weights) - 1)  # all may be treated separately
    optimizer.state.clear()
    if entries:  # otherwise it creates its state in its first step
        state = optimizer.state[parameter] = {n: _copy(value) for n, value in entries.items()}
        for row, view in held:
            if row.name in state:
                state[row.name] = _numbered(state[row.name], view[number]) if row.single else view
        for name in sketch.counters:
            if name in state:
                state[name] = _numbered(state[name], taken)
    _step(optimizer)
    after = optimizer.state[parameter]
    if set(after) != set(sketch.names):
        raise JobError(
            f"optimizer: {type(optimizer).__name__} keeps {', '.join(after)} of a parameter, and "
            f"kept {', '.join(sketch.names)} where the job was submitted; it must keep the same "
            "state from its first step on"
        )
    with torch.no_grad():
        for row, view in held:
            if row.single:
                view.fill_(after[row.name])
            else:
                _store(after[row.name], view)
        _store(parameter.data, weights)


def _step(optimizer: torch.optim.Optimizer) -> None:
    with code.running(f"optimizer: {type(optimizer).__name__}"):
        optimizer.step()


def _store(value: Tensor, view: Tensor) -> None:
    """Copy `value` into the view, if the class replaced its tensor by a new one."""
    if value.data_ptr() != view.data_ptr():
        view.copy_(value)


def make(spec: OptimizerSpec, parameters: list[Any]) -> torch.optim.Optimizer:
    """Make an object of the job's class for `parameters`, or groups of them.

    Raise JobError or NodeError.
    """
    made = code.call(_code(spec), "optimizer", parameters, lr=spec.lr)
    if isinstance(made, torch.optim.Optimizer):
        return made
    raise JobError(
        f"optimizer: {spec.label} makes {type(made).__name__}; name a class that extends "
        "torch.optim.Optimizer"
    )


def check(spec: OptimizerSpec) -> None:
    """Load the class, and check that its code is the one described where the job was submitted.

    Raise NodeError or JobError.
    """
    if spec.code is None:
        return
    if not spec.described:
        raise JobError("optimizer: the class was not checked; submit the job with 'oobleck submit'")
    make(spec, [_dummy(torch.float32, torch.device("cpu"))])
    if code.fingerprint(spec.code) != spec.sketch.code:
        raise NodeError(
            f"optimizer: the code of {spec.label} on this machine differs from that where the job "
            "was submitted; give every node the same code, and submit again"
        )


def _code(spec: OptimizerSpec) -> Code:
    assert spec.code is not None, "it is the job's own"
    return spec.code


def _dummy(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter of one number, whose gradient is 0."""
    parameter = nn.Parameter(torch.zeros(1, dtype=dtype, device=device))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


@lru_cache(maxsize=4)
def _entries(
    spec: OptimizerSpec, dtype: torch.dtype, device: torch.device
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the class keeps of a parameter before its first step, and after it."""
    parameter = _dummy(dtype, device)
    optimizer = make(spec, [parameter])
    begun = {name: _copy(value) for name, value in optimizer.state.get(parameter, {}).items()}
    _step(optimizer)
    return begun, dict(optimizer.state.get(parameter, {}))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _numbered(like: Any, number: Any) -> Any:
    """Return `number` in the type of `like`; a tensor is filled in place."""
    return like.fill_(number) if isinstance(like, Tensor) else type(like)(number)
