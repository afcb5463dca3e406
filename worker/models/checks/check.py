"""What only real runs show of a model of the user's: one micro-batch through it in host memory.

A layer of each kind is run, and is alone in memory meanwhile: layers of a kind take and give the
same shapes, so what one gives is passed on where another one's output would be. Owns what is looked
at in a whole model, its loss and its metrics; a single layer is `check_layer`'s.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from oobleck.planner.job.description import TreeSketch
from oobleck.planner.job.own import OwnModelSpec
from oobleck.worker.models import own
from oobleck.worker.models.checks.check_layer import (
    Batches,
    LayerCheck,
    finite,
    same_row,
    with_same_row,
)
from oobleck.worker.models.checks.loss import look_at_loss
from oobleck.worker.models.checks.placement import misplaced
from oobleck.worker.models.linear import split_linear
from oobleck.worker.models.tree import Tree, map_tensors, shown, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.problem import Problem, as_problem

#: Of each of the two batches. That a layer takes any number, its description has shown.
ROWS = 3
#: Samples that a check wants: both batches have the first one.
SAMPLES = 2 * ROWS - 1


def check(
    spec: OwnModelSpec, samples: tuple[Any, Any], *, seed: int, dtype: torch.dtype
) -> list[Problem]:
    """What is wrong with a model that is described. `samples`: inputs and targets, `SAMPLES` rows
    each; `seed`, `dtype`: of the weights."""
    try:
        found = _unbuildable(spec)
        if not any(kind.parameters for kind in spec.description.kinds):
            sentence = "no layer has a parameter that is trained; leave requires_grad at True"
            found.append(Problem(where="model", sentence=sentence))
        if found:
            return found  # what is run would not be what is meant
        with torch.random.fork_rng(devices=[]):
            return _run(spec, _batches(samples[0]), _batches(samples[1]), seed, dtype)
    except JobError as error:
        return [as_problem(error)]


def _batches(rows: Tree) -> Batches:
    """The samples in two batches."""
    one = map_tensors(lambda tensor: tensor[:ROWS], rows)
    # Its first row is replaced.
    return with_same_row(one, map_tensors(lambda tensor: tensor[ROWS - 1 :], rows))


def _run(
    spec: OwnModelSpec, inputs: Batches, targets: Batches, seed: int, dtype: torch.dtype
) -> list[Problem]:
    found: list[Problem] = []
    #: By kind.
    outputs: dict[int, Batches] = {}
    for layer in spec.examples:
        given = outputs[spec.order[layer - 1]] if layer else inputs
        problems, output = _run_layer(spec, layer, given, seed, dtype)
        found += problems
        if output is None:
            return found
        outputs[spec.order[layer]] = output
    last = outputs[spec.order[-1]]
    found += _loss(spec, last, targets) + look_at_loss(spec, last.one, targets.one)
    return found + _metrics(spec, last, targets)


def _run_layer(
    spec: OwnModelSpec, layer: int, given: Batches, seed: int, dtype: torch.dtype
) -> tuple[list[Problem], Batches | None]:
    """What is wrong with it, and what it gives; None where the next one cannot be run on that."""
    module = own.in_precision(own.build_real(spec, seed, layer), dtype)
    split_linear(module)  # as a worker does
    where = _named(layer, module)
    if any(tensor.is_meta for tensor in (*module.parameters(), *own.constants(module))):
        return [_without_numbers(where)], None
    looked_at, known = LayerCheck(module, where, seed), spec.description.layers[layer]
    output = looked_at.run(given, draws=known.draws)
    if output is not None and (unlike := _unlike(where, output.one, known.output)):
        return [*looked_at.problems, unlike], None
    found = looked_at.problems
    if all(problem.warning for problem in found):
        found += misplaced(module, given.one, spec, layer, seed=seed, dtype=dtype, where=where)
    return found, output


def _unlike(where: str, output: Tree, known: TreeSketch) -> Problem | None:
    """A layer's output for the data, where it is not what made-up numbers gave."""
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
    """Parameters that two layers have, or two calls of a builder."""
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
    """A line for each pair of layers with a parameter that both have and no word says so."""
    #: By its memory, which parameters have in common too that were made so by their `data`.
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
    def of(output: Tree, targets: Tree, rows: int = ROWS) -> tuple[Tensor, Tensor]:
        # As on a worker it is no leaf, which may not be written to.
        x = map_tensors(lambda tensor: tensor.clone(), output)
        sums, weights = own.row_losses(spec, x, targets, rows)
        return sums, torch.ones(rows) if weights is None else weights

    torch.manual_seed(0)
    one, again = (of(output.one, targets.one) for _ in range(2))
    sums, weights = one
    if not sums.is_floating_point():
        return [_of_loss(f"gives {sums.dtype}; give floats")]
    if bool((weights < 0).any()):
        return [_of_loss("gives a weight below 0; a row weighs 0 where nothing of it is learned")]
    if not sums.requires_grad:
        return [
            _of_loss(
                "has no gradient, so that nothing would be trained; compute it from what the last "
                "layer gives, without detach, argmax or item"
            )
        ]
    found = [] if finite(one) else [_of_loss("is not finite with the initial weights", True)]
    if not same_row(one, again, exact=True):
        return [*found, _of_loss("draws random numbers; a layer may, a loss may not")]
    other, alone = of(output.other, targets.other), of(output.alone(), targets.alone(), 1)
    for what, mine, beside, single in zip(("loss", "weight"), one, other, alone, strict=True):
        if same_row(mine, beside, exact=True) and same_row(mine, single, exact=False):
            continue
        found.append(
            _of_loss(
                f"row 0's {what} changes with the other rows; compute each row's from that row "
                'alone, as torch\'s losses do with reduction="none" and a mean over the other '
                "dimensions"
            )
        )
    try:
        with code.running("loss", " cannot be differentiated"):
            sums.mean().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as error:  # noqa: BLE001  # a user's loss may raise anything
        found.append(_of_loss(f"its backward fails: {code.described(error)}"))
    return found


def _of_loss(sentence: str, warning: bool = False) -> Problem:
    return Problem(where="loss", sentence=sentence, warning=warning)


def _metrics(spec: OwnModelSpec, output: Batches, targets: Batches) -> list[Problem]:
    metrics = own.user_model(spec).metrics
    if metrics is None:
        return []
    try:
        with torch.no_grad(), code.running("metrics"):
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
