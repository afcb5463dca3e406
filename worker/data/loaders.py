"""Processes that read samples of a data set of the user's, where one thread is too slow.

They are forked, before the worker has threads of its own and torch's, and end with it however it
ends. Each calls the job's function for itself: a file that was opened before the fork would have
one position for all of them, and give the wrong bytes. One that dies is not replaced, since by then
there are threads that a fork would cut off.

Owns the processes, and the way of samples between them. Which ones are read is its owner's.
"""

import os
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import active_children, get_context
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oobleck.host.system.process import die_with_parent
from oobleck.planner.job.code import Code
from oobleck.worker.data.samples import Reader, Samples, joined
from oobleck.worker.models.tree import flatten, structure, unflatten
from oobleck.worker.runtime.errors import HelperLost

#: Between two looks at whether all processes live, while a result is waited for.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What each process reads from."""

    code: Code
    wide: bool
    key: str


class Loaders:
    """So many processes for one data set."""

    def __init__(self, code: Code, *, wide: bool, key: str, processes: int) -> None:
        """From the thread that lives as long as this process: they end with it."""
        self._key = key
        self._processes = processes
        self._pool = ProcessPoolExecutor(
            processes,
            mp_context=get_context("fork"),
            initializer=_begin,
            initargs=(os.getpid(), _Source(code=code, wide=wide, key=key)),
        )
        before = active_children()
        with warnings.catch_warnings():
            # Python's word on forks beside threads. The one that there is listens to the agent.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pool.submit(_ready)  # the first task forks all of them, in this thread
        self._children = [child for child in active_children() if child not in before]

    def stacked(self, numbers: Sequence[int], form: str) -> Samples:
        """Those samples, in this order, which must look like `form`. From any thread. Raises
        DataError, JobError, HelperLost."""
        count = min(self._processes, len(numbers))
        cuts = [len(numbers) * part // count for part in range(count + 1)]
        try:
            loads = [
                self._pool.submit(_load, numbers[begin:end], form) for begin, end in pairwise(cuts)
            ]
            return joined([_unpacked(self._result(load)) for load in loads])
        except BrokenProcessPool as error:
            raise self._lost() from error

    def _result(self, load: "Future[_Packed]") -> "_Packed":
        # The pool hears of no process that ended amid a result, which has others' pipe.
        while not wait([load], _LOOK_S).done:
            if not all(child.is_alive() for child in self._children):
                raise self._lost()
        return load.result()

    def _lost(self) -> HelperLost:
        return HelperLost(
            f"{self._key}: a process that loads samples was killed on this node, or ended by "
            "itself; where it was for want of memory, lower data.workers"
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


#: In a process that loads: what it reads from, and that opened.
_source: _Source
_reader: Reader | None = None


def _begin(parent_pid: int, source: _Source) -> None:
    global _source
    die_with_parent(parent_pid)
    torch.set_num_threads(1)
    _source = source


def _ready() -> None:
    pass


def _load(numbers: Sequence[int], form: str) -> "_Packed":
    global _reader
    if _reader is None:
        _reader = Reader(_source.code, wide=_source.wide, key=_source.key)
    _reader.form = form
    return _packed(_reader.stacked(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """Samples on their way through a pipe. torch would send tensors as descriptors of shared
    memory, of which containers have 64 MiB."""

    #: Of inputs and targets.
    structures: tuple[str, str]
    tensors: tuple[tuple["_PackedTensor", ...], tuple["_PackedTensor", ...]]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PackedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    numbers: NDArray[np.uint8]


def _packed(samples: Samples) -> _Packed:
    def tensors(tree: Any) -> tuple[_PackedTensor, ...]:
        return tuple(map(_packed_tensor, flatten(tree)))

    return _Packed(
        structures=(structure(samples.inputs), structure(samples.targets)),
        tensors=(tensors(samples.inputs), tensors(samples.targets)),
        digests=samples.digests,
    )


def _packed_tensor(tensor: Tensor) -> _PackedTensor:
    numbers = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return _PackedTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), numbers=numbers)


def _unpacked(packed: _Packed) -> Samples:
    inputs, targets = (
        unflatten(how, [torch.from_numpy(t.numbers).view(t.dtype).reshape(t.shape) for t in found])
        for how, found in zip(packed.structures, packed.tensors, strict=True)
    )
    return Samples(inputs=inputs, targets=targets, digests=packed.digests)
