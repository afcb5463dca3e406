"""Checks of a user's model that need real runs: small batches in host memory.

One layer of each kind runs, alone in memory. Layers of a kind have the same shapes, so one's output
stands for another's. Owns the checks of a whole model and its metrics; `layer` owns those of a
single layer, `loss` those of the loss.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from oobleck.core.job.description import TreeSketch
from oobleck.core.job.model import OwnModelSpec
from oobleck.model import at_step
from oobleck.worker.models import own
from oobleck.worker.models.base import place_parameters, split_linear
from oobleck.worker.models.checks.layer import WAYS, LayerCheck
from oobleck.worker.models.checks.loss import check_loss, influence_in_loss, weighs
from oobleck.worker.models.checks.rows import (
    Batches,
    finite,
    same,
    same_row,
    with_same_row,
)
from oobleck.worker.models.checks.runs import run
from oobleck.worker.models.tree import Tree, map_tensors, shown, unflatten
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, Problem, as_problem

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
        self._weighs = weighs(spec, map_tensors(lambda tensor: tensor[:ROWS], samples[1]))
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
        problems = check_loss(spec, output, targets)
        if not any(not problem.warning for problem in problems):
            outputs = [(output, 1, True)]
            outputs += [
                (
                    self._changed.get((kind, number), output),
                    self._steps if way.last_step else 1,
                    False,
                )
                for number, way in enumerate(WAYS)
            ]
            for x, step, initial in outputs:
                sides = x, _batches(self._targets, x.row)
                if influence := influence_in_loss(spec, *sides, step, initial=initial):
                    problems.append(influence)
                    break
        return self._found + problems + _metrics(spec, output, targets)

    def _run_layer(self, layer: int) -> bool:
        """Check a layer. Returns whether the next one can run on its output."""
        spec = self._spec
        module = own_layer(spec, layer, self._seed, self._dtype)
        where, kind = _named(layer, module), spec.order[layer]
        if any(tensor.is_meta for tensor in (*module.parameters(), *own.constants(module))):
            self._found.append(_without_numbers(where))
            return False
        below = spec.order[layer - 1] if layer else None
        given = _batches(self._inputs) if below is None else self._outputs[below]
        known = spec.description.layers[layer]
        check = LayerCheck(
            module,
            where,
            self._seed,
            draws=known.draws,
            steps=self._steps,
            weighed=self._weighs and not known.whole,
        )
        output = check.run(given)
        if output is not None and (sentence := _unlike(output.one, known.output)):
            check.say(sentence)
            output = None
        if output is not None:
            self._outputs[kind] = output
        if output is not None and not check.refused:
            seed, dtype = self._seed, self._dtype
            check.say(misplaced(module, given.one, spec, layer, seed, dtype, keeps=check.keeps))
            self._look(check, below, kind)
        self._found += check.problems
        return output is not None

    def _look(self, check: LayerCheck, below: int | None, kind: int) -> None:
        """Check the layer with changed weights, on outputs of layers with such."""
        for number, way in enumerate(WAYS):
            if check.refused:
                return
            if below is None:
                given = _batches(self._inputs, way.row % ROWS)
            else:
                given = self._changed.get((below, number), self._outputs[below])
            output = check.look(given, way, data=below is None)
            if output is not None:
                self._changed[kind, number] = output


def _unlike(output: Tree, known: TreeSketch) -> str:
    """Return a sentence if the layer's output for data differs in form from that for made-up
    numbers."""
    made = (
        torch.empty((ROWS, *t.shape), dtype=getattr(torch, t.dtype), device="meta")
        for t in known.tensors
    )
    expected = shown(unflatten(known.structure, made))
    if shown(output) == expected:
        return ""
    return (
        f"gives {shown(output)} for rows of the data, and {expected} for made-up ones; what a "
        "layer gives must not depend on the numbers it takes"
    )


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
    """Yield a problem for each pair of layers with common memory that `tied` does not name."""
    #: Parameters by their memory, which `data` can make two parameters share.
    owners: dict[int, list[tuple[int, str, Tensor]]] = defaultdict(list)
    for layer, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                owners[parameter.untyped_storage()._cdata].append((layer, name, parameter))
    reported = set()
    for places in owners.values():
        for (low, first, one), (high, second, other) in combinations(places, 2):
            known = spec.description.shared(low).get(first, low)
            tied = low != high and known == spec.description.shared(high).get(second)
            if (low, high) in reported or tied or not _overlap(one, other):
                continue
            reported.add((low, high))
            if _geometry(one) != _geometry(other):
                sentence = (
                    f"has {first}, whose memory is in part that of {second} of "
                    f"{'this layer' if low == high else _named(high, modules[high])}, and an "
                    "optimizer would change it twice; give each memory of its own, as "
                    "nn.Parameter(w[:8].clone()) does"
                )
            elif low == high:
                sentence = (
                    f"has {first} and {second} in the same memory, and an optimizer would change "
                    f"it twice; make them one parameter: {second} = {first}"
                )
            else:
                sentence = (
                    f"has {first}, and so has {_named(high, modules[high])} as {second}, but "
                    f'layers may be on different workers; tied=[("{low}.{first}", '
                    f'"{high}.{second}")] has both trained as one'
                )
            yield Problem(where=_named(low, modules[low]), sentence=sentence)


def _geometry(parameter: Tensor) -> tuple[object, ...]:
    """Return a value that is equal for parameters of the same numbers of a storage in the same
    shape."""
    return parameter.dtype, parameter.storage_offset(), parameter.shape, parameter.stride()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two parameters of one storage have bytes in common."""
    if _geometry(one) == _geometry(other):
        return True
    # Columns of a matrix interleave, so each byte counts.
    taken = torch.zeros(one.untyped_storage().nbytes(), dtype=torch.bool, device="cpu")
    _bytes_of(one, taken).fill_(True)
    return bool(_bytes_of(other, taken).any())


def _bytes_of(tensor: Tensor, storage: Tensor) -> Tensor:
    """Return the view of `storage`, of one number per byte, that `tensor` has of its own."""
    size = tensor.element_size()
    # An expanded dimension has the same bytes at each place, and cannot be written to as a whole.
    shape = [n if stride else 1 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides = [stride * size for stride in tensor.stride()]
    return storage.as_strided((*shape, size), (*strides, 1), tensor.storage_offset() * size)


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


# ---- Checks that a layer computes the same after a worker moves its weights to other memory.
#
# A worker builds a layer, moves its trained parameters to other memory, and updates them there. A
# layer would miss the updates if it kept a tensor made from a weight, such as a view or a copy.
# So would one with a parameter that no module has.


_FIX = (
    "take weights from the module's own parameters in forward, not from views, .data or detach() "
    "that were made when it was built, and keep each parameter in a module, as in nn.ParameterList"
)
_WORKERS = "workers put its weights"


def misplaced(
    module: nn.Module,
    x: Tree,
    spec: OwnModelSpec,
    layer: int,
    seed: int,
    dtype: torch.dtype,
    *,
    keeps: bool,
) -> str:
    """Return the fault of a layer whose `module` runs on `x` with its weights as built; empty:
    none. `keeps`: its output may depend on the number of calls."""
    if beside := next(_unregistered(module), None):
        return (
            f"keeps a parameter in {beside}, where no optimizer sees it; make it an attribute of "
            "the module, or use nn.ParameterList or nn.ParameterDict"
        )
    expected = run(own_layer(spec, layer, seed, dtype) if keeps else module, x, seed)
    try:
        found = run(_placed(spec, layer, module, seed, dtype), x, seed)
    except Exception as error:  # noqa: BLE001  # a user's layer may raise anything
        return f"fails where {_WORKERS}: {code.described(error.__cause__ or error)}; {_FIX}"
    if not same(expected.output, found.output):
        return f"gives something else where {_WORKERS}; {_FIX}"
    for name, gradient in expected.gradients.items():
        other = found.gradients.get(name)
        if other is None or not same(gradient, other):
            return f"gives {name} another gradient where {_WORKERS}; {_FIX}"
    return ""


def own_layer(spec: OwnModelSpec, layer: int, seed: int, dtype: torch.dtype) -> nn.Module:
    """Return the layer with its initial weights, as a worker runs it, that nobody has called."""
    module = own.in_precision(own.build_real(spec, seed, layer), dtype)
    split_linear(module)
    return module


def _placed(
    spec: OwnModelSpec, layer: int, built: nn.Module, seed: int, dtype: torch.dtype
) -> nn.Module:
    """Return the layer as a worker has it, with the weights of `built`. The memory of its weights
    when it was built is filled with NaN."""
    made = own.empty_layer(spec, seed, layer)
    before = [p.data for _, p in made.trained() if not p.is_meta]
    values = {f"module.{name}": p.detach().clone() for name, p in built.named_parameters()}
    place_parameters(made, {n: values[n] for n, p in made.named_parameters() if p.requires_grad})
    for memory in before:
        memory.fill_(torch.nan)
    return own.in_precision(made.module, dtype)


def _unregistered(module: nn.Module) -> Iterator[str]:
    """Yield the names of attributes that hold a parameter which no module has."""
    known = {id(parameter) for parameter in module.parameters()}
    for prefix, part in module.named_modules():
        for name, value in vars(part).items():
            if any(id(parameter) not in known for parameter in _parameters(value)):
                yield f"{prefix}.{name}".removeprefix(".")


def _parameters(value: object, depth: int = 3) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, list | tuple | dict) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parameters(item, depth - 1)
