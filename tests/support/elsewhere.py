"""A device beside the host, without one: its tensors are in host memory, and cannot be used as the
host's own.

What a GPU refuses is refused: an operation on tensors of both. What makes the host wait for a GPU
is counted: reading a number, copying to the host. So is what is copied there. A backward runs in a
thread of the device's own, as on a GPU, which knows nothing of the context of the one that asked.

To register the device changes torch for the whole process, so tests do it in one of its own.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)

_NAME = "elsewhere"
_HOST = torch.device("cpu")
#: Tell the host something that it cannot know before the device has computed it.
_READS = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")


class _Module(_DummyBackendModule):
    """What torch asks of `torch.elsewhere`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> torch.device:
    """Once in a process."""
    _setup_privateuseone_for_python_backend(_NAME, backend_module=_Module())
    return torch.device(_NAME, 0)


class Elsewhere(Tensor):
    """A tensor of the device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> "Elsewhere":
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=torch.device(_NAME, 0),
        )
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} where nobody looks")


class Computing(TorchDispatchMode):
    """Within, the device computes; counts what the host has to do with it."""

    def __init__(self) -> None:
        super().__init__()
        #: Operations that the host waits for, by name.
        self.waits: Counter[str] = Counter()
        #: Copies from the host.
        self.given = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = str(func).removeprefix("aten.").partition(".")[0]
        given = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        there = [one for one in given if isinstance(one, Elsewhere)]
        is_there = bool(there)
        if kwargs.get("device") is not None:
            is_there = torch.device(kwargs["device"]).type == _NAME
            kwargs["device"] = _HOST
        self._note(name, given, there, is_there=is_there)
        known = {id(one.here): one for one in there}
        args, kwargs = pytree.tree_map(_here, (args, kwargs))
        found = func(*args, **kwargs)
        if not is_there:
            return found

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            changed = known.get(id(value))
            return Elsewhere(value) if changed is None else changed

        return pytree.tree_map(wrapped, found)

    def _note(
        self, name: str, given: Sequence[Tensor], there: Sequence[Tensor], *, is_there: bool
    ) -> None:
        if name in ("_to_copy", "copy_"):
            source = given[-1]
            into_there = isinstance(given[0], Elsewhere) if name == "copy_" else is_there
            if isinstance(source, Elsewhere) and not into_there:
                self.waits[name] += 1
            elif into_there and not isinstance(source, Elsewhere):
                self.given += 1
            return
        if not there:
            return
        # A number of the host's is an argument of the kernel.
        others = [one for one in given if not isinstance(one, Elsewhere) and one.dim()]
        if others:
            shapes = ", ".join(str(tuple(one.shape)) for one in others)
            raise RuntimeError(f"{name}: tensors of the host ({shapes}) beside those of a device")
        if name in _READS:
            self.waits[name] += 1


def _here(value: Any) -> Any:
    return value.here if isinstance(value, Elsewhere) else value
