"""Process group of NCCL, the exchange of the identifier of its members, and its abort.

NCCL's first member makes an identifier that the others must have. torch passes it on through a
store. Here that store is a table in memory, and the identifier travels over the links between
workers, which are sealed and can be given up.
"""

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions, Store, Work

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import HelperLost, NodeError, TransportError, Unmapped
from oobleck.worker.transport.transport import OPERATION_TIMEOUT

#: torch replaces an out-of-range priority by the nearest valid one.
_HIGHEST = -100


class ProcessGroup(Protocol):
    """Part of ProcessGroupNCCL that is used."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Begin to connect; returns before the others have arrived."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> Work: ...

    def alltoall(
        self, received: list[Tensor], sent: list[Tensor], options: AllToAllOptions
    ) -> Work:
        """Send and receive a tensor per member; an empty tensor is not sent."""

    def abort(self) -> None: ...


class Identifiers(Store):
    """Identifiers that the first member of a group has written, for that group."""

    def __init__(self, written: Mapping[str, bytes] | None = None) -> None:
        """Make it. `written`: the first member's entries; None: this is the first member's own."""
        super().__init__()
        self.written = dict(written or {})

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch gives bytes
        self.written[key] = bytes(value)

    def get(self, key: str) -> bytes:
        """Return an entry. Raises KeyError at once: a missing one will never arrive."""
        return self.written[key]

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.written for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if not self.check(keys):
            raise KeyError(f"nothing is known as {', '.join(keys)}")


class Mark(Protocol):
    """Mark in the device's queue."""

    def query(self) -> bool:
        """Return whether everything that was queued before it is done."""


class GroupMaker(Protocol):
    """Maker of process groups on one device."""

    def mark(self) -> Mark:
        """Put a mark behind what this thread has queued on the device so far."""

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> ProcessGroup:
        """Make a group. `rank`: this member's number, of `size`; `most_ctas`: most multiprocessors
        of an operation."""

    def take_stream(self) -> int:
        """Take the next stream of the groups' pool and return it. The next group that connects
        takes the one after it."""


class NcclMaker:
    """Maker of NCCL's process groups."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> ProcessGroup:
        """Make a group whose communicator is made without waiting for the other members."""
        from torch._C._distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs lack it

        options = ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        options.config.blocking = 0
        # Limit channels, and so their buffers: many groups must fit into memory together.
        options.config.max_ctas = most_ctas
        # Take streams of the high-priority pool, which nothing else uses.
        options.is_high_priority_stream = True
        return ProcessGroupNCCL(identifiers, rank, size, options)  # type: ignore[return-value]  # stubs

    def mark(self) -> torch.Event:
        return torch.accelerator.current_stream(self._device).record_event()

    def take_stream(self) -> int:
        # The highest priority, which that pool has.
        return torch.cuda.Stream(self._device, priority=_HIGHEST).cuda_stream  # type: ignore[no-untyped-call]  # no types


def use_device(device: torch.device) -> None:
    """Make this thread use that GPU. Otherwise its first call of CUDA would allocate memory on the
    first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


# ---- Aborts of NCCL's groups, each in a thread of its own.
#
# Freeing a communicator may wait for the kernels of others on the same GPU, which end only by the
# abort of theirs (pytorch/pytorch#119797). So all aborts run at once, and none in a thread that
# is waited for. A user of the GPU's memory waits for all of them, up to a limit.
#
# Also tells the causes of NCCL's errors apart.


# ---- Causes of NCCL's errors: a peer, this GPU, this host, or lack of memory.
#
# torch raises one type of exception for all. Its text has NCCL's result by name, and after "Last
# error:" NCCL's last warning, which may be about something else. So the result decides, and the
# warning only where the result is ambiguous:
#
# - ncclUnhandledCudaError: CUDA has failed in this process. The GPU is sick, or it has no memory
#   left, or the memory of a peer could not be mapped. In that case the peer has just ended, or the
#   host does not allow mapping.
# - ncclSystemError: a socket, and so a peer; or a resource that this host lacks.
# - All else (ncclRemoteError, ncclInternalError, a call on an aborted group): a peer.


#: The C++ source position before one of torch's messages, and its advice after it.
_DECORATION = re.compile(r"^\[[^]]*\.(?:cc|h):\d+\] |\. This is typically caused.*$")
_RESULT = re.compile(r"\b(nccl[A-Z]\w+): ")
_WARNING = re.compile(r"^Last error:\s*(\S.*?)\s*$", re.MULTILINE)
_CUDA_FAILED = ("ncclUnhandledCudaError", "unhandled cuda error")
_NO_MEMORY = re.compile(r"out of memory|CUDA \w*alloc")
#: CUDA's errors when mapping memory that another process has shared and that is gone.
_UNMAPPED = re.compile(
    r"'(?:invalid argument|invalid resource handle|mapping of buffer object failed)'|peer access"
)
#: Shortages of the host, each with its fix.
_SHORT_OF = {
    "No space left on device": "give /dev/shm more room",
    "Too many open files": "raise the limit of open files (ulimit -n)",
    "Cannot allocate memory": "raise the limit of locked memory (ulimit -l)",
}


@contextlib.contextmanager
def peers_may_fail() -> Iterator[None]:
    """Wrap a call of NCCL.

    The device's own errors are raised unchanged. NCCL's become TransportError if a peer is gone,
    Unmapped if that or the host may be the cause, torch.AcceleratorError if the GPU is sick,
    NodeError if the host lacks something, and torch.OutOfMemoryError if the GPU lacks memory.
    """
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except RuntimeError as error:
        raise judged(error) from None


def judged(
    error: RuntimeError,
) -> TransportError | NodeError | torch.AcceleratorError | torch.OutOfMemoryError:
    """Return the error to raise in place of torch's error."""
    text = str(error)
    result, warning = _RESULT.search(text), _WARNING.search(text)
    last = warning[1] if warning else ""
    reason = _DECORATION.sub("", text.partition("\n")[0])
    if result:
        reason = f"NCCL: {result[1]}" + (f" ({last})" if last else "")
    if any(words in text for words in _CUDA_FAILED):
        if _NO_MEMORY.search(last):
            return torch.OutOfMemoryError(reason)
        return Unmapped(reason) if _UNMAPPED.search(last) else torch.AcceleratorError(reason)
    if result and result[1] == "ncclSystemError":
        for lack, fix in _SHORT_OF.items():
            if lack in last:
                return NodeError(f"{reason}; {fix}")
    return TransportError(reason)


#: Aborts take a fraction of a second with a healthy driver. That of a connecting group waits until
#: NCCL stops connecting (TORCH_NCCL_NONBLOCKING_TIMEOUT, which agents set).
ABORT_LIMIT_S = 60.0
#: Interval of checks whether the wait is still wanted.
_POLL_S = 0.1


class Aborts:
    """Aborts of one worker."""

    def __init__(
        self, device: torch.device, limit_s: float = ABORT_LIMIT_S, *, replaced: bool = False
    ) -> None:
        """Make it. `replaced`: this worker's process was replaced before."""
        self._device = device
        self._replaced = replaced
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    def begin(self, groups: Iterable[ProcessGroup]) -> None:
        """Abort the groups; return at once. Callable from any thread."""
        started = []
        for group in groups:
            # Daemons: one that is stuck in the driver must not hold up the end of the process.
            thread = threading.Thread(target=self._abort, args=(group,), name="abort", daemon=True)
            thread.start()
            started.append(thread)
        with self._lock:
            self._threads = [each for each in (*self._threads, *started) if each.is_alive()]

    def wait_for(self, thread: threading.Thread) -> None:
        """Add a thread that was left in a call of NCCL's to those that `settle` waits for; an abort
        is to end that group."""
        with self._lock:
            self._threads.append(thread)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all have ended.

        Raises HelperLost if one does not: the process must end, and with it its GPU memory, before
        anything else can be computed there. Raises NodeError if the process was replaced before.
        Raises the errors of `check`, which is called meanwhile; the next call then waits again.
        """
        with self._lock:
            threads = list(self._threads)
        end_at = time.monotonic() + self._limit_s
        for thread in threads:
            while thread.is_alive() and time.monotonic() < end_at:
                check()
                with pulse.WAITING:
                    thread.join(_POLL_S)
        if stuck := sum(thread.is_alive() for thread in threads):
            reason = (
                f"{stuck} of NCCL's communicators did not end within {self._limit_s:g} s of their "
                "abort"
            )
            if self._replaced:
                raise NodeError(
                    f"{reason}, and the worker's process was replaced before; check the GPU's "
                    "driver (dmesg, nvidia-smi)"
                )
            raise HelperLost(f"{reason}; the worker's process is replaced")

    def _abort(self, group: ProcessGroup) -> None:
        use_device(self._device)
        # It raises if the group never connected or its GPU is gone; then there is nothing to end.
        with contextlib.suppress(RuntimeError):
            group.abort()
