"""Failures that are not blamed on the job or the node at once.

- A step that runs out of memory is repeated once, and so is entering a generation. If it fails
  again, the job is at fault; or the node, if other processes hold memory of the GPU.
- Memory of another process that cannot be mapped may belong to a process that has ended.
- The loss of a worker can make the device of another worker on its node fail, because NCCL writes
  into the lost worker's memory. The failure may be seen before the loss, so the verdict waits for
  news of one.

Owns the evidence for these cases, over all generations of one worker. Must not know how a
generation is left.
"""

import time
from collections import deque
from collections.abc import Callable

import torch

from oobleck.core.ids import WorkerId
from oobleck.core.units import format_bytes
from oobleck.worker.membership import Membership
from oobleck.worker.runtime.errors import (
    NodeError,
    TransportError,
    Unmapped,
    for_want_of_memory,
    whose_fault,
)
from oobleck.worker.state.progress import TrainingProgress

#: Most retries for lack of memory within so many steps. Each costs all workers a meeting and most
#: of a step, so a job that needs more should be changed.
_MOST_SHORT = 3
_SHORT_WITHIN = 100

#: Longest time until a worker learns that another one on its node has ended. The kernel frees a
#: process's memory before it closes its links, and a busy machine is slow. A faulty GPU is reported
#: only after this wait.
_LOSS_KNOWN_S = 5.0
_POLL_S = 0.05


class Forgiven:
    """Record of the failures after which one worker may continue without being replaced."""

    def __init__(
        self,
        worker: WorkerId,
        progress: TrainingProgress,
        held_by_others: Callable[[], int] = lambda: 0,
    ) -> None:
        """Begin.

        `held_by_others`: returns the bytes of this worker's device that other processes hold.
        """
        self._worker = worker
        self._held_by_others = held_by_others
        self._progress = progress
        #: Newest committed step at each lack of memory; the step after it was retried.
        self._short_after: deque[int] = deque(maxlen=_MOST_SHORT)
        #: Newest step whose record was reported, while this worker trains.
        self.recorded = 0
        #: Processes of the last meeting in which memory could not be mapped; None: there was none.
        self._unmapped_with: tuple[str, ...] | None = None
        #: Membership of the newest generation, if it has other workers on this node.
        self._beside: Membership | None = None
        #: Newest committed step when a generation in `_beside` ended with a loss.
        self._lost_after: int | None = None

    def enter(self, membership: Membership) -> None:
        neighbours = any(peer.node == self._worker.node for peer in membership.peers)
        self._beside = membership if neighbours else None

    def leave(self, *, after_a_loss: bool) -> None:
        """Record the end of the generation.

        `after_a_loss`: this worker saw a loss, or the master pushed an abrupt change, which may
        arrive before the links close.
        """
        if self._beside is not None and after_a_loss:
            self._lost_after = self._progress.committed

    def short_of_memory(self, error: Exception, *, training: bool) -> bool:
        """Return whether memory was short and the failed work may be retried, with an empty cache.

        The retry (see `limit_allocator`) discards all that was computed of the step, because a
        gradient may include part of a micro-batch. Return False during the update, which cannot be
        undone, and before its record is reported. There is only one retry per committed step, and a
        limit over many steps.

        `training`: the failure occurred in a generation; on entering one, it is the node's fault.
        Raise NodeError if the node is at fault, or torch.OutOfMemoryError with the number of
        failures.
        """
        progress = self._progress
        in_update = progress.voted > progress.committed
        unrecorded = training and progress.committed > self.recorded
        if not for_want_of_memory(error) or in_update or unrecorded:
            return False
        step = progress.committed
        line = str(error).partition("\n")[0] or type(error).__name__
        again = step in self._short_after
        lately = [each for each in self._short_after if each > step - _SHORT_WITHIN]
        if again or len(lately) >= _MOST_SHORT:
            often = (
                "twice in a row" if again else f"{_MOST_SHORT + 1} times in {_SHORT_WITHIN} steps"
            )
            if training and (held := self._held_by_others()):
                raise NodeError(
                    f"{self._worker} was out of memory, {often} ({line}), and "
                    f"{format_bytes(held)} of its GPU are neither torch's nor NCCL's; end other "
                    "processes there (nvidia-smi), or start its agent with other --gpus"
                ) from error
            if training:
                raise torch.OutOfMemoryError(f"{line}; {often}") from error
            raise NodeError(
                f"{self._worker} was out of memory as it met the others, {often} ({line}); look at "
                "other users of its memory (nvidia-smi, free), or set resources.memory_per_worker "
                "to the free amount, so that the plan uses more nodes"
            ) from error
        self._short_after.append(step)
        if training:
            progress.discard()
        return True

    def check_mapped(self, error: TransportError, present: tuple[str, ...]) -> None:
        """Raise NodeError if memory cannot be mapped again, although no process has ended since.

        `present`: cards of the processes that met.
        """
        if not isinstance(error, Unmapped):
            return
        if present == self._unmapped_with:
            raise NodeError(
                f"{error}: {self._worker.node} does not let its processes map each other's GPU "
                "memory; if they are in containers, give these one IPC and PID namespace (docker "
                "run --ipc=host --pid=host), else start the agent with NCCL_P2P_DISABLE=1"
            ) from error
        self._unmapped_with = present

    def follows_a_loss(self, error: torch.AcceleratorError, overruled: Callable[[], bool]) -> bool:
        """Return whether the device's failure may come from the loss of a worker on this node.

        That is so if a loss was seen since the newest committed step, or is seen within
        `_LOSS_KNOWN_S`. `overruled`: returns whether the master pushed an abrupt change, as after a
        loss.
        """
        if whose_fault(error) != "node":
            return False
        if self._lost_after == self._progress.committed:
            return True
        if self._beside is None:
            return False
        deadline = time.monotonic() + _LOSS_KNOWN_S
        while not (self._beside.is_lost(_POLL_S) or overruled()):
            if time.monotonic() > deadline:
                return False
        return True
