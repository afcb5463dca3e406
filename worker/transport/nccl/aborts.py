"""Aborts of NCCL's groups, each in a thread of its own.

Freeing a communicator may wait for the kernels of others on the same GPU, which end only by the
abort of theirs (pytorch/pytorch#119797). So all aborts run at once, and none in a thread that is
waited for. A user of the GPU's memory waits for all of them, up to a limit.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable

import torch

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import HelperLost, NodeError
from oobleck.worker.transport.nccl.group import ProcessGroup, use_device

#: Aborts take a fraction of a second with a healthy driver. That of a connecting group waits until
#: NCCL stops connecting (TORCH_NCCL_NONBLOCKING_TIMEOUT, which agents set).
LIMIT_S = 60.0
#: Interval of checks whether the wait is still wanted.
_POLL_S = 0.1


class Aborts:
    """Aborts of one worker."""

    def __init__(
        self, device: torch.device, limit_s: float = LIMIT_S, *, replaced: bool = False
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
            told = (
                f"{stuck} of NCCL's communicators did not end within {self._limit_s:g} s of their "
                "abort"
            )
            if self._replaced:
                raise NodeError(
                    f"{told}, and the worker's process was replaced before; check the GPU's "
                    "driver (dmesg, nvidia-smi)"
                )
            raise HelperLost(f"{told}; the worker's process is replaced")

    def _abort(self, group: ProcessGroup) -> None:
        use_device(self._device)
        # It raises where the group never connected, or its GPU is gone: nothing is left to end.
        with contextlib.suppress(RuntimeError):
            group.abort()
