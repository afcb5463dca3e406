"""Copies of layers in host memory, made by a thread while training goes on.

Data on a GPU passes through a ring of a few pinned buffers, on a stream of its own. The copies run
beside the kernels of the next step, and only the ring is pinned, however large the state is. Data
in host memory is copied directly. An update waits until all is read (`ModelState.read_until`);
forward and backward change no weights. Must not know who uses the copies.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from oobleck.worker.runtime.device import has_queue, mark_queued

#: Buffers of a ring: the GPU fills one while the host empties another.
SLOTS = 4
SLOT_BYTES = 16 << 20


class Ring:
    """Ring of buffers through which tensors move from a device to host memory."""

    def __init__(
        self,
        device: torch.device,
        *,
        everything: bool = False,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """Allocate the buffers.

        `everything`: host tensors use the ring too, so that the same path runs without a device.
        """
        self._device = device
        queued = has_queue(device)
        self._slots: list[Tensor] = []
        if queued or everything:
            self._slots = [
                torch.empty(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=queued)
                for _ in range(slots)
            ]
        self._stream = torch.Stream(device) if queued else None
        #: Held because an abandoned checkpoint may still be copied when the next one begins.
        self._lock = threading.Lock()

    @property
    def slots(self) -> int:
        """Number of buffers; 0: tensors are copied directly."""
        return len(self._slots)

    def mark(self) -> torch.Event | None:
        """Return an event after all work queued on the device so far; None without a queue."""
        return mark_queued(self._device)

    def copy(self, source: Tensor, into: Tensor, after: torch.Event | None = None) -> None:
        """Copy `source` (r, n) to `into`, in host memory, and wait for it; rows are contiguous.

        The copy waits for `after`; None: for all work queued so far.
        """
        if not self._slots:
            into.copy_(source)
            return
        after = after or self.mark()
        with self._lock, self._beside(after):
            for row, place in zip(source, into, strict=True):
                self._copy_row(row, place)

    @contextmanager
    def _beside(self, after: torch.Event | None) -> Iterator[None]:
        """Queue the block's work on the ring's own stream, after `after`."""
        with self._stream or nullcontext():
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            yield

    def _copy_row(self, row: Tensor, into: Tensor) -> None:
        width = self._slots[0].nbytes // row.itemsize
        #: Copies in flight: buffer, destination, and the event of the copy's end.
        in_flight: deque[tuple[Tensor, Tensor, torch.Event | None]] = deque()
        pieces = zip(torch.split(row, width), torch.split(into, width), strict=True)
        for number, (piece, place) in enumerate(pieces):
            if len(in_flight) == self.slots:
                _take(*in_flight.popleft())
            slot = self._slots[number % self.slots][: piece.nbytes].view(piece.dtype)
            slot.copy_(piece, non_blocking=True)
            in_flight.append((slot, place, self.mark()))
        while in_flight:
            _take(*in_flight.popleft())


def _take(slot: Tensor, place: Tensor, copied: torch.Event | None) -> None:
    if copied is not None:
        copied.synchronize()
    place.copy_(slot)


class Snapshots:
    """Snapshots of the layers that a worker writes, as they were when they were added."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._sources: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self._after = ring.mark()
        self._read = threading.Event()

    def add(self, layer: int, state: Tensor) -> None:
        """Add `state`, (1 + moments, n), for `make` to copy.

        It must not change until `wait` returns.
        """
        self._sources[layer] = state

    def add_copy(self, layer: int, copy: Tensor) -> None:
        """Add a finished copy."""
        self._made[layer] = copy

    def make(self) -> None:
        """Copy all that was added. Once it returns or raises, the tensors may change."""
        try:
            for layer, state in sorted(self._sources.items()):
                copy = torch.empty(state.shape, dtype=state.dtype, device="cpu")
                self._ring.copy(state, copy, self._after)
                self._made[layer] = copy
        finally:
            self._sources.clear()
            self._read.set()

    def wait(self) -> None:
        """Wait until everything was read."""
        self._read.wait()

    def take(self, layer: int) -> Tensor:
        """Return the copy of `layer` and drop it here."""
        return self._made.pop(layer)

    def clear(self) -> None:
        self._made.clear()
