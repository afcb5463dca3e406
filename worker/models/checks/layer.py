"""Check of one layer of the user's, for faults that only real runs show.

The layer runs on two batches that share a row, the same sample. The result of that row must depend
on nothing but the row, the layer's weights and torch's seed. It must not depend on the other rows,
their number, or the row's place.

A gate that begins at zero, or a branch on numbers of the batch, can hide an influence at first. So
the layer runs with changed weights too, on the outputs of changed layers before it. There gradients
are compared as well: the shared row's part in those of the parameters, and that of its input. If
such a run raises or is not finite, the changed numbers are to blame and not the layer, so a smaller
change is tried. `check` chooses the layers and their inputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from oobleck.worker.models.checks.rows import (
    ANYWHERE,
    PER_ROW,
    Batches,
    close,
    crowded,
    finite,
    leaf,
    same,
    same_row,
    tolerance_of,
    unlike,
    with_same_row,
)
from oobleck.worker.models.checks.runs import LayerFailed, changed, kept, run
from oobleck.worker.models.tree import Tree, flatten, map_tensors, structure
from oobleck.worker.runtime.errors import Problem

#: Length of the noise added to a parameter; for a larger one it repeats. It is a prime, so that
#: rows of a matrix get different noise.
_NOISE = 65521
#: Size assumed for a parameter of zeros that is no matrix, such as a gate.
_GATE = 0.5
_NORM = ", as in batch norm; use a norm that works within a row (LayerNorm, GroupNorm)"
_BATCH_WIDE = (
    ", and all rows of it are the same: a number of the whole micro-batch, as an auxiliary loss "
    f"is. {PER_ROW}"
)
_GATED = (
    ", once training has changed the weights (others were tried), as behind a gate that begins at "
    "zero or a branch on numbers of the whole batch; compute each row from that row alone: a norm "
    "within a row (LayerNorm, GroupNorm), torch.where by row instead of if"
)
_BACK = (
    ", as where a row goes into others (cumsum over rows), or a hook or an autograd function of "
    "yours takes sums over rows; compute each row, and its gradient, from that row alone"
)
_KEEPS = (
    "and layers are built anew after a loss and a restart, and called in another order on other "
    "plans: what a layer gives must not depend on it; oobleck.model.step() is the number of the "
    "step"
)
_RANDOM = (
    "gives something else when it is run again with the same seed; draw what is random from "
    "torch's own generator (nn.Dropout, torch.rand), not from numpy, random or a generator of its "
    "own, and keep nothing from run to run"
)
_DRAWS = (
    "draws random numbers in evaluation too; draw only while self.training, as in F.dropout(x, p, "
    "self.training)"
)
#: Factors by which an output's gradient is scaled; all gradients of the layer must scale alike.
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
    #: True: compare gradients too, and runs in evaluation.
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
    """The results of a run, of which gradients are kept for the shared row alone."""

    output: Tree
    #: Gradients of the shared row's inputs, (1, ...) each.
    gradients: list[Tensor]
    #: The shared row's part of each parameter's gradient: the sum weighted by noise, and the size;
    #: NaN if not finite. None: there was no backward from the shared row alone.
    sums: dict[str, tuple[float, float]] | None


@dataclass(frozen=True, slots=True)
class _Found:
    #: The run that all others were compared with.
    one: _Pass
    output: Batches
    #: The sentence on what of the shared row changes with the others; empty: nothing.
    what: str


class LayerCheck:
    """The check of one layer in host memory: `run` first, with its initial weights, then `look`,
    which changes them for good."""

    def __init__(
        self, module: nn.Module, where: str, seed: int, *, draws: bool, steps: int, weighed: bool
    ) -> None:
        """Note the sizes of the trained parameters. `draws`: the layer draws from torch's generator
        in training; `steps`: of the job; `weighed`: gradients are divided by the batch's weight
        only after the backward."""
        self._module = module
        self._where = where
        self._seed = seed
        self._draws = draws
        self._steps = steps
        self._weighed = weighed
        trained = [p for p in module.parameters() if p.requires_grad and p.numel()]
        self._sizes = [(parameter, _size(parameter)) for parameter in trained]
        #: True: the layer has its initial weights, so that any failure is a problem.
        self._initial = True
        #: True: its output is finite with them.
        self._finite = True
        #: True: a forward leaves something in it that the next one finds.
        self.keeps = False
        #: Keys alone, in the order in which they were found.
        self._found: dict[Problem, None] = {}

    @property
    def problems(self) -> list[Problem]:
        return list(self._found)

    @property
    def refused(self) -> bool:
        """True if a problem is more than a warning."""
        return any(not problem.warning for problem in self._found)

    def run(self, given: Batches) -> Batches | None:
        """Run the layer with its initial weights, and return its output, the next layer's input.
        None: there is no usable output."""
        one = self._pass(given.one, 0, back="from all")
        before = kept(self._module)
        again = one and self._pass(given.one, 0, back="from all")
        if one is None or again is None:
            return None
        if finite(given.one) and not finite(one.output):
            self.say("gives numbers that are not finite with its initial weights", warning=True)
        if names := changed(before, kept(self._module)):
            self.keeps = True
            self.say(f"keeps something else after each forward ({names[0]}), {_KEEPS}", True)
        found = None
        if not same(one.output, again.output):
            self.say(_RANDOM)
        elif (found := self._rows(given, 1)) and found.what:
            self.say(found.what)
        self._evaluation(given, one.output, alike=found is not None and not found.what)
        if found is None:
            return None
        self._finite = finite(found.output.one) and finite(found.output.other)
        return found.output

    def _evaluation(self, given: Batches, trained: Tree, *, alike: bool) -> None:
        """Check runs in evaluation. `alike`: rows do not influence each other in training."""
        first = self._pass(given.one, 0, training=False)
        again = first and self._pass(given.one, 0, training=False, seed=self._seed + 1)
        if first is None or again is None:
            return
        if not same(first.output, again.output):
            self.say(_DRAWS)
        elif alike and (found := self._rows(given, 1, training=False)) and found.what:
            self.say(f"in evaluation {found.what}")
        if _form(trained) != _form(first.output):
            self.say("gives other types or shapes in evaluation than in training; give the same")

    def look(self, given: Batches, way: Way, *, data: bool) -> Batches | None:
        """Run the layer with changed weights; return the output (None: no usable one). `data`:
        `given` is the job's data, whose signs flip with those of the weights."""
        self._initial = False
        step = self._steps if way.last_step else 1
        for factor, noise in way.changes:
            self._change(factor, noise)
            x = _turned(given) if data and factor < 0 else given
            found = self._look(x, step, thorough=way.thorough)
            if found is None or (found.what and not self._steady(x, step)):
                self._change(factor, -noise if factor > 0 else noise)  # undo
                continue
            if not found.what:
                return found.output
            # Rounding may flip a choice, such as of an expert. It hardly does so with other noise.
            self._change(1.25, noise / 8, other=True)
            again = self._look(x, step, thorough=way.thorough)
            if again is not None and again.what:
                self.say(found.what)
            return None
        return None

    def _look(self, x: Batches, step: int, *, thorough: bool) -> _Found | None:
        """Return the comparison of both batches; None if a run fails or is not finite."""
        back = "from the row" if thorough else ""
        found = self._rows(x, step, back=back)
        if found is None or found.what or not thorough:
            return found
        # This run stands for the training of a layer that draws, so its gradients are compared too.
        back = back if self._draws else ""
        evaluated = self._rows(x, step, back=back, training=False)
        what = evaluated.what and f"in evaluation {evaluated.what}" if evaluated else ""
        if not what and self._weighed:
            what = self._differ_in_scale(x, found.one, step)
        return replace(found, what=what)

    def _rows(
        self, x: Batches, step: int, *, back: str = "", training: bool = True
    ) -> _Found | None:
        """Compare the shared row among other rows, alone, and at another place; None if a run fails
        or is not usable."""
        row = x.row
        one, other = (
            self._pass(batch, row, step=step, back=back, training=training)
            for batch in (x.one, x.other)
        )
        if one is None or other is None:
            return None
        if structure(one.output) != structure(other.output):
            if self._initial:
                self.say("row 0 changes with the other rows: it has another structure")
            return None
        if not self._initial and self._finite and not finite([one.output, other.output]):
            return None
        differences = self._differences(x, one, other, step, back=back, training=training)
        what = next(filter(None, differences), "")
        return _Found(one, with_same_row(one.output, other.output, row), what)

    def _differences(
        self, x: Batches, one: _Pass, other: _Pass, step: int, *, back: str, training: bool
    ) -> Iterator[str]:
        """Yield the result of each comparison: a sentence, or empty. Further runs are made only as
        the caller asks for more."""
        row = x.row
        yield self._differ(one, other, row)
        for crowd in _crowds(x) if not self._initial and (training or self._draws) else ():
            if (run := self._pass(crowd, row, step=step, training=training)) is not None:
                yield self._differ(one, run, row)
        if back:
            run = self._pass(x.other, row, step=step, back="from all", training=training)
            if run is not None:
                yield _differ_in_gradients(one, run, row, f"with the other rows{_BACK}")
        if not (self._draws and training):
            yield self._differ_elsewhere(x, one, step, back=back, training=training)

    def _differ_elsewhere(
        self, x: Batches, one: _Pass, step: int, *, back: str, training: bool
    ) -> str:
        """Return a sentence on what changes where the row is alone, or elsewhere among more rows;
        empty: nothing does."""
        row, alone = x.row, self._pass(x.alone(), 0, step=step, training=training)
        pairs = [] if alone is None else unlike(one.output, alone.output, exact=False, row=row)
        for found in pairs:
            where = f"row {row} of its output{found.path}"
            advice = f"; {ANYWHERE}" if self._initial else _GATED
            return f"{where} changes when it is alone ({found.seen}){advice}"
        if self._initial and self.keeps:
            return ""  # one more call might change the state
        more = self._pass(x.both(), x.later, step=step, back=back, training=training)
        if more is None:
            return ""
        for place in (row, x.later):
            for found in unlike(one.output, more.output, exact=False, row=row, there=place):
                where = f"row {row} of its output{found.path}"
                return f"{where} changes as row {place} of more rows ({found.seen}); {ANYWHERE}"
        return self._differ_in_back(one, more, row, f"as row {x.later} of more rows; {ANYWHERE}")

    def _differ(self, one: _Pass, other: _Pass, row: int) -> str:
        for found in unlike(one.output, other.output, exact=True, row=row):
            where = f"row {row} of its output{found.path}"
            advice = (_BATCH_WIDE if found.batch_wide else _NORM) if self._initial else _GATED
            return f"{where} changes with the other rows ({found.seen}){advice}"
        return self._differ_in_back(one, other, row, f"with the other rows{_BACK}")

    def _differ_in_scale(self, x: Batches, one: _Pass, step: int) -> str:
        """Return a sentence on gradients that do not scale with the output's gradient; empty: all
        do."""
        for scale in _SCALES:
            run = self._pass(x.one, x.row, step=step, back="from the row", scale=scale)
            if run is None or run.sums is None:
                continue
            sums = {name: (a / scale, b / scale) for name, (a, b) in run.sums.items()}
            unscaled = replace(run, gradients=[g / scale for g in run.gradients], sums=sums)
            if what := self._differ_in_back(one, unscaled, x.row, _SCALED):
                return what
        return ""

    def _differ_in_back(self, one: _Pass, other: _Pass, row: int, how: str) -> str:
        """Return a sentence on what differs in the backwards; empty where nothing does, or one has
        none."""
        if one.sums is None or other.sums is None:
            return ""
        if what := _differ_in_gradients(one, other, row, how):
            return what
        # A gradient that is only rounding noise, as of a key's bias, must not be compared by its
        # own size: use that of the largest.
        most = max((size for _, size in one.sums.values() if size == size), default=0.0)
        for name, parameter in self._module.named_parameters():
            total, size = one.sums.get(name, _NOTHING)
            there, size_there = other.sums.get(name, _NOTHING)
            scale = max(size, size_there, most * _FLOOR)
            if abs(total - there) > tolerance_of(parameter.dtype, exact=False) * scale:
                return f"what row {row} adds to the gradient of {name} changes {how}"
        return ""

    def _pass(
        self,
        x: Tree,
        row: int,
        *,
        step: int = 1,
        back: str = "",
        training: bool = True,
        scale: float = 1.0,
        seed: int | None = None,
    ) -> _Pass | None:
        """Run the layer; None if that fails. `back`: run a backward "from the row", "from all"
        rows, or none if empty, with gradients times `scale`."""
        shared, more = (torch.Generator(device="cpu").manual_seed(self._seed + n) for n in (0, 1))

        def gradient(root: Tensor) -> Tensor:
            made = _noise(root, more) if back == "from all" else torch.zeros_like(root)
            made[row : row + 1] = _noise(root[:1], shared)
            return made * scale

        try:
            ran = run(
                self._module,
                x,
                self._seed if seed is None else seed,
                step=step,
                training=training,
                gradient=gradient if back else None,
            )
        except LayerFailed as failed:
            if self._initial:
                self.say(str(failed))
            return None
        if self._initial:
            for wrong in ran.wrongs:
                self.say(wrong)
            if finite(ran.output) and not finite([*ran.taken, *ran.gradients.values()]):
                self.say("gives gradients that are not finite", warning=True)
        sums = {name: self._sum(gradient) for name, gradient in ran.gradients.items()}
        gradients = [gradient[row : row + 1].clone() for gradient in ran.taken]
        return _Pass(ran.output, gradients, sums if back == "from the row" else None)

    def _sum(self, gradient: Tensor) -> tuple[float, float]:
        draws = torch.Generator(device="cpu").manual_seed(self._seed)
        whole, rest, some = _cut(gradient.reshape(-1), draws)
        sums = [*(whole @ some).tolist(), (rest @ some[: len(rest)]).item()]
        # Factors by part reveal a gradient moved by a whole number of parts.
        total = sum(part * (1 + number % 7) for number, part in enumerate(sums))
        return total, gradient.norm().item()

    def _steady(self, x: Batches, step: int) -> bool:
        """Return whether rounding stays small in the layer. In a long recurrence it may grow until
        a row changes with the size of its batch."""
        one = self._pass(x.one, x.row, step=step)
        if self._sizes:
            self._change(1.0, torch.finfo(self._sizes[0][0].dtype).eps ** _NUDGE)
        nudged = self._pass(x.one, x.row, step=step)
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

    def say(self, sentence: str, warning: bool = False) -> None:
        """Note a problem; an empty sentence is none."""
        if sentence:
            self._found[Problem(where=self._where, sentence=sentence, warning=warning)] = None


def _form(tree: Tree) -> object:
    return structure(tree), [(tensor.dtype, tensor.shape) for tensor in flatten(tree)]


def _size(parameter: Tensor) -> float:
    """Return the root mean square of the numbers. If all are zero, return a size that leaves a
    matrix product's size unchanged, or `_GATE`."""
    found = parameter.detach().square().mean().sqrt().item()
    return found or (parameter[0].numel() ** -0.5 if parameter.dim() > 1 else _GATE)


def _crowds(x: Batches) -> Iterator[Tree]:
    if any(tensor.is_floating_point() for tensor in flatten(x.one)):
        yield from (crowded(x, sign) for sign in (1.0, -1.0))


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
