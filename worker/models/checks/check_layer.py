"""Check of one layer of the user's, for what only real runs show.

It is run on two batches whose first row is the same sample: what becomes of that row must depend on
nothing but the row, the layer's weights and torch's seed. Owns the runs and what is wrong with
them. Which layers are looked at, and on what, is `check`'s.
"""

import random
from collections.abc import Iterator
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from oobleck.core.units import count
from oobleck.model import at_step
from oobleck.worker.models.checks.kept import changed, kept
from oobleck.worker.models.checks.rows import (
    Batches,
    Unlike,
    finite,
    leaf,
    same,
    same_row,
    unlike,
    with_same_row,
)
from oobleck.worker.models.tree import Tree, flatten, map_tensors, structure
from oobleck.worker.runtime import code
from oobleck.worker.runtime.problem import Problem


class LayerCheck:
    """Check of one layer, in host memory with its initial weights."""

    def __init__(self, module: nn.Module, where: str, seed: int) -> None:
        self._module = module
        self._where = where
        self._seed = seed
        #: Whether a forward leaves something in it that the next one finds.
        self.keeps = False
        #: Keys alone, in the order in which they were found.
        self._found: dict[Problem, None] = {}

    @property
    def problems(self) -> list[Problem]:
        return list(self._found)

    def run(self, given: Batches, *, draws: bool) -> Batches | None:
        """Run the layer; return its output, for the next one to be run on, or None where it gives
        nothing. `draws`: whether it takes from torch's generator in training."""
        one = self._trained(given.one)
        if one is None:
            return None
        if finite(given.one) and not finite(one):
            self._say("gives numbers that are not finite with its initial weights", warning=True)
        other = self._rows(given, one, draws=draws)
        alike = other is not None and same_row(one, other, exact=True)
        self._evaluation(given, one, alike=alike)
        return None if other is None else with_same_row(one, other)

    def _rows(self, given: Batches, one: Tree, *, draws: bool) -> Tree | None:
        """Check that a row depends on itself alone; return what the layer gives for the other
        batch."""
        before = kept(self._module)
        again = self._trained(given.one)
        if again is not None and (names := changed(before, kept(self._module))):
            self.keeps = True
            self._say(
                f"keeps something else after each forward ({names[0]}), and layers are built anew "
                "after a loss and a restart, and called in another order on other plans: what a "
                "layer gives must not depend on it; oobleck.model.step() is the number of the step",
                warning=True,
            )
        other = self._trained(given.other)
        if again is None or other is None:
            return None
        if not same(one, again):
            self._say(
                "gives something else when it is run again with the same seed; draw what is random "
                "from torch's own generator (nn.Dropout, torch.rand), not from numpy, random or a "
                "generator of its own, and keep nothing from run to run"
            )
        elif not same_row(one, other, exact=True):
            self._say(_influenced(next(unlike(one, other, exact=True), None)))
        elif not draws:
            self._elsewhere(given, one, "", training=True)
        return other

    def _elsewhere(self, given: Batches, one: Tree, how: str, *, training: bool) -> None:
        """Compare the shared row with that of other numbers of rows, and at another place. `how`:
        begins a sentence on a difference."""
        single = self._run(given.alone(), self._seed, training=training)
        if single is not None and not same_row(one, single, exact=False):
            self._say(
                f"{how}row 0 changes when it is alone; what becomes of a row must not depend on "
                "how many there are"
            )
            return
        if self.keeps:
            return  # one more call might change it; `Influence` compares the place too
        more = self._run(given.both(), self._seed, training=training)
        for there in (0, given.later):
            if more is not None and not same_row(one, more, exact=False, there=there):
                self._say(f"{how}row 0 changes as row {there} of more rows; {ANYWHERE}")
                return

    def _evaluation(self, given: Batches, trained: Tree, *, alike: bool) -> None:
        """Check runs in evaluation. `alike`: rows do not influence each other in training."""
        first, again = (self._run(given.one, self._seed + n, training=False) for n in (0, 1))
        if first is None or again is None:
            return
        other = self._run(given.other, self._seed, training=False)
        if not same(first, again):
            self._say(
                "draws random numbers in evaluation too; draw only while self.training, as in "
                "F.dropout(x, p, self.training)"
            )
        elif alike and other is not None and not same_row(first, other, exact=True):
            found = next(unlike(first, other, exact=True), None)
            self._say(f"in evaluation {_influenced(found)}")
        elif alike and not self.keeps and not any(not problem.warning for problem in self._found):
            self._elsewhere(given, first, "in evaluation ", training=False)
        forms = [(structure(t), [(x.dtype, x.shape) for x in flatten(t)]) for t in (trained, first)]
        if forms[0] != forms[1]:
            self._say("gives other types or shapes in evaluation than in training; give the same")

    def _trained(self, x: Tree) -> Tree | None:
        return self._run(x, self._seed, training=True)

    def _run(self, x: Tree, seed: int, *, training: bool) -> Tree | None:
        """Run the layer once, with its backward in training; return None where it fails."""
        given = map_tensors(lambda tensor: leaf(tensor.clone(), tensor.requires_grad), x)
        parts = [(name, tensor, tensor._version) for name, tensor in _own(self._module)]
        buffers = [(b, b.clone()) for b in self._module.buffers()]
        draws = _foreign_draws()
        self._module.train(training)
        torch.manual_seed(seed)
        try:
            with torch.set_grad_enabled(training), at_step(1), code.running(self._where):
                output: Tree = self._module(given)
            if training:
                self._backward(given, output)
        except Exception as error:  # noqa: BLE001  # a user's layer may raise anything
            rows = count(len(flatten(x)[0]), "row")
            how = "" if training else " in evaluation"
            self._say(f"fails{how} on {rows} of the data: {code.described(error)}")
            return None
        if draws != _foreign_draws():
            self._say(
                "draws from numpy's or random's generator; draw from torch's own (nn.Dropout, "
                "torch.rand), which is seeded by step and sample"
            )
        self._unchanged(parts)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        self._module.zero_grad(set_to_none=True)
        return map_tensors(lambda tensor: leaf(tensor, tensor.requires_grad), output)

    def _backward(self, given: Tree, output: Tree) -> None:
        if any(parameter.grad is not None for parameter in self._module.parameters()):
            self._say(
                "adds to its parameters' gradients in forward, once for each micro-batch; take a "
                "gradient by torch.autograd.grad, or add what you differentiate to the loss"
            )
        roots = [tensor for tensor in flatten(output) if tensor.requires_grad]
        if not roots:
            return
        try:
            with code.running(f"the backward of {self._where}"):
                torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        except Exception as error:  # noqa: BLE001  # a user's layer may raise anything
            self._say(f"its backward fails: {code.described(error)}")
            return
        wanted = chain(flatten(given), self._module.parameters())
        gradients: list[Tree] = [tensor.grad for tensor in wanted if tensor.grad is not None]
        if finite(output) and not finite(gradients):
            self._say("gives gradients that are not finite", warning=True)

    def _unchanged(self, before: list[tuple[str, Tensor, int]]) -> None:
        now = dict(_own(self._module))
        for name, tensor, version in before:
            if now.get(name) is not tensor or tensor._version != version:
                self._say(
                    f"changes its {name} in forward; what is no trained parameter is a constant "
                    "of the job, so compute it anew or pass it on"
                )

    def _say(self, sentence: str, *, warning: bool = False) -> None:
        self._found[Problem(where=self._where, sentence=sentence, warning=warning)] = None


def _influenced(found: Unlike | None) -> str:
    """Return the error for a shared row that changes with the others. None: its structure does."""
    if found is None:
        return "row 0 changes with the other rows: it has another structure"
    if found.batch_wide:
        return (
            f"row 0 of its output{found.path} changes with the other rows ({found.seen}), and all "
            "rows of it are the same: a number of the whole micro-batch, as an auxiliary loss is. "
            f"{PER_ROW}"
        )
    return (
        "row 0 changes with the other rows, as in batch norm; use a norm that works within a row "
        f"(LayerNorm, GroupNorm). In its output{found.path}, {found.seen}"
    )


#: Advice where a row's place or the number of rows matters.
ANYWHERE = (
    "workers that share a stage compute some rows each, so what becomes of a row must not depend "
    "on its place in the batch, nor on how many rows there are; compute it from that row alone, "
    "without len(x) or numbers by row"
)
#: Advice for a loss that is computed over a batch.
PER_ROW = (
    "Which rows are computed together differs from plan to plan, so compute it for each row alone: "
    "over the row's own tokens, p.mean(1) instead of p.mean(0) or p.mean(), one number per row; "
    "training takes the mean over all rows"
)


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _foreign_draws() -> tuple[object, ...]:
    """Another one after a draw from a generator that is not torch's."""
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), keys.tobytes() if isinstance(keys, np.ndarray) else keys, position
