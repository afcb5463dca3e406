"""Sums of gradients over workers: the start of each, and the place of its result.

A bucket's sum starts as soon as the last of its layers has its last micro-batch, beside the
backward of the layers below. The result goes into a buffer of its own: the worker's own sums stay
until the commit. For sums in bfloat16, a rounded copy is sent and added. The result is equal to the
bit on all owners, and is then converted to the trained type in the buffer. Must not know how
gradients are computed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Program, SyncGradient
from oobleck.worker.runtime.timeline import OpenSpan, Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.transport import Group, Pending, Transport


class _Bucket:
    """Sum of gradients. The buffer has a slice for each part, and one for all places of the tied
    part, of which there is at most one."""

    def __init__(self, sync: SyncGradient, group: Group) -> None:
        self.sync = sync
        self.group = group
        self.layers = {part.layer for part in sync.parts}
        self.pending: Pending | None = None
        self.started = False
        self.recorded: OpenSpan | None = None
        self._buffer: torch.Tensor | None = None
        #: Rounded copy that is sent; None: the buffer itself.
        self._rounded: torch.Tensor | None = None

    def begin(self) -> None:
        self.pending, self.started, self._rounded = None, False, None

    def start(self, state: ModelState, transport: Transport, dtype: torch.dtype) -> None:
        self.started = True
        tied = [part for part in self.sync.parts if part.part == "tied"]
        own = [part for part in self.sync.parts if part.part == "own"]
        alone = len(self.group) == 1
        if alone and len(tied) < 2:
            return
        parts = [*tied[:1], *([] if alone else own)]
        gradients = [state.gradient_part(part) for part in parts]
        if self._buffer is None:
            self._buffer = torch.empty(
                sum(gradient.numel() for gradient in gradients),
                dtype=gradients[0].dtype,
                device=gradients[0].device,
            )
        sizes = [gradient.numel() for gradient in gradients]
        for part, reduced in zip(parts, torch.split(self._buffer, sizes), strict=True):
            state.set_reduced(part, reduced)
        if len(tied) > 1:  # all places of a tied part are one share
            torch.cat(gradients, out=self._buffer)
            gradients = []
        for other in tied[1:]:
            total = state.reduced_part(tied[0])
            total.add_(state.gradient_part(other))
            state.set_reduced(other, total)
        if alone:
            return
        if dtype == self._buffer.dtype:
            self.pending = transport.all_reduce(self._buffer, self.group, gradients)
            return
        shares = gradients or [self._buffer]
        self._rounded = torch.cat([share.to(dtype) for share in shares])
        self.pending = transport.all_reduce(self._rounded, self.group)

    def finish(self) -> None:
        """Wait until the sum is in the buffer. Raises TransportError."""
        if self.pending is None:
            return
        self.pending.wait()
        if self._rounded is not None:
            assert self._buffer is not None, "it was rounded"
            self._buffer.copy_(self._rounded)
            self._rounded = None
        if self.recorded is not None:
            self.recorded.close()


class GradientSums:
    """Gradient sums that one worker takes part in, step after step of one generation."""

    def __init__(
        self,
        program: Program,
        rank: Mapping[WorkerId, int],
        state: ModelState,
        transport: Transport,
        timeline: Timeline,
        dtype: torch.dtype,
    ) -> None:
        """Make the sums. `dtype`: type in which they are sent."""
        self._dtype = dtype
        self._timeline = timeline
        self._state = state
        self._transport = transport
        self._buckets = [
            _Bucket(step, tuple(sorted(rank[owner] for owner in step.owners)))
            for step in program
            if isinstance(step, SyncGradient)
        ]
        self._due: dict[int, int] = {}

    @property
    def several(self) -> bool:
        """True if some sums may start while the backward of other layers continues."""
        return sum(len(bucket.group) > 1 for bucket in self._buckets) > 1

    def begin(self, due: Mapping[int, int]) -> None:
        """Begin a step in which each layer of `due` gets so many further micro-batches.

        The gradient of a layer that gets none is complete, so its sum starts at once.
        """
        self._due = dict(due)
        for bucket in self._buckets:
            bucket.begin()
        self.start_ready()

    def added(self, layer: int) -> bool:
        """Count a micro-batch of the layer. Return whether it has all, so that sums may be
        ready."""
        self._due[layer] -= 1
        return not self._due[layer]

    def start_ready(self) -> None:
        """Start the sums that are ready. Owners of several common buckets start them in the order
        of the program, so that all sum the same. Raises TransportError when a peer is lost."""
        waiting: set[Group] = set()
        for bucket in self._buckets:
            if bucket.started:
                continue
            if bucket.group in waiting or any(self._due.get(layer) for layer in bucket.layers):
                waiting.add(bucket.group)
            else:
                bucket.recorded = self._timeline.sum("sum", bucket.sync.bucket)
                bucket.start(self._state, self._transport, self._dtype)

    def check_started(self, sync: SyncGradient) -> None:
        """Check that the sum is under way at its place in the program, where its layers are
        complete."""
        bucket = next(bucket for bucket in self._buckets if bucket.sync == sync)
        assert bucket.started, f"bucket {sync.bucket} has layers that are not done"

    def as_completed(self) -> Iterator[frozenset[int]]:
        """Yield layers as their reduced gradients are complete; at the end all are. Raises
        TransportError."""
        left = Counter(layer for bucket in self._buckets for layer in bucket.layers)
        for bucket in self._buckets:
            bucket.finish()
            left.subtract(bucket.layers)
            yield frozenset(layer for layer in bucket.layers if not left[layer])
