"""How much memory torch's operations take, tensor by tensor: the most that is there at a time.

On a CPU every result that lies in memory of its own counts from the operation that makes it until
its last user lets go of it; what an operation takes inside of itself is not seen. On a GPU torch's
allocator counts. Must not know what is run.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(run: Callable[[], None], device: torch.device) -> int:
    """The most that `run` has at a time of what it makes on `device`."""
    if device.type == "cuda":
        before: int = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before
    footprint = Footprint()
    with footprint:
        run()
    return footprint.peak_bytes


class Footprint(TorchDispatchMode):
    """A context manager: `peak_bytes` of what this thread's operations within it have made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.peak_bytes = 0
        self._bytes = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs or {}))}
        results = func(*args, **(kwargs or {}))
        for storage in _storages(results):
            key = storage._cdata
            if key not in given and key not in self._alive:
                size = storage.nbytes()
                self._alive.add(key)
                self._bytes += size
                weakref.finalize(storage, self._freed, key, size)
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return results

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._bytes -= size


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
            yield leaf.untyped_storage()
