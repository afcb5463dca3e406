"""Checks of a user's model that need real runs: small batches in host memory.

One layer of each kind runs, alone in memory. Layers of a kind have the same shapes, so one's output
stands for another's. Owns the checks of a whole model, its loss and its metrics; `check_layer` owns
those of a single layer.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from oobleck.model import at_step
from oobleck.planner.job.description import TreeSketch
from oobleck.planner.job.own import OwnModelSpec
from oobleck.worker.models import own
from oobleck.worker.models.checks.check_layer import PER_ROW, LayerCheck
from oobleck.worker.models.checks.influence import WAYS, Influence, crowded
from oobleck.worker.models.checks.kept import changed, kept
from oobleck.worker.models.checks.loss import look_at_loss
from oobleck.worker.models.checks.placement import misplaced
from oobleck.worker.models.checks.rows import (
    Batches,
    close,
    finite,
    leaf,
    same_row,
    unlike,
    with_same_row,
)
from oobleck.worker.models.linear import split_linear
from oobleck.worker.models.tree import Tree, flatten, map_tensors, shown, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.problem import Problem, as_problem

#: Rows per batch. The description has shown that layers take any number.
ROWS = 3
#: Samples that a check needs: its two batches share one.
SAMPLES = 2 * ROWS - 1


def check(
    spec: OwnModelSpec, samples: tuple[Any, Any], *, seed: int, dtype: torch.dtype, steps: int
) -> list[Problem]:
    """Return problems of a described model. `samples`: inputs and targets, `SAMPLES` rows each;
    `seed`, `dtype`: of the weights; `steps`: of the job."""
    try:
        found = _unbuildable(spec)
        if not any(kind.parameters for kind in spec.description.kinds):
            sentence = "no layer has a parameter that is trained; leave requires_grad at True"
            found.append(Problem(where="model", sentence=sentence))
        if found:
            return found  # the runs would not compute the intended model
        with torch.random.fork_rng(devices=[]):
            return _Check(spec, samples, seed, dtype, steps).run()
    except JobError as error:
        return [as_problem(error)]


def _batches(rows: Tree, row: int = 0) -> Batches:
    """Return the samples as two batches that share `row`."""
    one = map_tensors(lambda tensor: tensor[:ROWS], rows)
    # `row` of the other batch is replaced.
    return with_same_row(one, map_tensors(lambda tensor: tensor[ROWS - 1 :], rows), row)


class _Check:
    """The runs of one model: with its initial weights, and changed in each of `WAYS`."""

    def __init__(
        self,
        spec: OwnModelSpec,
        samples: tuple[Any, Any],
        seed: int,
        dtype: torch.dtype,
        steps: int,
    ) -> None:
        self._spec = spec
        self._inputs, self._targets = samples
        self._seed = seed
        self._dtype = dtype
        self._steps = steps
        self._found: list[Problem] = []
        #: Outputs by kind with the initial weights, and by (kind, way) with changed ones. A pair is
        #: missing if no change gave a usable output.
        self._outputs: dict[int, Batches] = {}
        self._changed: dict[tuple[int, int], Batches] = {}

    def run(self) -> list[Problem]:
        spec = self._spec
        for layer in spec.examples:
            if not self._run_layer(layer):
                return self._found
        kind = spec.order[-1]
        output, targets = self._outputs[kind], _batches(self._targets)
        problems = _loss(spec, output, targets)
        with at_step(1):
            problems += look_at_loss(spec, output.one, targets.one)
        if not any(not problem.warning for problem in problems):
            outputs = [(output, 1)]
            outputs += [
                (self._changed.get((kind, number), output), self._steps if way.last_step else 1)
                for number, way in enumerate(WAYS)
            ]
            for x, step in outputs:
                sides = x, _batches(self._targets, x.row)
                if influence := _influence_in_loss(spec, *sides, step):
                    problems.append(influence)
                    break
        return self._found + problems + _metrics(spec, output, targets)

    def _run_layer(self, layer: int) -> bool:
        """Check a layer. Returns whether the next one can run on its output."""
        spec = self._spec
        module = own.in_precision(own.build_real(spec, self._seed, layer), self._dtype)
        split_linear(module)  # as a worker does
        where, kind = _named(layer, module), spec.order[layer]
        if any(tensor.is_meta for tensor in (*module.parameters(), *own.constants(module))):
            self._found.append(_without_numbers(where))
            return False
        below = spec.order[layer - 1] if layer else None
        given = _batches(self._inputs) if below is None else self._outputs[below]
        looked_at, known = LayerCheck(module, where, self._seed), spec.description.layers[layer]
        output = looked_at.run(given, draws=known.draws)
        self._found += looked_at.problems
        if output is None:
            return False
        if problem := _unlike(where, output.one, known.output):
            self._found.append(problem)
            return False
        self._outputs[kind] = output
        if all(other.warning for other in looked_at.problems):
            self._found += misplaced(
                module,
                given.one,
                spec,
                layer,
                seed=self._seed,
                dtype=self._dtype,
                where=where,
            )
            influence = Influence(
                module,
                self._seed,
                draws=known.draws,
                finite=finite(output.one) and finite(output.other),
                steps=self._steps,
            )
            self._look_for_influence(influence, where, below, kind)
        return True

    def _look_for_influence(
        self, influence: Influence, where: str, below: int | None, kind: int
    ) -> None:
        for number, way in enumerate(WAYS):
            if below is None:
                given = _batches(self._inputs, way.row % ROWS)
            else:
                given = self._changed.get((below, number), self._outputs[below])
            what, output = influence.look(given, way, data=below is None)
            if what:
                self._found.append(Problem(where=where, sentence=what))
                return
            if output is not None:
                self._changed[kind, number] = output


def _unlike(where: str, output: Tree, known: TreeSketch) -> Problem | None:
    """Return a problem if the output for data has another form than for made-up numbers."""
    made = (
        torch.empty((ROWS, *t.shape), dtype=getattr(torch, t.dtype), device="meta")
        for t in known.tensors
    )
    expected = shown(unflatten(known.structure, made))
    if shown(output) == expected:
        return None
    sentence = (
        f"gives {shown(output)} for rows of the data, and {expected} for made-up ones; what a "
        "layer gives must not depend on the numbers it takes"
    )
    return Problem(where=where, sentence=sentence)


def _named(layer: int, module: nn.Module) -> str:
    return f"layer {layer} ({type(module).__name__})"


def _without_numbers(where: str) -> Problem:
    sentence = (
        "has a tensor that was made before the layer was, when shapes alone are computed; make "
        "it where the layer is made"
    )
    return Problem(where=where, sentence=sentence)


def _unbuildable(spec: OwnModelSpec) -> list[Problem]:
    """Return problems of parameters that two layers, or two calls of a builder, have in common."""
    whole = own.built_whole(spec)
    if whole is not None:
        return list(_shared(spec, whole))
    layers = own.builders(spec)
    with torch.device("meta"), own.without_draws():
        modules, again = ([own.build(spec, n) for n in range(len(layers))] for _ in range(2))
    twice = [
        Problem(where=_named(layer, one), sentence=_TWICE)
        for layer, (one, other) in enumerate(zip(modules, again, strict=True))
        if one is other or _ids(one) & _ids(other)
    ]
    return twice or list(_shared(spec, modules))


_TWICE = (
    "is built from parameters that were there before; what builds a layer must build a new module "
    "at each call, as partial(Block, width) does"
)


def _ids(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}


def _shared(spec: OwnModelSpec, modules: list[nn.Module]) -> Iterator[Problem]:
    """Yield a problem for each pair of layers with a common parameter that `tied` lacks."""
    #: Parameters by their memory, which `data` can make two parameters share.
    owners: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for layer, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                owners[parameter.untyped_storage()._cdata].append((layer, name))
    told = set()
    for places in owners.values():
        for (low, first), (high, second) in combinations(places, 2):
            known = spec.description.shared(low).get(first, low)
            if (low, high) in told or known == spec.description.shared(high).get(second):
                continue
            told.add((low, high))
            sentence = (
                f"has {first}, and so has {_named(high, modules[high])} as {second}, but layers "
                f'may be on different workers; tied=[("{low}.{first}", "{high}.{second}")] has '
                "both trained as one"
            )
            yield Problem(where=_named(low, modules[low]), sentence=sentence)


def _loss(spec: OwnModelSpec, output: Batches, targets: Batches) -> list[Problem]:
    weighs = False

    def of(output: Tree, targets: Tree, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        nonlocal weighs
        # As on a worker it is no leaf, which may not be written to.
        x = map_tensors(lambda tensor: tensor.clone(), output)
        with at_step(1):
            sums, weights = own.row_losses(spec, x, targets, rows)
        weighs = weights is not None
        return sums, torch.ones(rows) if weights is None else weights

    torch.manual_seed(0)
    one, before = of(output.one, targets.one), kept(own.user_model(spec).loss)
    again, after = of(output.one, targets.one), kept(own.user_model(spec).loss)
    sums, weights = one
    if not sums.is_floating_point():
        return [_of_loss(f"gives {sums.dtype}; give floats")]
    if bool((weights < 0).any()):
        return [_of_loss("gives a weight below 0; give 0 to a row without anything to learn")]
    if not sums.requires_grad:
        return [
            _of_loss(
                "has no gradient, so that nothing would be trained; compute it from what the last "
                "layer gives, without detach, argmax or item"
            )
        ]
    found = [] if finite(one) else [_of_loss("is not finite with the initial weights", True)]
    whole = [number for number, layer in enumerate(spec.description.layers) if layer.whole]
    if whole and weighs:
        # The weight of the batch is known, and divided by, behind the last backward.
        sentence = (
            f"gives weights, and a hook of layer {whole[0]} does not give the same for parts of a "
            "gradient, as one that clamps does not: it would see the gradient before the division "
            "by the weight of the batch; give one number per row, or leave out the hook"
        )
        found.append(_of_loss(sentence))
    alike = same_row(one, again, exact=True)
    if names := changed(before, after):
        sentence = (
            f"keeps something else after each call ({names[0]}), and workers call it in another "
            "order on other plans; oobleck.model.step() is the number of the step"
        )
        found.append(_of_loss(sentence, alike))
    elif not alike:
        return [*found, _of_loss("draws random numbers; a layer may, a loss may not")]
    if not alike:
        return found
    other, alone = of(output.other, targets.other), of(output.alone(), targets.alone(), 1)
    for what, mine, beside, single in zip(("loss", "weight"), one, other, alone, strict=True):
        if same_row(mine, beside, exact=True) and same_row(mine, single, exact=False):
            continue
        seen = next(unlike(mine, beside, exact=True), None)
        seen = seen or next(unlike(mine, single, exact=False))
        sentence = f"row 0's {what} changes with the other rows ({seen.seen}); {_BY_ROW}"
        found.append(_of_loss(sentence))
    try:
        with code.running("loss", " cannot be differentiated"):
            sums.mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as error:  # noqa: BLE001  # a user's loss may raise anything
        found.append(_of_loss(f"its backward fails: {code.described(error)}"))
    return found


_BY_ROW = (
    "compute each row's from that row alone, as torch's losses do with reduction=\"none\" and a "
    "mean over the other dimensions. That goes for each term, as an auxiliary or balancing loss "
    f"of means over the batch. {PER_ROW}"
)


def _influence_in_loss(
    spec: OwnModelSpec, output: Batches, targets: Batches, step: int
) -> Problem | None:
    """Return a problem if a row's loss changes with the other rows, for outputs of other weights.
    Errors and infinite numbers are no problem: training may never give such outputs."""
    row = output.row
    first = _row_loss(spec, output.one, targets.one, row, step)
    others = [(output.other, targets.other)]
    others += [(crowded(output, sign), targets.one) for sign in (1.0, -1.0)]
    for x, t in others:
        again = _row_loss(spec, x, t, row, step)
        if first is None or again is None:
            continue
        loss, gradients = first
        if not close(loss, again[0]):
            seen = f"{loss.item():.4g} becomes {again[0].item():.4g}"
            sentence = f"row {row}'s loss changes with the other rows ({seen}) for some outputs"
            return _of_loss(f"{sentence}; {_BY_ROW}")
        if any(not close(a, b, exact=False) for a, b in zip(gradients, again[1], strict=True)):
            sentence = f"the gradient of row {row}'s loss changes with the other rows"
            return _of_loss(f"{sentence}; {_BY_ROW}")
    return None


def _row_loss(
    spec: OwnModelSpec, output: Tree, targets: Tree, row: int, step: int
) -> tuple[Tensor, list[Tensor]] | None:
    """Return the loss of `row` and its gradients in that row of `output`; None if it fails or is
    not finite."""
    given = map_tensors(lambda tensor: leaf(tensor.clone(), tensor.requires_grad), output)
    x = map_tensors(lambda tensor: tensor.clone(), given)
    torch.manual_seed(0)
    try:
        with at_step(step):
            losses, _ = own.row_losses(spec, x, targets, ROWS)
        losses[row].backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception:  # noqa: BLE001  # training may never give such numbers
        return None
    gradients = [t.grad[row : row + 1] for t in flatten(given) if t.grad is not None]
    loss = losses[row].detach()
    return (loss, gradients) if finite([loss, *gradients]) else None


def _of_loss(sentence: str, warning: bool = False) -> Problem:
    return Problem(where="loss", sentence=sentence, warning=warning)


def _metrics(spec: OwnModelSpec, output: Batches, targets: Batches) -> list[Problem]:
    metrics = own.user_model(spec).metrics
    if metrics is None:
        return []
    try:
        with torch.no_grad(), at_step(1), code.running("metrics"):
            one, other = (metrics(x, t) for x, t in _pairs(output, targets))
    except Exception as error:  # noqa: BLE001  # a user's function may raise anything
        return [Problem(where="metrics", sentence=f"fails: {code.described(error)}")]
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        sentence = f"gives {type(one).__name__}; give a dict of name to one number per row"
        return [Problem(where="metrics", sentence=sentence)]
    return [problem for name in one for problem in _metric(name, one[name], other.get(name))]


def _pairs(output: Batches, targets: Batches) -> Iterator[tuple[Tree, Tree]]:
    yield output.one, targets.one
    yield output.other, targets.other


def _metric(name: object, one: object, other: object) -> Iterator[Problem]:
    def problem(sentence: str, warning: bool = False) -> Problem:
        return Problem(where="metrics", sentence=sentence, warning=warning)

    if not isinstance(name, str) or not name or not name.isprintable():
        yield problem(f"has the name {name!r}; give names that can be printed")
    elif not isinstance(one, Tensor) or one.shape != (ROWS,) or not isinstance(other, Tensor):
        what = list(one.shape) if isinstance(one, Tensor) else type(one).__name__
        yield problem(f"{name} is {what} for {ROWS} rows, and must be one number per row")
    elif not finite(one):
        yield problem(f"{name} is not finite with the initial weights", True)
    elif not same_row(one, other, exact=True):
        yield problem(f"row 0's {name} changes with the other rows; compute it by row")
