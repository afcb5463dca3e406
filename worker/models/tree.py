"""Trees that pass between the layers of a model: a tensor, or a tuple, list or dict of such trees.

A tree taken apart is its tensors in order, and its structure as JSON. In it `null` is a tensor,
`["tuple", ...]` and `["list", ...]` are sequences, and an object is a dict, whose keys keep their
order. Nothing else is a tree, since it could not be put together again elsewhere from that alone.

Also owns the caches of functions that must run outside torch's modes.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

# ---- Caches that are computed outside torch's modes, whatever modes the caller is in.
#
# Layers are built on the meta device and without draws, and run under autocast or without
# gradients. Any of these may be first to fill a cache. Owns that no mode affects a cached value.


_Function = TypeVar("_Function", bound=Callable[..., Any])


@contextmanager
def outside_modes() -> Iterator[None]:
    """Run the block as if at the top of a program, without the caller's modes. Tensors are on the
    CPU by default, draws and gradients work, and operands keep their types."""
    with ExitStack() as stack:
        for _ in range(_len_torch_function_stack()):
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def cached(maxsize: int) -> Callable[[_Function], _Function]:
    """Decorate a function as `lru_cache` does; its body runs outside all modes."""

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def outside(*arguments: Any, **named: Any) -> Any:
            with outside_modes():
                return function(*arguments, **named)

        kept: Any = lru_cache(maxsize=maxsize)(outside)
        return kept  # type: ignore[no-any-return]

    return decorate


Tree: TypeAlias = Tensor | tuple["Tree", ...] | list["Tree"] | dict[str, "Tree"]

#: The structure of one tensor.
TENSOR = "null"
_SEQUENCES = {"tuple": tuple, "list": list}


def flatten(tree: Tree) -> list[Tensor]:
    """Return the tensors of `tree`, in order. Raises TypeError, which names the value that is no
    tree."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    _collect(tree, (), found)
    return found


def structure(tree: Tree) -> str:
    """Describe the nesting of `tree`, as JSON. Raises TypeError."""
    if isinstance(tree, Tensor):
        return TENSOR
    return json.dumps(_pattern(tree, ()), separators=(",", ":"))


def unflatten(structure: str, tensors: Iterable[Tensor]) -> Tree:
    """Build the tree of that `structure` with these `tensors`. Raises ValueError where they do not
    fit, or where it is no structure."""
    left = iter(tensors)
    tree = _build(_parse(structure), left)
    if next(left, None) is not None:
        raise ValueError(f"{structure} has fewer tensors than were given")
    return tree


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """Return a tree of the same structure, with the function's result for each tensor. Raises
    TypeError."""
    return function(tree) if isinstance(tree, Tensor) else _map(function, tree, ())


def shown(tree: Tree) -> str:
    """Return the types and shapes as text, for messages and comparisons."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {shown(part)}" for name, part in tree.items()) + "}"
    return "(" + ", ".join(map(shown, tree)) + ")"


#: Keys and numbers from the whole tree down to a part of it.
_Path = tuple[str | int, ...]


def _map(function: Callable[[Tensor], Tensor], tree: Tree, path: _Path) -> Tree:
    if isinstance(tree, Tensor):
        return function(tree)
    mapped = {key: _map(function, part, (*path, key)) for key, part in _parts(tree, path)}
    if isinstance(tree, dict):
        return {str(key): part for key, part in mapped.items()}
    return type(tree)(mapped.values())


def _collect(tree: Tree, path: _Path, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
        return
    for key, part in _parts(tree, path):
        _collect(part, (*path, key), found)


def _pattern(tree: Tree, path: _Path) -> object:
    if isinstance(tree, Tensor):
        return None
    parts = {key: _pattern(part, (*path, key)) for key, part in _parts(tree, path)}
    return parts if isinstance(tree, dict) else [type(tree).__name__, *parts.values()]


def _parts(tree: Tree, path: _Path) -> Iterable[tuple[str | int, Tree]]:
    """Return the parts of a tuple, list or dict. Raises TypeError where it is no tree."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return enumerate(tree)
    where = "".join(f"[{key!r}]" for key in path)
    at = f" at {where}" if where else ""
    if kind is not dict:
        article = "an" if kind.__name__[0] in "aeiouAEIOU" else "a"
        name = "None" if tree is None else f"{article} {kind.__name__}"
        raise TypeError(
            f"{name}{at} where a tensor was expected; between layers pass tensors, or plain "
            "tuples, lists and dicts of tensors"
        )
    assert isinstance(tree, dict)
    for key in tree:
        if type(key) is not str:
            raise TypeError(f"the dict{at} has the key {key!r}; use text as keys")
    return tree.items()


@lru_cache(maxsize=256)
def _parse(structure: str) -> object:
    pattern: object = json.loads(structure)
    _check(pattern, structure)
    return pattern


def _check(pattern: object, structure: str) -> None:
    match pattern:
        case None:
            pass
        case [str(kind), *parts] if kind in _SEQUENCES:
            for part in parts:
                _check(part, structure)
        case dict():
            for part in pattern.values():
                _check(part, structure)
        case _:
            raise ValueError(f"{structure} is no structure of tensors")


def _build(pattern: object, tensors: Iterator[Tensor]) -> Tree:
    if isinstance(pattern, dict):
        return {key: _build(part, tensors) for key, part in pattern.items()}
    if isinstance(pattern, list):
        kind, *parts = pattern
        made: Iterable[Tree] = [_build(part, tensors) for part in parts]
        return tuple(made) if kind == "tuple" else list(made)
    tensor = next(tensors, None)
    if tensor is None:
        raise ValueError("a structure has more tensors than were given")
    return tensor
