"""Meter of the memory that torch's operations take, tensor by tensor: the peak.

On a CPU every result with memory of its own counts until its last user releases it. Small and large
blocks are counted separately, because the heap keeps the memory of small ones
(`oobleck.planner.profile.memory`). On a GPU torch's allocator counts. Must not know what is run.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oobleck.planner.profile.memory import heap_and_mapped


def peak_bytes(run: Callable[[], None], device: torch.device) -> tuple[int, int]:
    """Return the peak bytes that `run` allocates on `device`, in the heap and mapped.

    A GPU has no such difference; there the second is 0.
    """
    if device.type == "cuda":
        before: int = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        peak: int = torch.cuda.max_memory_allocated(device)
        return peak - before, 0
    footprint = Footprint()
    with footprint:
        run()
    return footprint.heap_peak_bytes, footprint.mapped_peak_bytes


class Footprint(TorchDispatchMode):
    """Context manager that records the peaks of allocations by this thread's operations in it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch does not say
        self.heap_peak_bytes = 0
        self.mapped_peak_bytes = 0
        self._heap_bytes = 0
        self._mapped_bytes = 0
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
                self._count(size, 1)
                weakref.finalize(storage, self._freed, key, size)
        self.heap_peak_bytes = max(self.heap_peak_bytes, self._heap_bytes)
        self.mapped_peak_bytes = max(self.mapped_peak_bytes, self._mapped_bytes)
        return results

    def _freed(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self._count(size, -1)

    def _count(self, size: int, times: int) -> None:
        heap, mapped = heap_and_mapped([size])
        self._heap_bytes += times * heap
        self._mapped_bytes += times * mapped


def _storages(tree: object) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
            yield leaf.untyped_storage()
