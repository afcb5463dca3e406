"""Checks that a layer computes the same after a worker moves its weights to other memory.

A worker builds a layer, moves its trained parameters to other memory, and updates them there. A
layer would miss the updates if it kept a tensor made from a weight, such as a view or a copy. So
would one with a parameter that no module has.
"""

from collections.abc import Iterator

import torch
from torch import nn

from oobleck.core.job.model import OwnModelSpec
from oobleck.worker.models import own
from oobleck.worker.models.base import place_parameters
from oobleck.worker.models.checks.rows import same
from oobleck.worker.models.checks.runs import run
from oobleck.worker.models.linear import split_linear
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime import code

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
