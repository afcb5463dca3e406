"""What a process keeps for all layers, made as if nothing around the caller changed torch.

Layers are built on the meta device and without draws, run under autocast and without gradients, and
whichever of these comes first asks for what is kept. Owns that none of it gets into the value.
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
    """Compute within as at the top of a program: on the CPU unless a device is named, with draws,
    gradients and the types of the operands, whatever the caller is within."""
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
