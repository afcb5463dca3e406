"""The update by a class that the job names, any torch.optim.Optimizer that keeps its state per
parameter.

An object of the class is made anew for each update, gets one flat piece of a layer at a time as its
parameter, and finds in its state what the rows of the piece hold: so an update is a function of the
pieces and of the step, and whatever moves, saves or cuts rows need not know the class. Single
numbers that a class keeps beside rows, as a count of steps, follow from the number of the step.
`describe_optimizer` finds out, before the job, whether a class can be used so.
"""

import math
import sys
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from oobleck.core.job.code import Code
from oobleck.core.job.optimization import OptimizerSketch, OptimizerSpec
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError

if TYPE_CHECKING:
    from oobleck.worker.state.optimizer import Slice

#: Learning rate by step, from 1.
Rates = Callable[[int], float]


def load() -> bool:
    """Import what torch's optimizers need, which the first step of one does: 1.5 s and many
    modules; whether it was not there. It starts no thread."""
    new = "torch._dynamo" not in sys.modules
    torch.optim.SGD([nn.Parameter(torch.zeros(()))]).step()
    return new


def update(
    slices: "Iterable[Slice]", spec: OptimizerSpec, step: int, rates: Rates, taken: int
) -> None:
    """Take step `step` (from 1) of the job's class on all slices, in place. `taken`: the steps that
    these have taken before. Raises JobError if the class cannot do that."""
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
    piece: "Slice",
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
    if numbers:  # else it makes its state in its first step
        optimizer.state[parameter] = {
            name: held.get(name, value) for name, value in numbers.items()
        }
    _step(optimizer)
    after = optimizer.state[parameter]
    if set(after) != set(sketch.names):
        raise JobError(
            f"optimizer: {type(optimizer).__name__} keeps {', '.join(after)} of a parameter, and "
            f"kept {', '.join(sketch.names)} where the job was submitted; it must keep the same "
            "from its first step on"
        )
    with torch.no_grad():
        for name, view in held.items():
            _store(after[name], view)
        _store(parameter.data, weights)


def _step(optimizer: torch.optim.Optimizer) -> None:
    with code.running(f"optimizer: {type(optimizer).__name__}"):
        optimizer.step()


def _store(value: Tensor, view: Tensor) -> None:
    """Copy `value` into the view, where the class has put another tensor into the place of the one
    that it found."""
    if value.data_ptr() != view.data_ptr():
        view.copy_(value)


def make(spec: OptimizerSpec, parameters: list[Any]) -> torch.optim.Optimizer:
    """Make an object of the job's class for `parameters`, or groups of them. Raises JobError,
    NodeError."""
    made = code.call(_code(spec), "optimizer", parameters, lr=spec.lr)
    if isinstance(made, torch.optim.Optimizer):
        return made
    raise JobError(
        f"optimizer: {spec.label} makes {type(made).__name__}; name a class that extends "
        "torch.optim.Optimizer"
    )


def check(spec: OptimizerSpec) -> None:
    """Load the class, and check that it is the one that was looked at where the job was submitted.
    Raises NodeError, JobError."""
    if spec.code is None:
        return
    if not spec.described:
        raise JobError("optimizer: the class was not looked at; submit it with 'oobleck submit'")
    make(spec, [_dummy(torch.float32, torch.device("cpu"))])
    if code.fingerprint(spec.code) != spec.sketch.code:
        raise NodeError(
            f"optimizer: the code of {spec.label} on this node is not what it was where the job "
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
    """The single numbers that the class keeps of every parameter, by the number of the step.

    A parameter of one number yields them. If all are counters, it takes the first step only.
    Others, such as the product of NAdam's momenta, need every step, once in a process. All values
    are kept, since some parameters may have taken far fewer steps than others.
    """

    def __init__(
        self, spec: OptimizerSpec, rates: Rates, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sketch, self._rates = spec.sketch, rates
        #: Feeds are applied by a thread of their own.
        self._lock = threading.Lock()
        self._parameter = _dummy(dtype, device)
        self._optimizer = make(spec, [self._parameter])
        self._steps = 0
        #: The state of `_parameter` before its first step, and after it.
        self._begun = self._numbers()
        self._first: dict[str, Any] = {}
        #: The numbers of `sketch.series` after each step.
        self._series = {name: array("d") for name in self._sketch.series}

    def before(self, step: int) -> dict[str, Any]:
        """Return the entries of a parameter's state before `step`, rows too, whose values mean
        nothing; empty where there are none yet."""
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
