"""Receiver of the layers that a coming plan gives to this worker, ahead of the plan.

Each source feeds pieces of layers and the updates that follow. A thread replays the updates, so
that the copies equal the sources' own bit for bit. The copies count for no worker until the plan is
entered. Must not know plans.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import msgspec
import torch

from oobleck.core.job.spec import TrainingSpec
from oobleck.core.routes import Shard
from oobleck.worker.preparation.source import (
    ACKNOWLEDGED,
    NUMBERS,
    REFUSED,
    Applied,
    Copied,
    Item,
    Left,
    Offered,
    Over,
    Reduced,
    decoder,
)
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.state.layer_state import LayerState
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.optimizer import Slice, update
from oobleck.worker.state.precision import state_dtype
from oobleck.worker.state.progress import Omissions
from oobleck.worker.transport.links.hub import Feeding, Links
from oobleck.worker.transport.links.link import Content, Incoming
from oobleck.worker.transport.links.wire import Label, bytes_of

log = logging.getLogger(__name__)

_NOTHING = memoryview(b"")


class _Piece:
    """Part of a layer that one source feeds."""

    def __init__(self, state: LayerState, span: tuple[Fraction, Fraction], version: int) -> None:
        self.state = state
        self.span = span
        self.numbers = state.layout.share(*span)
        self.version = version
        #: Gradient of the step under way.
        self.gradient: torch.Tensor | None = None


class _Stream:
    """Stream of frames and items from one source.

    Frames arrive with the links' lock held; items are queued for the sink's thread.
    """

    def __init__(
        self,
        source: bytes,
        job: TrainingSpec,
        items: "queue.SimpleQueue[_CompleteItem | None]",
        refuse: Callable[[], None],
        most_numbers: int,
    ) -> None:
        """Begin a stream. Called with the links' lock held.

        `refuse`: asks the source to send no more. `most_numbers`: most numbers in an item.
        """
        self.source = source
        self.pieces: dict[int, _Piece] = {}
        #: The source's last item, once all items before it are applied.
        self.over: Over | None = None
        #: Whether something invalid arrived; then the whole stream is ignored.
        self.broken = False
        self._rows = 1 + job.optimizer.moments
        self._dtype = state_dtype(job.precision)
        self._items = items
        self._refuse = refuse
        self._most_numbers = most_numbers
        self._head: Item | None = None
        self._numbers = torch.empty(0)
        self._room = memoryview(b"")

    def frame(self, label: Label) -> Incoming | None:
        if self.broken:
            return None
        return _Numbers(self) if label == NUMBERS else Content(self._read_head)

    def _read_head(self, content: bytes) -> None:
        self._head, self._room = None, _NOTHING  # the item before may have been withdrawn half-sent
        try:
            head = decoder.decode(content)
        except msgspec.MsgspecError as error:
            self._break(str(error))
            return
        if not isinstance(head, Copied | Reduced):
            self._items.put(_CompleteItem(self, head, None))
            return
        if not 0 <= head.count <= self._most_numbers:
            self._break(f"{head.count} numbers")
            return
        shape = (self._rows, head.count) if isinstance(head, Copied) else (head.count,)
        try:
            self._numbers = torch.empty(shape, dtype=self._dtype)
        except RuntimeError as error:  # out of memory
            self._break(str(error))
            return
        self._head = head
        self._room = bytes_of(self._numbers)
        self._check_whole()

    def room(self, size: int) -> memoryview:
        if size > len(self._room):
            self._break(f"{size} bytes of {len(self._room)}")
            return memoryview(bytearray(size))
        room, self._room = self._room[:size], self._room[size:]
        return room

    def _check_whole(self) -> None:
        if not self._room and self._head is not None:
            head, self._head = self._head, None
            self._items.put(_CompleteItem(self, head, self._numbers))

    def took(self) -> None:
        self._check_whole()

    def _break(self, why: str) -> None:
        log.error("invalid state received", extra={"detail": why})
        self.broken = True
        self._refuse()


@dataclass(frozen=True, slots=True)
class _CompleteItem:
    """Complete item."""

    stream: _Stream
    head: Item
    numbers: torch.Tensor | None


class _Numbers(Incoming):
    def __init__(self, stream: _Stream) -> None:
        self._stream = stream

    def room(self, size: int) -> memoryview:
        return self._stream.room(size)

    def arrived(self) -> None:
        self._stream.took()


class Sink:
    """Receiver of everything that is fed to this worker for one coming plan."""

    def __init__(
        self,
        links: Links,
        feeding: Feeding,
        state: ModelState,
        training: TrainingSpec,
        shards: Iterable[Shard],
    ) -> None:
        """Begin without streams. `shards`: shards that the worker holds in the plan."""
        self._links = links
        self._feeding = feeding
        self._state = state
        self._training = training
        self._shards = {shard.layer: shard for shard in shards}
        # No piece is larger than this worker's part of a layer.
        parts = [state.share(one.layer, one.start, one.stop) for one in self._shards.values()]
        self._most_numbers = max((sum(map(len, numbers)) for numbers in parts), default=0)
        self._layers: dict[int, LayerState] = {}
        self._streams: dict[bytes, _Stream] = {}
        self._items: queue.SimpleQueue[_CompleteItem | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def frame(self, source: bytes, label: Label) -> Incoming | None:
        """Return the destination of a frame from `source`. Called with the links' lock held."""
        stream = self._streams.get(source)
        if stream is None:
            refuse = partial(self._answer, source, REFUSED, _NOTHING)
            stream = _Stream(source, self._training, self._items, refuse, self._most_numbers)
            self._streams[source] = stream
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="feeding", daemon=True)
                self._thread.start()
        return stream.frame(label)

    def cut(self, source: bytes) -> None:
        """Mark the stream of `source` as broken, because frames were lost.

        Called with the links' lock held.
        """
        if (stream := self._streams.get(source)) is not None:
            stream.broken = True

    @property
    def feeders(self) -> frozenset[bytes]:
        """Identities of the sources that have sent something."""
        return frozenset(self._streams)

    def is_over(self) -> bool:
        """Return whether no source will send more. Called with the links' lock held."""
        return all(
            stream.over is not None or stream.broken or not self._links.linked(stream.source)
            for stream in self._streams.values()
        )

    def last_words(self) -> list[Over]:
        """Return the last item (`Over`) of each source that sent it in time."""
        return [stream.over for stream in self._known() if stream.over is not None]

    def _known(self) -> list[_Stream]:
        with self._links.lock:
            return list(self._streams.values())

    def whole_layers(self, step: int, *, anew: bool) -> list[LayerState]:
        """Return the layers that are complete at `step`, including parts already held here.

        With `anew`, ignore what this worker holds.
        """
        own = () if anew else (self._state.layers, self._state.former)
        fed: dict[int, list[tuple[Fraction, Fraction]]] = {}
        for stream in self._known():
            if stream.broken or stream.over is None:
                continue
            for piece in stream.pieces.values():
                if piece.version == step:
                    fed.setdefault(piece.state.shard.layer, []).append(piece.span)
        whole = []
        for layer, spans in fed.items():
            held = [one[layer] for one in own if layer in one]
            spans += [(one.shard.start, one.shard.stop) for one in held if one.version == step]
            state = self._layers[layer]
            if _cover(spans, state.shard) and all(one.version == step for one in held):
                state.version = step
                whole.append(state)
        return whole

    def close(self) -> None:
        """Stop taking items."""
        for stream in self._known():
            stream.broken = True
        self._items.put(None)

    # ---- the thread

    def _serve(self) -> None:
        while (item := self._items.get()) is not None:
            stream = item.stream
            if stream.broken:
                continue
            try:
                self._take(stream, item.head, item.numbers)
            except Exception:  # the source controls its content
                log.exception("received state cannot be applied")
                stream.broken = True
                self._answer(stream.source, REFUSED, _NOTHING)
            if stream.broken or stream.over is not None:
                self._links.wake()

    def _take(self, stream: _Stream, head: Item, numbers: torch.Tensor | None) -> None:
        match head:
            case Offered():
                self._acknowledge(stream, 0)
            case Copied():
                assert numbers is not None, "a Copied item has numbers"
                self._copy(stream, head, numbers)
            case Reduced(piece=number, step=step):
                piece = stream.pieces.get(number)
                if piece is not None and piece.version == step - 1:
                    piece.gradient = numbers
            case Applied(step=step):
                for number, piece in list(stream.pieces.items()):
                    if piece.version == step - 1:
                        self._apply(stream, number, piece, head)
                self._acknowledge(stream, step)
            case Left(piece=number):
                stream.pieces.pop(number, None)
            case Over():
                stream.over = head

    def _copy(self, stream: _Stream, head: Copied, numbers: torch.Tensor) -> None:
        state = self._layers.get(head.layer)
        if state is None:
            state = self._state.make(self._shards[head.layer], version=head.version)
            self._layers[head.layer] = state
        piece = _Piece(state, head.span, head.version)
        if sum(map(len, piece.numbers)) != head.count:
            raise ValueError(f"{head.count} numbers for {piece.numbers} of layer {head.layer}")
        offset = 0
        for part in piece.numbers:
            columns = state.columns(part)
            state.storage[:, columns] = numbers[:, offset : offset + len(part)]
            offset += len(part)
        stream.pieces[head.piece] = piece

    def _apply(self, stream: _Stream, number: int, piece: _Piece, head: Applied) -> None:
        step, scale = head.step, head.scale
        if scale is not None:
            if piece.gradient is None:
                del stream.pieces[number]
                return
            gradient = piece.gradient.to(piece.state.storage.device).mul_(scale)
            omitted = Omissions(unused=head.unused, missed=head.missed)
            apart = self._state.apart(piece.state.shard.layer, omitted)
            offset = 0
            slices: list[Slice] = []
            for part in piece.numbers:
                if part:
                    of_part = gradient[offset : offset + len(part)]
                    slices += piece.state.slices_of(part, of_part, apart)
                offset += len(part)
            update(slices, self._training, step)
        piece.gradient, piece.version = None, step

    def _acknowledge(self, stream: _Stream, step: int) -> None:
        self._answer(stream.source, ACKNOWLEDGED, memoryview(step.to_bytes(8, "big")))

    def _answer(self, source: bytes, label: Label, content: memoryview) -> None:
        # Without a link, both sides know of its end, and nobody waits for the answer.
        with self._links.lock, contextlib.suppress(TransportError):
            self._links.send_ahead(self._feeding, source, label, content)


def _cover(spans: Iterable[tuple[Fraction, Fraction]], shard: Shard) -> bool:
    reached = shard.start
    for start, stop in sorted(spans):
        if start > reached:
            return False
        reached = max(reached, stop)
    return reached >= shard.stop
