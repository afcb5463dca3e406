"""Caches that are computed outside torch's modes, whatever modes the caller is in.

Layers are built on the meta device and without draws, and run under autocast or without gradients.
Any of these may be first to fill a cache. Owns that no mode affects a cached value.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes

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
