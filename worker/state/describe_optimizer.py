"""Description of a user's optimizer: its state between steps, and whether it can be used.

Its class takes a few steps on two small parameters, and again on flat pieces of them, as workers
update layers. A class is refused, with the reason, unless its update is elementwise, because layers
are cut anywhere between workers. Its state must be tensors of its parameters' shapes, and single
numbers that do not depend on the gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from oobleck.core.codec import encode
from oobleck.core.job.code import Json
from oobleck.core.job.optimization import OptimizerSketch, OptimizerSpec, ScheduleSpec, StateRow
from oobleck.core.job.spec import TrainingSpec
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.state.optimizer import Slice, make, rates_of, update

#: More than the period of actions that some classes take every few steps.
_STEPS = 12
_SHAPES = ((3, 5), (4,))
#: Positions at which the flat parameters are cut.
_CUTS = (7, 1)
#: Tolerance for rounding, which depends on the position in a tensor.
_TOLERANCE = 1e-11


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Run of steps on whole parameters, as in a plain torch loop."""

    weights: Sequence[Tensor]
    #: State of each parameter, after the first step and after the last one.
    first: Sequence[dict[str, Any]]
    last: Sequence[dict[str, Any]]


def describe(training: TrainingSpec) -> Json:
    """Return the sketch of the job's class. Raise JobError with the reason, or NodeError."""
    spec = training.optimizer
    assert spec.code is not None, "it is the job's own"
    #: The real schedule may end at 0, which would hide differences.
    tried = replace(
        training, steps=_STEPS, schedule=ScheduleSpec(), optimizer=replace(spec, lr=spec.lr or 1e-3)
    )
    check = _Check(spec, tried)
    run = check.whole_run()
    first, last = run.first[0], run.last[0]
    tensors = [name for name, value in first.items() if _is_tensor(value)]
    numbers = [name for name in first if name not in tensors]
    counters = tuple(name for name in numbers if _counts(first[name], last[name]))
    changing = [n for n in numbers if n not in counters and _differ(first[n], last[n])]
    rate = rates_of(training)(1)
    sketch = OptimizerSketch(
        rows=tuple(
            StateRow(name=n, initial=check.initial(n, rate), single=n in changing)
            for n in (*tensors, *changing)
        ),
        counters=counters,
        constants=tuple(n for n in numbers if n not in counters and n not in changing),
        code=code.fingerprint(spec.code),
    )
    described = Json(encode(sketch).decode())
    check.pieces(run, replace(tried, optimizer=replace(tried.optimizer, described=described)))
    return described


@dataclass(frozen=True, slots=True)
class _Check:
    spec: OptimizerSpec
    training: TrainingSpec

    def whole_run(self) -> _Run:
        """Run the optimizer's steps twice on the same numbers and once on others.

        Refuse the class if the same numbers give different weights, or if its own numbers depend on
        the gradients.
        """
        run, again, other = (self._steps(source) for source in (0, 0, 1))
        if any(map(_differ, run.weights, again.weights)):
            self._refuse(
                "gives different weights when it is run again; it must not draw random numbers"
            )
        for name in (n for n, value in run.first[0].items() if not _is_tensor(value)):
            found = [state.get(name) for one in (run, other) for state in one.last]
            if any(_differ(found[0], value) for value in found[1:]):
                self._refuse(
                    f"keeps {name}, a number that depends on the gradients; pieces of a parameter "
                    "that is cut over workers would have different ones"
                )
        return run

    def initial(self, name: str, rate: float) -> float:
        """Return the value of a row before the first update.

        It is found by one update with zero gradients on zero weights.
        """
        parameter = nn.Parameter(torch.zeros(_SHAPES[0], dtype=torch.float64))
        optimizer = make(self.spec, [parameter])
        optimizer.param_groups[0]["lr"] = rate
        parameter.grad = torch.zeros_like(parameter)
        self._step(optimizer, "whose gradients are 0")
        kept: Any = torch.as_tensor(optimizer.state[parameter][name])
        found = kept.unique()
        if found.numel() != 1 or not found.isfinite().all():
            self._refuse(f"begins with different numbers in {name}; they must be one number")
        return float(found)

    def pieces(self, run: _Run, training: TrainingSpec) -> None:
        """Run the same steps on flat pieces, whole and cut; refuse the class if results differ."""
        if any(map(_differ, run.weights, self._flat_steps(training, cut=False))):
            self._refuse(
                "updates a flat parameter differently, or keeps more from step to step "
                "than the state of each parameter"
            )
        if any(map(_differ, run.weights, self._flat_steps(training, cut=True))):
            self._refuse(
                "does not update each number by itself: a norm or a mean over a parameter would "
                "differ if the parameter is cut over workers"
            )

    def _steps(self, source: int) -> _Run:
        parameters = [nn.Parameter(weights) for weights in _drawn(source, 0)]
        groups: list[dict[str, Any]] = [{"params": [one]} for one in parameters]
        for group, decayed in zip(groups, (True, False), strict=True):
            group["weight_decay"] = self.spec.weight_decay if decayed else 0.0
        optimizer = make(self.spec, groups)
        if self.spec.weight_decay and "weight_decay" not in optimizer.defaults:
            self._refuse("takes no weight_decay; leave that out")
        first: list[dict[str, Any]] = []
        for step in range(1, _STEPS + 1):
            gradients = _drawn(source, step)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            self._step(optimizer)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if parameter.grad is None or _differ(parameter.grad, gradient):
                    self._refuse(
                        "writes into its parameters' gradients; have it make new tensors, as in "
                        "grad = grad.add(p, alpha=decay)"
                    )
            if step == 1:
                first = [self._state(optimizer, one) for one in parameters]
        last = [self._state(optimizer, one) for one in parameters]
        if any(one.keys() != first[0].keys() for one in (*first, *last)):
            self._refuse("must keep the same state of each parameter from its first step on")
        return _Run(weights=[one.detach() for one in parameters], first=first, last=last)

    def _state(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
        """Return a copy of its state of `parameter`; refuse state of other kinds."""
        found = {}
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor) and value.dim():
                shape, wanted = list(value.shape), list(parameter.shape)
                if shape != wanted:
                    self._refuse(
                        f"keeps {name} of shape {shape} of a parameter of shape {wanted}; it must "
                        "be of the parameter's shape, since state is cut as its parameter is"
                    )
                if value.dtype != parameter.dtype:
                    self._refuse(
                        f"keeps {name} as {value.dtype}; it must have its parameter's type"
                    )
            elif not (value is None or isinstance(value, Tensor | bool | int | float)):
                self._refuse(
                    f"keeps {name}, a {type(value).__name__}; only tensors of a parameter's shape "
                    "and single numbers can be moved and saved"
                )
            found[name] = value.clone() if isinstance(value, Tensor) else value
        return found

    def _flat_steps(self, training: TrainingSpec, *, cut: bool) -> Iterator[Tensor]:
        """Yield each parameter's weights after the same steps on flat pieces."""
        spec, shapes = training.optimizer, _SHAPES
        stored = []
        for weights in _drawn(0, 0):
            initial = [torch.full_like(weights.flatten(), value) for value in spec.initial]
            stored.append(torch.stack([weights.flatten(), *initial]))
        for step in range(1, _STEPS + 1):
            with self._stepping():
                update(_slices(stored, _drawn(0, step), cut=cut), training, step)
        return (one[0].view(shape) for one, shape in zip(stored, shapes, strict=True))

    def _step(self, optimizer: torch.optim.Optimizer, which: str = "") -> None:
        with self._stepping(which):
            optimizer.step()

    def _stepping(self, which: str = "") -> code.running:
        how = f" failed in a step{which and f' {which}'}"
        return code.running(f"optimizer: {self.spec.label}", how)

    def _refuse(self, why: str) -> NoReturn:
        raise JobError(f"optimizer: {self.spec.label} cannot be used: it {why}")


def _slices(stored: Sequence[Tensor], gradients: Sequence[Tensor], *, cut: bool) -> Iterator[Slice]:
    for number, (storage, gradient) in enumerate(zip(stored, gradients, strict=True)):
        cuts = (0, _CUTS[number], gradient.numel()) if cut else (0, gradient.numel())
        for start, stop in pairwise(cuts):
            yield Slice(
                storage=storage[:, start:stop],
                gradient=gradient.flatten()[start:stop],
                decayed=number == 0,
            )


def _drawn(source: int, step: int) -> list[Tensor]:
    """Draw weights (step 0) or gradients of the two parameters."""
    draws = torch.Generator().manual_seed(1000 * source + step)
    return [torch.randn(shape, dtype=torch.float64, generator=draws) for shape in _SHAPES]


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _counts(first: Any, last: Any) -> bool:
    """Return whether a number was 1 after the first step, and the steps' number after the last."""
    flag = first is None or isinstance(first, bool)
    return not flag and float(first) == 1 and float(last) == _STEPS


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
    return bool(one != other)
