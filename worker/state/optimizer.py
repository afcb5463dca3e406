"""Arithmetic of an update: learning rate by step, clipping by norm, and the optimizer.

All are functions of their arguments: an optimizer's state is the moments passed in and the number
of the step. The optimizer is ours, or a class that the job names. Must not know layers, or who
holds them.
"""

import math
import sys
import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    effect of the first step of torch's SGD. `update_own` updates by a class that the job names.
    """
    spec = training.optimizer
    if spec.code is not None:
        update_own(slices, spec, step, rates_of(training), taken)
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
# Single numbers that a class keeps beside rows, such as a step count, follow from the number of
# the step. `describe_optimizer` decides before the job whether a class can be used this way.


#: Learning rate by step, from 1.
Rates = Callable[[int], float]


def load() -> bool:
    """Import the modules that the first step of a torch optimizer needs.

    They take 1.5 s. It starts no thread. Return whether any was new.
    """
    new = "torch._dynamo" not in sys.modules
    torch.optim.SGD([nn.Parameter(torch.zeros(()))]).step()
    return new


def update_own(
    slices: Iterable[Slice], spec: OptimizerSpec, step: int, rates: Rates, taken: int
) -> None:
    """Take step `step` (from 1) of the job's class on all slices, in place.

    `taken`: steps that these have taken before. Raise JobError if the class cannot do it.
    """
    pieces = list(slices)
    if not pieces:
        return
    like = pieces[0].storage
    optimizer = make(spec, [_dummy(like.dtype, like.device)])
    if taken < step - 1 and spec.sketch.rated and rates(1) != rates(2):
        raise JobError(
            f"optimizer: {spec.label} keeps {', '.join(spec.sketch.rated)}, which follow from the "
            "learning rates of all steps, and a parameter had no gradient in some of them; leave "
            "out training.schedule, name another optimizer, or use all parameters in each step"
        )
    series = _series(spec, rates, like.dtype, like.device)
    (group,) = optimizer.param_groups
    group["lr"] = rates(step)
    for piece in pieces:
        group["weight_decay"] = spec.weight_decay if piece.decayed else 0.0
        _take(optimizer, piece, spec.sketch, series.before(taken + 1))


def _take(
    optimizer: torch.optim.Optimizer,
    piece: Slice,
    sketch: OptimizerSketch,
    numbers: Mapping[str, Any],
) -> None:
    weights, *rows = piece.storage
    parameter = nn.Parameter(weights)
    parameter.grad = piece.gradient
    (group,) = optimizer.param_groups
    group["params"] = [parameter]
    held = {row.name: view for row, view in zip(sketch.rows, rows, strict=True)}
    optimizer.state.clear()
    if numbers:  # otherwise it creates its state in its first step
        optimizer.state[parameter] = {
            name: held.get(name, value) for name, value in numbers.items()
        }
    _step(optimizer)
    after = optimizer.state[parameter]
    if set(after) != set(sketch.names):
        raise JobError(
            f"optimizer: {type(optimizer).__name__} keeps {', '.join(after)} of a parameter, and "
            f"kept {', '.join(sketch.names)} where the job was submitted; it must keep the same "
            "state from its first step on"
        )
    with torch.no_grad():
        for name, view in held.items():
            _store(after[name], view)
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
            f"optimizer: the code of {spec.label} on this node differs from that where the job "
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


class _Series:
    """Single numbers that the class keeps of every parameter, by the number of the step.

    A parameter of one number yields them. If all are counters, it takes only the first step.
    Others, such as the product of NAdam's momenta, need every step, once per process. All values
    are kept, because some parameters may have taken far fewer steps than others.
    """

    def __init__(
        self, spec: OptimizerSpec, rates: Rates, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sketch, self._rates = spec.sketch, rates
        #: Needed because updates of fed layers run in another thread.
        self._lock = threading.Lock()
        self._parameter = _dummy(dtype, device)
        self._optimizer = make(spec, [self._parameter])
        self._steps = 0
        #: State of `_parameter` before its first step, and after it.
        self._begun = self._numbers()
        self._first: dict[str, Any] = {}
        #: Numbers of `sketch.series` after each step.
        self._series = {name: array("d") for name in self._sketch.series}

    def before(self, step: int) -> dict[str, Any]:
        """Return the entries of a parameter's state before `step`; empty if there are none yet.

        The values of rows in it are meaningless.
        """
        taken = step - 1
        with self._lock:
            while self._steps < (taken if self._series else min(taken, 1)):
                self._advance()
            like = self._first if taken else self._begun
            found = {name: _copy(value) for name, value in like.items()}
            for name, values in self._series.items() if taken else ():
                if found[name] is not None:
                    found[name] = _numbered(found[name], values[taken - 1])
        for name in self._sketch.counters:
            if name in found:
                found[name] = _numbered(found[name], taken)
        return found

    def _advance(self) -> None:
        self._steps += 1
        self._optimizer.param_groups[0]["lr"] = self._rates(self._steps)
        _step(self._optimizer)
        numbers = self._numbers()
        self._first = self._first or numbers
        for name, values in self._series.items():
            values.append(math.nan if numbers[name] is None else float(numbers[name]))

    def _numbers(self) -> dict[str, Any]:
        state = self._optimizer.state.get(self._parameter, {})
        return {name: _copy(value) for name, value in state.items()}


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _numbered(like: Any, number: float) -> Any:
    """Return `number` in the type of `like`; a tensor is filled in place."""
    return like.fill_(number) if isinstance(like, Tensor) else type(like)(number)


@lru_cache(maxsize=4)
def _series(spec: OptimizerSpec, rates: Rates, dtype: torch.dtype, device: torch.device) -> _Series:
    return _Series(spec, rates, dtype, device)
