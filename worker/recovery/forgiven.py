"""Failures that a worker does not take for the job's or its node's at once.

A step that fails for want of memory is done once more. A device that fails as a worker of the same
node is lost may have failed for that: NCCL writes into such a one's memory. Owns what is known for
both, over all generations of one worker; must not know how a generation is left.
"""

import torch

from oobleck.planner.ids import WorkerId
from oobleck.worker.membership import Membership
from oobleck.worker.runtime.errors import for_want_of_memory, whose_fault
from oobleck.worker.state.progress import TrainingProgress

#: By then a worker hears of the end of another one on its node.
_LOSS_TOLD_S = 1.0


class Forgiven:
    """Of one worker."""

    def __init__(self, worker: WorkerId, progress: TrainingProgress) -> None:
        self._worker = worker
        self._progress = progress
        #: The step committed last when memory was short; the next one is tried once more.
        self._short_after: int | None = None
        #: Where other workers of this node are in the generation too: its membership, and the step
        #: committed last when a peer was lost.
        self._beside: Membership | None = None
        self._lost_after: int | None = None

    def enter(self, membership: Membership) -> None:
        if any(peer.node == self._worker.node for peer in membership.peers):
            self._beside = membership

    def leave(self, *, orderly: bool) -> None:
        """A disorderly end is that of one that has lost a peer."""
        if self._beside is not None and not orderly:
            self._lost_after = self._progress.committed
        self._beside = None

    def short_of_memory(self, error: Exception) -> bool:
        """Whether a step has failed for want of memory, and is tried once more, with the cache
        empty then (`limit_allocator`). Then nothing that it has computed of it counts: a layer's
        gradient may have a part of a micro-batch. Not where it fails in the update, which cannot
        be taken back."""
        progress = self._progress
        in_update = progress.voted > progress.committed
        again = self._short_after == progress.committed
        if in_update or again or not for_want_of_memory(error):
            return False
        self._short_after = progress.committed
        progress.discard()
        return True

    def follows_a_loss(self, error: torch.AcceleratorError) -> bool:
        """Whether a worker that shares this one's node may have been lost since the step committed
        last: then the device's failure may come of that, and says nothing of the device."""
        if whose_fault(error) != "node":
            return False
        if self._beside is not None and self._beside.is_lost(_LOSS_TOLD_S):
            return True
        return self._lost_after == self._progress.committed
