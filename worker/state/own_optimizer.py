"""Update by a class that the job names: any torch.optim.Optimizer with state per parameter.

A new object of the class is made for each update. It gets one flat piece of a layer at a time as
its parameter, and its state is set from the rows of the piece. So an update is a function of the
pieces and of the step, and the code that moves, saves or cuts rows need not know the class. Single
numbers that a class keeps beside rows, such as a step count, follow from the number of the step.
`describe_optimizer` decides before the job whether a class can be used this way.
"""

import math
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from oobleck.core.job.code import Code
from oobleck.core.job.optimization import OptimizerSketch, OptimizerSpec
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError
from oobleck.worker.state.slices import Slice

#: Learning rate by step, from 1.
Rates = Callable[[int], float]


def load() -> bool:
    """Import the modules that the first step of a torch optimizer needs.

    They take 1.5 s. It starts no thread. Return whether any was new.
    """
    new = "torch._dynamo" not in sys.modules
    torch.optim.SGD([nn.Parameter(torch.zeros(()))]).step()
    return new


def update(
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
