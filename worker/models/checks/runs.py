"""A run of one layer: its output and gradients, and everything in it that training would break.

Also owns the comparison of the state that a layer keeps between runs. Must not know which runs are
compared.
"""

import hashlib
import itertools
import random
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    """Return the state of generators other than torch's: a change means a draw from one."""
    _, keys, position, *_ = np.random.get_state()
    return random.getstate(), keys.tobytes() if isinstance(keys, np.ndarray) else keys, position


# ---- State that a layer keeps from one forward to the next, beside parameters and buffers.
#
# Owns which state is compared: numbers, text, tensors and arrays, also in lists, dicts and the
# user's objects. It is looked for in attributes of modules, in closures, and at the top of the
# file with the class. A cache is state too but harmless: a second forward of the same rows does
# not change it.


#: Attributes of every nn.Module.
_OF_MODULES = frozenset(vars(nn.Module()))
_PLAIN = (int, float, complex, str, bytes, type(None))
#: Bounds: nesting depth, parts of one list or dict, and values below one name.
_DEPTH, _MOST, _MOST_OF_NAME = 4, 1000, 5000
#: Most numbers of a tensor that are compared; they are evenly spaced.
_MOST_NUMBERS = 1 << 18
#: Folders of installed packages.
_INSTALLED = ("site-packages", "dist-packages")


def kept(root: object) -> dict[str, Hashable]:
    """Return the state of `root`, a layer or a loss: a comparable value by name."""
    found: dict[str, Hashable] = {}
    files: dict[str, ModuleType] = {}
    parts: Iterable[tuple[str, object]] = _functions(root)
    if isinstance(root, nn.Module):
        parts = root.named_modules()
    for path, part in parts:
        name = getattr(part, "__module__", None) or ""
        if _is_users(name):
            files[name] = sys.modules[name]
        for key, value in getattr(part, "__dict__", {}).items():
            if key not in _OF_MODULES and not isinstance(value, nn.Module | nn.Parameter):
                found.update(_some(value, f"{path}.{key}".lstrip(".")))
        for value in _closed_over(part):
            found.update(_some(value, "a variable of the function around it"))
    for name, file in files.items():
        for key, value in vars(file).items():
            if not key.startswith("__"):
                found.update(_some(value, f"{name}.{key}"))
    return found


def changed(before: Mapping[str, Hashable], after: Mapping[str, Hashable]) -> list[str]:
    """Return the names, for people, of state that changed."""
    return [
        f"{name}: {_shown(before.get(name))}, then {_shown(after.get(name))}"
        if isinstance(after.get(name), _PLAIN)
        else name
        for name in sorted({*before, *after})
        if repr(before.get(name)) != repr(after.get(name))  # NaN equals itself in repr
    ]


def _shown(value: Hashable) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _functions(root: object) -> Iterator[tuple[str, object]]:
    """Yield `root`, and the function of a partial or the object of a method."""
    yield "", root
    for part in (getattr(root, "func", None), getattr(root, "__self__", None)):
        if part is not None and not isinstance(part, ModuleType):
            yield "", part


def _closed_over(part: object) -> Iterator[object]:
    for cell in getattr(part, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # an empty cell
            continue


def _some(value: object, name: str) -> Iterator[tuple[str, Hashable]]:
    return itertools.islice(_numbers(value, name, _DEPTH), _MOST_OF_NAME)


def _numbers(value: Any, name: str, depth: int) -> Iterator[tuple[str, Hashable]]:
    """Yield a name and a comparable value for `value` and each of its parts."""
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, Tensor):
        yield name, _of_tensor(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc" and value.size:
            yield name, (value.shape, _digest(value.reshape(-1)))
    elif isinstance(value, itertools.count):
        yield name, repr(value)
    elif not depth or isinstance(value, nn.Module | type | ModuleType):
        return
    elif isinstance(value, list | tuple | deque):
        yield f"len({name})", len(value)
        for number, part in enumerate(itertools.islice(value, _MOST)):
            yield from _numbers(part, f"{name}[{number}]", depth - 1)
    elif isinstance(value, dict):
        yield f"len({name})", len(value)
        for key, part in itertools.islice(value.items(), _MOST):
            yield from _numbers(part, f"{name}[{key!r}]", depth - 1)
    elif isinstance(value, set | frozenset):
        yield f"len({name})", len(value)
    elif _is_users(type(value).__module__):
        for key, part in getattr(value, "__dict__", {}).items():
            yield from _numbers(part, f"{name}.{key}", depth - 1)


def _of_tensor(tensor: Tensor) -> Hashable:
    if tensor.is_meta or tensor.layout != torch.strided:
        return None
    numbers = tensor.detach().cpu().reshape(-1)
    spaced = numbers[:: 1 + len(numbers) // _MOST_NUMBERS].contiguous().view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), _digest(spaced.numpy())


def _digest(numbers: NDArray[Any]) -> bytes:
    spaced = numbers[:: 1 + len(numbers) // (_MOST_NUMBERS * 16)]
    return hashlib.sha256(np.ascontiguousarray(spaced).tobytes()).digest()


def _is_users(module: str) -> bool:
    """Return whether a module is the user's: not installed, not ours, not the standard library."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    first = module.partition(".")[0]
    return (
        bool(file)
        and first not in sys.stdlib_module_names | {"oobleck"}
        and not any(part in file for part in _INSTALLED)
    )
