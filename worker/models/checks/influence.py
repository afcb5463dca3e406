"""Checks that rows do not influence each other with weights other than the initial ones.

A gate that begins at zero, or a branch on numbers of the batch, can hide an influence at first.
Each layer runs with changed weights, on the outputs of changed layers before it. With other rows
beside the shared row, that row's output is compared. In thorough ways its part in the gradients of
the parameters, and the gradient of its input, are compared too. If a run raises or is not finite, a
smaller change is tried: the numbers are to blame, not the layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from oobleck.model import at_step
from oobleck.worker.models.checks.check_layer import ANYWHERE
from oobleck.worker.models.checks.rows import (
    Batches,
    close,
    finite,
    leaf,
    same_row,
    tolerance_of,
    unlike,
    with_same_row,
)
from oobleck.worker.models.tree import Tree, flatten, map_tensors, structure
from oobleck.worker.runtime import code

#: Length of the noise added to a parameter; for a larger one it repeats. It is a prime, so that
#: rows of a matrix get different noise.
_NOISE = 65521
#: Factor on the numbers of other rows, so that they outweigh the shared row.
_CROWD = 3.0
#: Size assumed for a parameter of zeros that is no matrix, such as a gate.
_GATE = 0.5
_GATED = (
    ", once training has changed the weights (others were tried), as behind a gate that begins at "
    "zero or a branch on numbers of the whole batch; compute each row from that row alone: a norm "
    "within a row (LayerNorm, GroupNorm), torch.where by row instead of if"
)
_BACK = (
    ", as where a row goes into others (cumsum over rows), or a hook or an autograd function of "
    "yours takes sums over rows; compute each row, and its gradient, from that row alone"
)
#: Factors on a gradient that must be factors on what a backward makes of it.
_SCALES = 2.0**8, 2.0**-8
_SCALED = (
    "by another factor than the gradient of the output, as where a hook or an autograd function "
    "clamps it or takes its sign; the loss gives weights, and gradients are divided by the batch's "
    "weight only afterwards: give one number per row, or leave that out"
)
#: Noise slightly above rounding, as a power of the weights' precision.
_NUDGE = 0.85
#: Sum and size of a missing gradient; the share of the largest gradient that counts as zero.
_NOTHING = 0.0, 0.0
_FLOOR = 1e-3


@dataclass(frozen=True, slots=True)
class Way:
    """A change of all weights, and the comparisons made with it."""

    #: The row that both batches share; negative: counted from the end.
    row: int
    #: Pairs of a factor on each weight and noise relative to the parameter's size; the first pair
    #: with a usable result counts.
    changes: tuple[tuple[float, float], ...]
    #: True: run as the job's last step; False: as its first.
    last_step: bool
    #: True: also compare gradients, and the row computed alone.
    thorough: bool


#: The second way flips signs, so that both sides of a branch run.
WAYS = (
    Way(row=0, changes=((1.0, 0.5), (1.0, 0.1), (1.0, 0.01)), last_step=False, thorough=True),
    Way(
        row=-1,
        changes=((-1.0, 0.5), (-1.0, 0.05), (1.0, 0.1), (1.0, 0.01)),
        last_step=True,
        thorough=False,
    ),
)


@dataclass(frozen=True, slots=True)
class _Pass:
    """The results of a forward, and of a backward if one was asked for."""

    output: Tree
    #: Gradients of the shared row's inputs, (1, ...) each.
    gradients: list[Tensor]
    #: By parameter, the shared row's part of its gradient: the sum weighted by noise, and the size;
    #: NaN if not finite. None: there was no backward from the shared row alone.
    sums: dict[str, tuple[float, float]] | None


@dataclass(frozen=True, slots=True)
class _Found:
    #: The layer's output; None if rows influence each other.
    output: Batches | None
    #: The sentence on what of the shared row changes with the others; empty: nothing.
    what: str


class Influence:
    """The checks of one layer in host memory; they change its weights for good."""

    def __init__(
        self,
        module: nn.Module,
        seed: int,
        *,
        draws: bool,
        finite: bool,
        steps: int,
        weighed: bool,
    ) -> None:
        """Note the sizes of the trained parameters. `draws`: the layer draws from torch's
        generator; `finite`: its output is finite with its initial weights; `steps`: of the job;
        `weighed`: gradients are divided by the batch's weight only after the backward."""
        self._module = module
        self._seed = seed
        self._draws = draws
        self._finite = finite
        self._steps = steps
        self._weighed = weighed
        trained = [p for p in module.parameters() if p.requires_grad and p.numel()]
        self._sizes = [(parameter, _size(parameter)) for parameter in trained]

    def look(self, given: Batches, way: Way, *, data: bool) -> tuple[str, Batches | None]:
        """Return what changes with the other rows (empty: nothing) and the output with changed
        weights (None: no usable one). `data`: `given` is the job's data, whose signs flip with
        those of the weights."""
        step = self._steps if way.last_step else 1
        for factor, noise in way.changes:
            self._change(factor, noise)
            x = _turned(given) if data and factor < 0 else given
            found = self._look(x, step, thorough=way.thorough)
            if found is None or (found.what and not self._steady(x, step)):
                self._change(factor, -noise if factor > 0 else noise)  # undo
                continue
            if found.what:
                # Rounding may flip a choice, as of an expert, but hardly again with other noise.
                self._change(1.25, noise / 8, other=True)
                again = self._look(x, step, thorough=way.thorough)
                if again is None or not again.what:
                    return "", None
            return found.what, found.output
        return "", None

    def _steady(self, x: Batches, step: int) -> bool:
        """Return whether rounding stays small in the layer. In a long recurrence it may grow until
        a row changes with the size of its batch."""
        one = self._pass(x.one, x.row, step)
        if self._sizes:
            self._change(1.0, torch.finfo(self._sizes[0][0].dtype).eps ** _NUDGE)
        nudged = self._pass(x.one, x.row, step)
        return (
            one is not None
            and nudged is not None
            and same_row(one.output, nudged.output, exact=False, row=x.row)
        )

    @torch.no_grad()
    def _change(self, factor: float, noise: float, *, other: bool = False) -> None:
        """Multiply each trained parameter by `factor` and add noise."""
        draws = torch.Generator(device="cpu").manual_seed(self._seed + other)
        for parameter, size in self._sizes:
            parameter.mul_(factor)
            if parameter.is_contiguous():
                whole, rest, some = _cut(parameter.detach().view(-1), draws)
                whole.add_(some, alpha=noise * size)
                rest.add_(some[: len(rest)], alpha=noise * size)
            else:
                parameter.add_(_noise(parameter, draws), alpha=noise * size)

    def _look(self, x: Batches, step: int, *, thorough: bool) -> _Found | None:
        """Return the comparison of both batches; None if a run fails or is not finite."""
        row = x.row
        back = "from the row" if thorough else ""
        one, other = (self._pass(batch, row, step, back=back) for batch in (x.one, x.other))
        if one is None or other is None:
            return None
        if structure(one.output) != structure(other.output):
            return None
        if self._finite and not (finite(one.output) and finite(other.output)):
            return None
        what = self._differ(one, other, row)
        for crowd in _crowds(x):
            if not what and (run := self._pass(crowd, row, step)) is not None:
                what = self._differ(one, run, row)
        if thorough and not what:
            what = self._differ_thoroughly(x, one, step)
        if not self._draws and not what:
            run = self._pass(x.both(), x.later, step, back=back)
            what = self._differ_elsewhere(x, one, run)
        if thorough and not what:
            what = self._differ_in_evaluation(x, step)
        if thorough and not what and self._weighed:
            what = self._differ_in_scale(x, one, step)
        return _Found(None if what else with_same_row(one.output, other.output, row), what)

    def _differ_elsewhere(self, x: Batches, one: _Pass, run: _Pass | None) -> str:
        """Return what changes with place or number. `run`: of both batches as one."""
        if run is None:
            return ""
        for there in (x.row, x.later):
            for found in unlike(one.output, run.output, exact=False, row=x.row, there=there):
                where = f"row {x.row} of its output{found.path}"
                return f"{where} changes as row {there} of more rows ({found.seen}); {ANYWHERE}"
        how = f"as row {x.later} of more rows; {ANYWHERE}"
        return self._differ_in_back(one, run, x.row, how)

    def _differ_in_evaluation(self, x: Batches, step: int) -> str:
        """Return what changes in evaluation. It stands for the training of a layer that draws, so
        gradients are compared too there."""
        row, back = x.row, "from the row" if self._draws else ""
        one, other = (
            self._pass(batch, row, step, back=back, training=False) for batch in (x.one, x.other)
        )
        if one is None or other is None:
            return ""
        if not (what := self._differ(one, other, row)):
            run = self._pass(x.both(), x.later, step, back=back, training=False)
            what = self._differ_elsewhere(x, one, run)
        if not what and (run := self._pass(x.alone(), 0, step, training=False)) is not None:
            what = _differ_alone(one, run, row)
        return what and f"in evaluation {what}"

    def _differ_in_scale(self, x: Batches, one: _Pass, step: int) -> str:
        """Return what does not grow with the gradient of the output."""
        for scale in _SCALES:
            run = self._pass(x.one, x.row, step, back="from the row", scale=scale)
            if run is None or run.sums is None:
                continue
            sums = {name: (a / scale, b / scale) for name, (a, b) in run.sums.items()}
            unscaled = replace(run, gradients=[g / scale for g in run.gradients], sums=sums)
            if what := self._differ_in_back(one, unscaled, x.row, _SCALED):
                return what
        return ""

    def _differ(self, one: _Pass, other: _Pass, row: int) -> str:
        if structure(one.output) != structure(other.output):
            return f"row {row} has another structure with other rows{_GATED}"
        for found in unlike(one.output, other.output, exact=True, row=row):
            where = f"row {row} of its output{found.path}"
            return f"{where} changes with the other rows ({found.seen}){_GATED}"
        return self._differ_in_back(one, other, row, f"with the other rows{_BACK}")

    def _differ_in_back(self, one: _Pass, other: _Pass, row: int, how: str) -> str:
        """Return what of the backwards differs; empty where one has none."""
        if one.sums is None or other.sums is None:
            return ""
        if what := _differ_in_gradients(one, other, row, how):
            return what
        # A gradient of rounding alone, as of a key's bias, is measured by the others' size.
        most = max((size for _, size in one.sums.values() if size == size), default=0.0)
        for name, parameter in self._module.named_parameters():
            total, size = one.sums.get(name, _NOTHING)
            there, size_there = other.sums.get(name, _NOTHING)
            scale = max(size, size_there, most * _FLOOR)
            if abs(total - there) > tolerance_of(parameter.dtype, exact=False) * scale:
                what = f"what row {row} adds to the gradient of {name}"
                return f"{what} changes {how}"
        return ""

    def _differ_thoroughly(self, x: Batches, one: _Pass, step: int) -> str:
        """Return what changes with the gradients of other rows, or without other rows."""
        row = x.row
        if (run := self._pass(x.other, row, step, back="from all")) is not None and (
            what := _differ_in_gradients(one, run, row, f"with the other rows{_BACK}")
        ):
            return what
        if not self._draws and (run := self._pass(x.alone(), 0, step)) is not None:
            return _differ_alone(one, run, row)
        return ""

    def _pass(
        self,
        x: Tree,
        row: int,
        step: int,
        *,
        back: str = "",
        training: bool = True,
        scale: float = 1.0,
    ) -> _Pass | None:
        """Run the layer; None if that fails. `back`: run a backward "from the row", "from all"
        rows, or none if empty, with gradients times `scale`."""
        given = map_tensors(lambda tensor: leaf(tensor.clone(), tensor.requires_grad), x)
        constants = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        self._module.train(training)
        torch.manual_seed(self._seed)
        try:
            with code.running("model"):
                with at_step(step):
                    output: Tree = self._module(given)
                if back:
                    self._backward(output, row, others=back == "from all", scale=scale)
            found = _Pass(
                map_tensors(lambda tensor: leaf(tensor, tensor.requires_grad), output),
                [t.grad[row : row + 1].clone() for t in flatten(given) if t.grad is not None],
                dict(self._sums()) if back == "from the row" else None,
            )
        except Exception:  # noqa: BLE001  # training may never give such numbers
            return None
        finally:
            self._module.zero_grad(set_to_none=True)
            with torch.no_grad():
                for buffer, before in constants:
                    buffer.copy_(before)
        return found

    def _backward(self, output: Tree, row: int, *, others: bool, scale: float) -> None:
        roots = [tensor for tensor in flatten(output) if tensor.requires_grad]
        shared, more = (torch.Generator(device="cpu").manual_seed(self._seed + n) for n in (0, 1))
        gradients = []
        for root in roots:
            gradient = _noise(root, more) if others else torch.zeros_like(root)
            gradient[row : row + 1] = _noise(root[:1], shared)
            gradients.append(gradient * scale)
        if roots:
            torch.autograd.backward(roots, gradients)

    def _sums(self) -> Iterator[tuple[str, tuple[float, float]]]:
        for name, parameter in self._module.named_parameters():
            if (gradient := parameter.grad) is not None:
                draws = torch.Generator(device="cpu").manual_seed(self._seed)
                whole, rest, some = _cut(gradient.reshape(-1), draws)
                sums = [*(whole @ some).tolist(), (rest @ some[: len(rest)]).item()]
                # Factors by part reveal a gradient moved by a whole number of parts.
                total = sum(part * (1 + number % 7) for number, part in enumerate(sums))
                yield name, (total, gradient.norm().item())


def _size(parameter: Tensor) -> float:
    """Return the root mean square of the numbers. If all are zero, return a size that leaves a
    matrix product's size unchanged, or `_GATE`."""
    found = parameter.detach().square().mean().sqrt().item()
    return found or (parameter[0].numel() ** -0.5 if parameter.dim() > 1 else _GATE)


def crowded(x: Batches, sign: float) -> Tree:
    """Return the first batch with large numbers of that sign in the other rows."""

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        large = sign * _CROWD * tensor.detach().abs()
        large[x.row] = tensor.detach()[x.row]
        return leaf(large, tensor.requires_grad)

    return map_tensors(fill, x.one)


def _crowds(x: Batches) -> Iterator[Tree]:
    if any(tensor.is_floating_point() for tensor in flatten(x.one)):
        yield from (crowded(x, sign) for sign in (1.0, -1.0))


def _differ_alone(one: _Pass, run: _Pass, row: int) -> str:
    for found in unlike(one.output, run.output, exact=False, row=row):
        where = f"row {row} of its output{found.path}"
        return f"{where} changes when it is alone ({found.seen}){_GATED}"
    return ""


def _differ_in_gradients(one: _Pass, other: _Pass, row: int, how: str) -> str:
    for a, b in zip(one.gradients, other.gradients, strict=False):
        if finite(a) and finite(b) and not close(a, b, exact=False):
            return f"the gradient of row {row}'s input changes {how}"
    return ""


def _turned(x: Batches) -> Batches:
    """Return the batches with the signs of floats flipped."""

    def turn(tensor: Tensor) -> Tensor:
        return leaf(-tensor, tensor.requires_grad) if tensor.is_floating_point() else tensor

    return Batches(map_tensors(turn, x.one), map_tensors(turn, x.other), x.row)


def _cut(numbers: Tensor, draws: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of `numbers` (n,) as rows of the noise's length and a rest, and the noise."""
    some = _noise(numbers[:_NOISE], draws)
    count = len(numbers) // max(1, len(some))
    whole = numbers[: count * len(some)].view(count, len(some))
    return whole, numbers[count * len(some) :], some


def _noise(like: Tensor, draws: torch.Generator) -> Tensor:
    """Return numbers from 0.5 to 1.5 of either sign, in the shape of `like`. None is near zero, so
    that every gate opens."""
    some = 2 * torch.rand(like.shape, generator=draws, dtype=like.dtype, device="cpu") - 1
    return some + some.sign() / 2
