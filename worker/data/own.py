"""Data set of the user, as every worker sees it: the samples of a step, and their readers.

`samples` defines what a sample may be.
"""

import hashlib
import os
import queue
import threading
import traceback
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oobleck.core.job.code import Code
from oobleck.host.ipc.marker import Marker
from oobleck.host.system.process import die_with_parent, leave_ending_to_agent
from oobleck.host.token_file import DataError
from oobleck.worker.data.objective import Order
from oobleck.worker.data.samples import Reader, Samples, joined
from oobleck.worker.models.tree import flatten, structure, unflatten
from oobleck.worker.runtime.code import Ended, mark_in
from oobleck.worker.runtime.errors import HelperLost, JobError

#: Samples whose content shows whether nodes have the same data.
_FINGERPRINTED = 16
#: Lock of all reads in this process, of any data set: an evaluation reads while the next step is
#: prefetched, and the user's code may share an open file between both.
_READING = threading.Lock()


# ---- Processes that read samples, for when one thread is too slow.
#
# All of them are forked before the worker has threads of its own, from torch or the user, and
# they end with the worker. Each calls the job's function itself: processes that share a file
# opened before the fork also share its position, and would read wrong bytes. A process that dies
# is not replaced: by then the worker has threads, which a fork would cut off. Owns the processes,
# and the transfer of samples between them; the caller decides which samples are read.


#: Interval of checks that the process lives, while its result is awaited.
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Data set that each process reads from."""

    code: Code
    wide: bool
    key: str


class Loaders:
    """Loader processes for one data set."""

    def __init__(self, code: Code, *, wide: bool, key: str, processes: int) -> None:
        """Fork the processes.

        The calling thread must live as long as this process: they end with it.
        """
        self._key = key
        source = _Source(code=code, wide=wide, key=key)
        self._children = [_forked(source) for _ in range(processes)]
        #: Processes that are reading nothing.
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        for child in self._children:
            self._idle.put(child)
        #: One thread per process, which sends it a request and waits. They start with the first
        #: task.
        self._threads = ThreadPoolExecutor(processes)

    def stacked(self, numbers: Sequence[int], form: str) -> Samples:
        """Return the samples `numbers`, in this order; each must have the `form`.

        May be called from any thread. Raise DataError, JobError or HelperLost.
        """
        count = min(len(self._children), len(numbers))
        cuts = [len(numbers) * part // count for part in range(count + 1)]
        loads = [
            self._threads.submit(self._load, numbers[begin:end], form)
            for begin, end in pairwise(cuts)
        ]
        return joined([_unpacked(load.result()) for load in loads])

    def _load(self, numbers: Sequence[int], form: str) -> "_Packed":
        """Load samples in an idle process and wait for them; runs in a thread of the pool."""
        child = self._idle.get()
        try:
            child.pipe.send((numbers, form))
            while not child.pipe.poll(_LOOK_S):
                if not child.process.is_alive():
                    raise self._lost(child)
            found = child.pipe.recv()
        except (OSError, EOFError) as error:  # the process ended, perhaps in the middle of a result
            raise self._lost(child) from error
        finally:
            self._idle.put(child)
        if isinstance(found, _Raised):
            raise found.error from _Remote(found.traceback)
        assert isinstance(found, _Packed), "there are two kinds of result"
        return found

    def _lost(self, child: "_Child") -> HelperLost | Ended:
        child.process.join(_LOOK_S)
        if verdict := child.marker.verdict(child.process.exitcode):
            return Ended(verdict)
        return HelperLost(
            f"{self._key}: a process that loads samples on this machine was killed or ended by "
            "itself; if it ran out of memory, lower data.workers"
        )

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        for child in self._children:
            child.process.kill()
            child.process.join()
            child.pipe.close()
            child.marker.close()


@dataclass(frozen=True, slots=True)
class _Child:
    process: ForkProcess
    pipe: "Connection[Any, Any]"
    #: Which code of the user the process is running.
    marker: Marker


def _forked(source: _Source) -> _Child:
    """Fork a process that reads samples for the other end of its pipe."""
    context = get_context("fork")
    here, there = context.Pipe()
    marker = Marker()
    process = context.Process(target=_serve, args=(os.getpid(), source, there, marker))
    with warnings.catch_warnings():
        # Python warns of forks beside threads. The only other thread here listens to the agent.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    there.close()  # or the pipe would outlive the process, and later forks would inherit it
    return _Child(process, here, marker)


def _serve(parent_pid: int, source: _Source, pipe: "Connection[Any, Any]", marker: Marker) -> None:
    """Serve requests for samples, in the loader process."""
    die_with_parent(parent_pid)
    mark_in(marker)
    leave_ending_to_agent()
    torch.set_num_threads(1)
    reader: Reader | None = None
    while True:
        numbers, form = pipe.recv()
        try:
            if reader is None:
                reader = Reader(source.code, wide=source.wide, key=source.key)
            reader.form = form
            found: _Packed | _Raised = _packed(reader.stacked(numbers))
        except Exception as error:  # noqa: BLE001  # raised again in the process that asked
            found = _raised(error)
        pipe.send(found)


@dataclass(frozen=True, slots=True)
class _Raised:
    """Exception that a sample raised, with its traceback as text."""

    error: Exception
    traceback: str


def _raised(error: Exception) -> _Raised:
    text = "".join(traceback.format_exception(error))
    if not isinstance(error, DataError | JobError):  # others may not pass through a pipe
        error = JobError(f"{type(error).__name__}: {error}")
    return _Raised(error, text)


class _Remote(Exception):
    """Traceback of an exception in a loader process, as the cause of the one raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Packed:
    """Samples encoded for a pipe.

    torch would send tensors as descriptors of shared memory, of which containers have 64 MiB.
    """

    #: Structures of inputs and targets.
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


# ---- The data set of the steps, which are read here or by those processes.


class OwnDataset:
    """Data set that the job's function returned, as every worker sees it."""

    def __init__(
        self,
        source: Code,
        *,
        wide: bool,
        held_out: float = 0.0,
        key: str = "data",
        loaders: Loaders | None = None,
    ) -> None:
        """Open the data set.

        `wide`: floats become float64, as the weights are. `held_out`: share of the samples, at
        least one, that are not for training. `key`: key in the job file. `loaders`: processes that
        read the samples; None: this process reads them. Raise DataError, JobError or NodeError.
        """
        self._loaders = loaders
        self._reader = Reader(source, wide=wide, key=key)
        size = self._reader.size
        self._reader.read(0)
        self.order = Order.of(size, held_out)
        if held_out < 1.0 and not self.order.trained:
            raise DataError(
                f"{key}: has {size} samples, too few to hold out a share of {held_out} and train "
                "on the others; give more"
            )
        #: 32 bytes; nodes with equal ones train on the same samples of equal data.
        self.fingerprint = self._fingerprint()

    @property
    def form(self) -> str:
        """Form of its samples, as text."""
        return self._reader.form

    def sample(self, number: int) -> tuple[Any, Any]:
        """Return (inputs, targets) of one sample, without rows."""
        return self._reader.read(number)

    def rows(self, seed: int, step: int, positions: Sequence[int], global_batch: int) -> Samples:
        """Return the samples of `step` (from 1) at `positions` of its batch.

        With loader processes, it may be called from any thread. Raise DataError, JobError or
        NodeError.
        """
        return self._stacked(self.order.of_step(seed, step, positions, global_batch))

    def held_out_rows(self, positions: Sequence[int]) -> Samples:
        """Return the held-out samples at `positions` among those held out."""
        return self._stacked(self.order.of_held_out(positions))

    def close(self) -> None:
        if self._loaders is not None:
            self._loaders.close()

    def _stacked(self, numbers: Iterable[np.uint64 | int]) -> Samples:
        wanted = [int(number) for number in numbers]
        if self._loaders is not None:
            return self._loaders.stacked(wanted, self._reader.form)
        with _READING:
            return self._reader.stacked(wanted)

    def _fingerprint(self) -> bytes:
        found = hashlib.sha256(f"{self.order}\0{self._reader.form}".encode())
        size = self.order.samples
        count = min(size, _FINGERPRINTED)
        numbers = sorted({i * (size - 1) // max(1, count - 1) for i in range(count)})
        for digest in self._stacked(numbers).digests:
            found.update(digest)
        return found.digest()
