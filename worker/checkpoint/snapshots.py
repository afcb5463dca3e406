"""Copies of layers in host memory, made by a thread while training goes on.

What is on a GPU passes through a ring of a few pinned buffers, on a stream of its own: such copies
run beside the kernels of the next step, and however large the state is, no more host memory than
the ring is pinned. What is in host memory is copied as it is. Until all is read an update waits
(`ModelState.read_until`); forward and backward change no weights. Must not know what becomes of the
copies.
"""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

#: Of a ring: a GPU's link fills one buffer while the host empties another.
SLOTS = 4
SLOT_BYTES = 16 << 20


class Ring:
    """Buffers through which tensors of a device get to host memory."""

    def __init__(
        self,
        device: torch.device,
        *,
        everything: bool = False,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        """`everything`: host tensors pass through it as well, so that a host without a device runs
        the same path."""
        self._device = device
        self._cuda = device.type == "cuda"
        self._slots: list[Tensor] = []
        if self._cuda or everything:
            self._slots = [
                torch.empty(slot_bytes, dtype=torch.uint8, device="cpu", pin_memory=self._cuda)
                for _ in range(slots)
            ]
        self._stream = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]  # torch's
        #: A checkpoint that was given up may still be copied when the next one is begun.
        self._lock = threading.Lock()

    @property
    def slots(self) -> int:
        """Buffers; without any, tensors are copied as they are."""
        return len(self._slots)

    def mark(self) -> torch.cuda.Event | None:
        """Return an event behind all that is queued on the device by now; None without CUDA."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, source: Tensor, into: Tensor, after: torch.cuda.Event | None = None) -> None:
        """Have `source` (r, n) in `into`, in host memory, when this returns; rows are contiguous.
        `after`: what is queued by then comes before; None: what is queued by now."""
        if not self._slots:
            into.copy_(source)
            return
        after = after or self.mark()
        with self._lock, self._beside(after):
            for row, place in zip(source, into, strict=True):
                self._copy_row(row, place)

    @contextmanager
    def _beside(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """Queue the block's work on the ring's own stream, behind `after`."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and after is not None:
                self._stream.wait_event(after)
            yield

    def _copy_row(self, row: Tensor, into: Tensor) -> None:
        width = self._slots[0].nbytes // row.itemsize
        #: On their way into a buffer, and where each goes from there.
        coming: deque[tuple[Tensor, Tensor, torch.cuda.Event | None]] = deque()
        pieces = zip(torch.split(row, width), torch.split(into, width), strict=True)
        for number, (piece, place) in enumerate(pieces):
            if len(coming) == self.slots:
                _take(*coming.popleft())
            slot = self._slots[number % self.slots][: piece.nbytes].view(piece.dtype)
            slot.copy_(piece, non_blocking=True)
            coming.append((slot, place, self.mark()))
        while coming:
            _take(*coming.popleft())


def _take(slot: Tensor, place: Tensor, come: torch.cuda.Event | None) -> None:
    if come is not None:
        come.synchronize()
    place.copy_(slot)


class Snapshots:
    """Snapshots of the layers that a worker writes, as they are when they are added."""

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._sources: dict[int, Tensor] = {}
        self._made: dict[int, Tensor] = {}
        self._after = ring.mark()
        self._read = threading.Event()

    def add(self, layer: int, state: Tensor) -> None:
        """Add `state`, (1 + moments, n), to be copied by `make`; nobody changes it until it was
        read."""
        self._sources[layer] = state

    def add_copy(self, layer: int, copy: Tensor) -> None:
        """Made already."""
        self._made[layer] = copy

    def make(self) -> None:
        """Copy all that was added. Whatever it raises, nothing is read any more after it."""
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
        """The copy of `layer`, which is not kept here any more."""
        return self._made.pop(layer)

    def clear(self) -> None:
        self._made.clear()
