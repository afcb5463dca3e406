"""A run of one layer: its output and gradients, and every act in it that would train another model.

Must not know which runs are compared.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from oobleck.core.units import count
from oobleck.model import at_step
from oobleck.worker.models.checks.rows import leaf
from oobleck.worker.models.tree import Tree, flatten, map_tensors
from oobleck.worker.runtime import code

_EARLY = (
    "adds to its parameters' gradients in forward, once for each micro-batch; take a gradient by "
    "torch.autograd.grad, or add what you differentiate to the loss"
)
_FOREIGN = (
    "draws from numpy's or random's generator; draw from torch's own (nn.Dropout, torch.rand), "
    "which is seeded by step and sample"
)


class LayerFailed(Exception):
    """A failure of a layer's code; its text is a sentence about the layer."""


@dataclass(frozen=True, slots=True)
class Run:
    """The results of a forward, and of a backward if one was asked for."""

    #: Tensors of the output, as leaves.
    output: Tree
    #: Gradients of the tensors that the layer took.
    taken: list[Tensor]
    #: Gradients by parameter.
    gradients: dict[str, Tensor]
    #: Sentences on what no layer may do in a forward.
    wrongs: list[str]


def run(
    module: nn.Module,
    x: Tree,
    seed: int,
    *,
    step: int = 1,
    training: bool = True,
    gradient: Callable[[Tensor], Tensor] | None = torch.ones_like,
) -> Run:
    """Run the layer on `x`; leave it as it was, with no gradients. `gradient` makes the gradient of
    a tensor that it gives; None: no backward. Raises LayerFailed."""
    given = map_tensors(lambda tensor: leaf(tensor.clone(), tensor.requires_grad), x)
    parts = [(name, tensor, tensor._version) for name, tensor in _own(module)]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    draws = _foreign_draws()
    module.train(training)
    torch.manual_seed(seed)
    wrongs = []
    try:
        try:
            with (
                torch.set_grad_enabled(training or gradient is not None),
                at_step(step),
                code.running("model"),
            ):
                output: Tree = module(given)
                roots = [tensor for tensor in flatten(output) if tensor.requires_grad]
        except Exception as error:
            rows, how = count(len(flatten(x)[0]), "row"), "" if training else " in evaluation"
            raise LayerFailed(
                f"fails{how} on {rows} of the data: {code.described(error)}"
            ) from error
        if any(parameter.grad is not None for parameter in module.parameters()):
            wrongs.append(_EARLY)
        if gradient is not None and roots:
            try:
                with code.running("model"):
                    torch.autograd.backward(roots, [gradient(root) for root in roots])
            except Exception as error:
                raise LayerFailed(f"its backward fails: {code.described(error)}") from error
        if draws != _foreign_draws():
            wrongs.append(_FOREIGN)
        wrongs += _changed(module, parts)
        named = module.named_parameters()
        return Run(
            map_tensors(lambda tensor: leaf(tensor, tensor.requires_grad), output),
            [tensor.grad for tensor in flatten(given) if tensor.grad is not None],
            {name: p.grad for name, p in named if p.grad is not None},
            wrongs,
        )
    finally:
        module.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _changed(module: nn.Module, before: list[tuple[str, Tensor, int]]) -> Iterator[str]:
    now = dict(_own(module))
    for name, tensor, version in before:
        if now.get(name) is not tensor or tensor._version != version:
            yield (
                f"changes its {name} in forward; what is no trained parameter is a constant of the "
                "job, so compute it anew or pass it on"
            )


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _foreign_draws() -> tuple[object, ...]:
    """Return another value after a draw from a generator that is not torch's."""
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), keys.tobytes() if isinstance(keys, np.ndarray) else keys, position
