"""Checks that a layer computes the same after a worker moves its weights to other memory.

A worker builds a layer, moves its trained parameters to other memory, and updates them there. A
layer would miss the updates if it kept a tensor made from a weight, such as a view or a copy. So
would one with a parameter that no module has.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oobleck.core.job.own import OwnModelSpec
from oobleck.model import at_step
from oobleck.worker.models import own
from oobleck.worker.models.base import place_parameters
from oobleck.worker.models.checks.rows import same
from oobleck.worker.models.linear import split_linear
from oobleck.worker.models.tree import Tree, flatten, map_tensors
from oobleck.worker.runtime import code
from oobleck.worker.runtime.problem import Problem

_FIX = (
    "take weights from the module's own parameters in forward, not from views, .data or detach() "
    "that were made when it was built, and keep each parameter in a module, as in nn.ParameterList"
)


def misplaced(
    module: nn.Module,
    x: Tree,
    spec: OwnModelSpec,
    layer: int,
    *,
    seed: int,
    dtype: torch.dtype,
    where: str,
    keeps: bool,
) -> list[Problem]:
    """Return problems of a layer whose `module` runs on `x` with its weights as built. `keeps`:
    whether its output may depend on the number of calls."""
    if beside := next(_unregistered(module), None):
        sentence = (
            f"keeps a parameter in {beside}, where no optimizer sees it; make it an attribute of "
            "the module, or use nn.ParameterList or nn.ParameterDict"
        )
        return [Problem(where=where, sentence=sentence)]
    expected = _run(_built(spec, layer, seed, dtype) if keeps else module, x, seed)
    try:
        with code.running(where):
            found = _run(_placed(spec, layer, module, seed, dtype), x, seed)
    except Exception as error:  # noqa: BLE001  # a user's layer may raise anything
        sentence = f"fails where workers put its weights: {code.described(error)}; {_FIX}"
        return [Problem(where=where, sentence=sentence)]
    if not same(expected.output, found.output):
        return [Problem(where=where, sentence=f"gives something else where {_WORKERS}; {_FIX}")]
    for name, gradient in expected.gradients.items():
        other = found.gradients.get(name)
        if other is None or not same(gradient, other):
            sentence = f"gives {name} another gradient where {_WORKERS}; {_FIX}"
            return [Problem(where=where, sentence=sentence)]
    return []


_WORKERS = "workers put its weights"


@dataclass(frozen=True, slots=True)
class _Run:
    output: Tree
    #: By parameter name; without parameters that got no gradient.
    gradients: dict[str, Tensor]


def _run(module: nn.Module, x: Tree, seed: int) -> _Run:
    """Run a forward and a backward in training mode."""
    module.train()
    torch.manual_seed(seed)
    given = map_tensors(
        lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), x
    )
    with at_step(1):
        output: Tree = module(given)
    roots = [tensor for tensor in flatten(output) if tensor.requires_grad]
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
    named = module.named_parameters()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    module.zero_grad(set_to_none=True)
    return _Run(map_tensors(lambda tensor: tensor.detach(), output), gradients)


def _built(spec: OwnModelSpec, layer: int, seed: int, dtype: torch.dtype) -> nn.Module:
    """Return the layer with its initial weights, which nobody has called yet."""
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
