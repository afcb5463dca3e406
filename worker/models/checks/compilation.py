"""Search for the layers that torch's compiler takes, and for those of them that share code.

What a layer does is traced whole, forward and backward, on the numbers or shapes that it was
described by; no machine code is made of it, so no C++ compiler is needed. The layers are looked at
in their order: one that runs by the code of an earlier one shares it. Must not know jobs.
"""

import importlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from oobleck.worker.models.compiled import MOST_CODES, compiled
from oobleck.worker.models.tree import Tree
from oobleck.worker.runtime import code

#: Where in the user's code torch gave up: the last of the places that it tells.
_PLACE = re.compile(r'File "(?:.*/)?([^"/]+)", line (\d+)')


class Compilation:
    """The codes that a model's layers are compiled into, as far as they were looked at."""

    def __init__(self) -> None:
        # Loads the compiler, which takes seconds.
        self._dynamo: Any = importlib.import_module("torch._dynamo.config")
        registry: Any = importlib.import_module("torch._dynamo.backends.registry")
        self._traced = registry.lookup_backend("aot_eager")
        self._count = 0
        #: The code that ran last.
        self._ran: int | None = None
        self._run = compiled(backend=self._backend)

    def look(self, module: nn.Module, x: Tree, *, draws: bool) -> tuple[int | None, str]:
        """The number of the code that `module` runs for `x`, or the reason why there is none."""
        if draws:
            return None, "it draws random numbers, which are other ones in compiled code"
        full = self._count == MOST_CODES
        self._ran = None
        # In torch's words a failure is pages long.
        quiet = logging.getLogger("torch._dynamo"), logging.getLogger("torch._functorch")
        before = [logger.level for logger in quiet]
        for logger in quiet:
            logger.setLevel(logging.CRITICAL)
        try:
            with (
                self._dynamo.patch(recompile_limit=_ANY, accumulated_recompile_limit=_ANY),
                torch.compiler.set_stance("fail_on_recompile" if full else "default"),
                code.running(f"model: {type(module).__name__}", passing=(Exception,)),
            ):
                self._run(module, x)
        except Exception as error:  # noqa: BLE001  # torch, or a user's layer, may raise anything
            if full:
                return None, f"other layers have {MOST_CODES} codes already, and it fits none"
            return None, _reason(error)
        finally:
            for logger, level in zip(quiet, before, strict=True):
                logger.setLevel(level)
        if self._ran is None:
            return None, "it computes nothing"
        return self._ran, ""

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Traces the backward too, and notes which code it is that runs."""
        traced = self._traced(graph, inputs)
        number, self._count = self._count, self._count + 1

        def run(*args: Any) -> Any:
            self._ran = number
            return traced(*args)

        return run


#: More than there can be.
_ANY = 1 << 20


#: The reason in torch's error when it traces a call of `oobleck.model.step`.
_STEP = "oobleck.model.step()"


def _reason(error: Exception) -> str:
    """Reduce torch's error of many lines to one."""
    text = str(error).strip()
    if _STEP in text:
        return f"it asks for the step ({_STEP}), another number in each"
    what = text.partition("\n")[0].rstrip(".") or type(error).__name__
    places = _PLACE.findall(text)
    return f"{what} ({places[-1][0]}:{places[-1][1]})" if places else what
