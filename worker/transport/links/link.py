"""Connection to one peer, kept from one meeting to the next.

Frames wait here by priority until the kernel takes them. Incoming content goes to its waiting
place, or into a buffer until there is one. No call here blocks. At the end of a meeting, frames
that are not begun are dropped and a half-sent one is finished from a copy. A half-received one is
read to its end and discarded. So the connection stays usable for the next one. Must not know the
purpose of frames.
"""

import contextlib
import fcntl
import logging
import socket
import struct
import sys
import termios
import time
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Protocol

import numpy as np

from oobleck.worker.transport.links.greeting import Seals
from oobleck.worker.transport.links.wire import (
    ABOUT_LINKS,
    BACKGROUND,
    FEEDING,
    HEADER,
    LEAVING,
    ClearWire,
    Kind,
    Label,
    SealedWire,
    Wire,
    check_header,
    priority_of,
)

#: Bytes read at once. Frames no larger are copied out of it, larger ones are read in place.
_BUFFER_BYTES = 64 << 10
#: Place of unwanted content, shared by all links.
_SCRATCH = memoryview(bytearray(256 << 10))
#: Bytes read from one link, or written to it, before others are served.
_TURN_BYTES = 1 << 20
#: Most bytes of frames for meetings that this worker has not entered, beside the words of arrival:
#: before all have arrived, no more is sent.
_MOST_AHEAD_BYTES = 1 << 20
#: Most bytes of frames of the present meeting that are not waited for yet; the default of a link's
#: maker.
#:
#: Beyond the limit the link ends. To stop reading instead could block both ends for ever, since a
#: frame that is waited for may be behind the others.
MOST_EARLY_BYTES = 1 << 30
#: Approximate memory of a waiting frame beside its content.
_FRAME_BYTES = 1 << 10
_PRIORITY_COUNT = BACKGROUND + 1
#: Most unsent bytes in the kernel: more would delay urgent frames.
_UNSENT_BYTES = 256 << 10
_TCP_NOTSENT_LOWAT = 25
#: Congestion control within a host, where nothing is congested. A system's paced default (BBR)
#: would take a third more processor time; this one is in every kernel, and needs no rights.
_WITHIN_A_HOST = b"reno"
#: Most bytes in flight for background frames to be sent: the link's bytes in this time, or this
#: minimum. An urgent frame may be delayed by them at a bottleneck further on.
_IN_FLIGHT_S = 0.005
_IN_FLIGHT_BYTES = 256 << 10
#: `tcpi_delivery_rate`, bytes a second, in Linux' struct tcp_info.
_TCP_INFO_BYTES = 168
_DELIVERY_RATE = struct.Struct("@160xQ")

log = logging.getLogger(__name__)


class Outgoing:
    """Frame on its way out, from the caller's own memory."""

    __slots__ = ("done", "epoch", "given_up", "kind", "left", "started")

    def __init__(self, epoch: int, label: Label, *content: memoryview) -> None:
        """Make a frame. `content`: consecutive pieces of memory."""
        self.epoch = epoch
        self.kind = label.kind
        self.left = [memoryview(HEADER.pack(epoch, *label, sum(map(len, content))))]
        self.left += filter(None, content)
        self.started = False
        self.given_up = False
        #: True if the kernel has taken all of it. Never for one that was given up.
        self.done = False

    def own_the_rest(self) -> None:
        """Continue from a copy of the unsent rest, without an owner."""
        self.left = [memoryview(b"".join(self.left))]
        self.given_up = True


class Incoming(Protocol):
    """Frame that is waited for."""

    def room(self, size: int) -> memoryview:
        """Return the memory for its `size` bytes."""

    def arrived(self) -> None:
        """Handle the complete frame. Called once, with the links' lock held; may send."""

    def take_over(self, content: memoryview) -> None:
        """Take content that arrived before it was waited for. The memory belongs to this frame from
        now on."""
        self.room(len(content))[:] = content
        self.arrived()


class Early(Incoming):
    """Frame that arrived before it was waited for."""

    def __init__(self, bytes_: int = 0) -> None:
        """Make it. `bytes_`: its memory, with all that belongs to it."""
        self.bytes = bytes_
        self.content = memoryview(b"")
        #: None: it is not complete yet, or not waited for.
        self.wanted: Incoming | None = None
        self.complete = False

    def room(self, size: int) -> memoryview:
        self.content = fresh_memory(size)
        return self.content

    def arrived(self) -> None:
        self.complete = True
        if self.wanted is not None:
            self.hand_to(self.wanted)

    def hand_to(self, wanted: Incoming) -> None:
        """Hand the content over, now or as soon as it is complete."""
        if not self.complete:
            self.wanted = wanted
            return
        wanted.take_over(self.content)


def fresh_memory(size: int) -> memoryview:
    """Allocate memory for incoming content; unlike a bytearray it is not zeroed."""
    return np.empty(size, np.uint8).data


class Content(Incoming):
    """Small frame whose whole content a function takes."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._content = bytearray()

    def room(self, size: int) -> memoryview:
        self._content = bytearray(size)
        return memoryview(self._content)

    def arrived(self) -> None:
        self._take(bytes(self._content))


class _Nobody(Incoming):
    """Sink for content that is read only to keep the connection going."""

    def room(self, size: int) -> memoryview:
        raise AssertionError("unwanted content is not kept")

    def arrived(self) -> None:
        pass


_NOBODY = _Nobody()

#: Returns the place for the content of a feeding frame of this epoch and label; None: unwanted.
Feeds = Callable[[int, Label], Incoming | None]

#: Called with the epoch, kind and content of frames by which the sender enters a meeting, leaves it
#: or proves that it may feed for it. This worker need not have entered that meeting.
OnNews = Callable[[int, int, bytes], None]


class Link:
    """Local end of a connection to a peer. Only reading detects the end of the connection: when
    writing fails, the peer's last frames may still be readable."""

    def __init__(
        self,
        peer: bytes,
        place: bytes,
        serial: int,
        connected: socket.socket,
        feeds: Feeds,
        seals: Seals | None = None,
        most_early_bytes: int = MOST_EARLY_BYTES,
    ) -> None:
        """Use a connected socket.

        `peer`: identity of the process at the other end; `serial`: counts the connections with it;
        `seals`: None for traffic in the clear; `most_early_bytes`: most bytes of frames of the
        present meeting that are not waited for yet.
        """
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        with contextlib.suppress(OSError):  # not allowed here, or ended already
            if connected.getpeername()[0] == connected.getsockname()[0]:
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _WITHIN_A_HOST)
        self._feeds = feeds
        self.peer = peer
        #: Digest of the peer's card, from the greeting.
        self.place = place
        self.serial = serial
        self.socket = connected
        self._wire: Wire = SealedWire(connected, seals) if seals else ClearWire(connected)
        #: Events that are registered in the poll.
        self.polled_for = 0
        #: Reason why nothing is sent any more.
        self.problem: OSError | None = None
        #: Newest meeting with a frame begun in either direction.
        self.used_in = 0
        self._queues: list[deque[Outgoing]] = [deque() for _ in range(_PRIORITY_COUNT)]
        self._writing: Outgoing | None = None
        #: Frames of meetings before this one are no longer wanted.
        self._floor = 0
        #: Time (monotonic clock) since when the peer is known not to be a member of that meeting;
        #: None: it may be.
        self.outside_since: float | None = None
        #: The peer's newest claim that it may feed, with its meeting; the newest meeting of a valid
        #: claim; and the newest one of a claim by this end.
        self.claim: tuple[int, bytes] | None = None
        self.proven_for = self.proved_for = -1
        self._posted: defaultdict[Label, deque[Incoming]] = defaultdict(deque)
        self._early: dict[tuple[int, Label], deque[Early]] = {}
        #: Bytes of the frames in `_early`: for the present meeting, and for later ones.
        self._early_bytes = self._ahead_bytes = 0
        self._most_early_bytes = most_early_bytes
        #: Reason why nothing is read any more.
        self._over: OSError | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._end = 0
        #: Frame whose content is being read; None: a header is next.
        self._reading: Incoming | None = None
        self._reading_epoch = 0
        #: Missing bytes of it.
        self._missing = 0
        self._room = memoryview(b"")

    # ---- out

    def send(self, epoch: int, label: Label, *content: memoryview) -> Outgoing:
        """Queue a frame, and give the kernel what it takes. If nothing is sent any more, the frame
        is never done."""
        frame = Outgoing(epoch, label, *content)
        if label.kind not in FEEDING:
            self.used_in = max(self.used_in, epoch)
        if self.problem is not None:
            return frame
        idle = not self.blocked
        self._queues[priority_of(label.kind)].append(frame)
        if idle:
            self.write()
        return frame

    @property
    def blocked(self) -> bool:
        """True if a frame waits until the kernel takes it."""
        return self._writing is not None or any(self._queues[:BACKGROUND])

    @property
    def holds_back(self) -> bool:
        """True if a frame waits that is sent only while no other is."""
        return bool(self._queues[BACKGROUND])

    def write(self, *, background: bool = False) -> None:
        """Give the kernel waiting frames, as much as it takes up to a limit; `background`: also
        background frames while little is in flight."""
        left = _TURN_BYTES
        while left > 0 and (frame := self._next_frame(background)) is not None:
            try:
                count = self._wire.put(frame.left)
            except BlockingIOError:
                return
            except OSError as error:
                self._stop_writing(error)
                return
            left -= count
            frame.started = True
            while frame.left and count >= len(frame.left[0]):
                count -= len(frame.left.pop(0))
            if frame.left:
                frame.left[0] = frame.left[0][count:]
                continue
            frame.done = not frame.given_up
            self._writing = None

    def _stop_writing(self, why: OSError) -> None:
        self.problem = why
        self._writing = None
        for queue in self._queues:
            queue.clear()
        with contextlib.suppress(OSError):  # otherwise reading would find no end
            self.socket.shutdown(socket.SHUT_RDWR)

    def _next_frame(self, background: bool) -> Outgoing | None:
        if self._writing is None:
            for queue in self._queues[:BACKGROUND]:
                if queue:
                    self._writing = queue.popleft()
                    return self._writing
            if background and self.holds_back and self.has_little_in_flight():
                self._writing = self._queues[BACKGROUND].popleft()
        return self._writing

    def has_little_in_flight(self) -> bool:
        """Return whether the bytes taken by the kernel will arrive soon."""
        unsent = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
        info = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        rate: int = _DELIVERY_RATE.unpack_from(info)[0]
        return int.from_bytes(unsent, sys.byteorder) < max(_IN_FLIGHT_BYTES, rate * _IN_FLIGHT_S)

    # ---- in

    def post(self, label: Label, incoming: Incoming) -> None:
        """Direct the next frame of the present meeting with `label` there. Frames that have arrived
        already are handed over at once. Raises OSError where such a frame ends the link."""
        early = self._early.get((self._floor, label))
        if early:
            first = early.popleft()
            self._early_bytes -= first.bytes
            if not early:
                del self._early[self._floor, label]
            with self._ending():
                first.hand_to(incoming)  # it may post for the next one
        else:
            self._posted[label].append(incoming)

    def read(self, on_news: OnNews) -> None:
        """Read available data, up to a limit. Raises BlockingIOError if there is none, and another
        OSError at the end of the link, from then on.

        A frame that breaks the rules is such an end, and so is any error in the receiver of a
        frame: the peer chose its content.
        """
        self._check_sound()
        with self._ending():
            self._read(on_news)
        self._check_sound()

    def _check_sound(self) -> None:
        if self._over is not None:
            raise self._over

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Turn any error inside, except BlockingIOError, into the end of the link, as an
        OSError."""
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            self._over = self._over or error
            raise
        except Exception as error:
            log.exception("a frame of a peer was refused")
            self._over = ConnectionError(f"sent a frame that was refused: {error!r}")
            raise self._over from error

    def _read(self, on_news: OnNews) -> None:
        left = _TURN_BYTES
        while left > 0 or self._wire.holds:  # no poll would report it again
            if self._missing:
                count = self._wire.take(self._room[: self._missing])
                self._check_open(count)
                self._took(count)
            else:
                count = self._wire.take(self._buffer[self._end :])
                self._check_open(count)
                self._end += count
                self._unpack(on_news)
            left -= count

    @staticmethod
    def _check_open(count: int) -> None:
        if not count:
            raise ConnectionError("connection closed by peer")

    def _took(self, count: int) -> None:
        """Count `count` more bytes of content as read into the room."""
        self._missing -= count
        if self._reading is not _NOBODY:  # its room is reused
            self._room = self._room[count:]
        if not self._missing:
            reading, self._reading = self._reading, None
            self._room = memoryview(b"")
            assert reading is not None, "only what is read can be missing"
            reading.arrived()

    def _unpack(self, on_news: OnNews) -> None:
        """Parse buffered bytes; afterwards at most a part of a header may remain."""
        while self._end - self._start >= HEADER.size:
            self._check_sound()  # an early frame may have ended the link
            epoch, kind, key, part, size = HEADER.unpack_from(self._buffer, self._start)
            self._start += HEADER.size
            check_header(kind, size)
            if kind in LEAVING:
                on_news(epoch, kind, b"")
                continue
            if kind in ABOUT_LINKS:
                self._reading = Content(partial(on_news, epoch, kind))
                self._reading_epoch = epoch
                self._missing, self._room = size, self._reading.room(size)
            else:
                self._begin(epoch, Label(kind, key, part), size)
            count = min(size, self._end - self._start)
            if self._reading is not _NOBODY:
                self._room[:count] = self._buffer[self._start : self._start + count]
            self._start += count
            self._took(count)
            if self._missing:
                break
        rest = self._end - self._start
        self._buffer[:rest] = self._buffer[self._start : self._end]
        self._start, self._end = 0, rest

    def _begin(self, epoch: int, label: Label, size: int) -> None:
        """Begin to read the content of a frame, which is next."""
        self._reading_epoch, self._missing = epoch, size
        if label.kind in FEEDING:
            self._reading = self._feeds(epoch, label)
            if self._reading is None:
                self._forget()
            else:
                self._room = self._reading.room(size)
            return
        self.used_in = max(self.used_in, epoch)
        if epoch < self._floor or (epoch == self._floor and self.outside_since is not None):
            self._forget()
            return
        posted = self._posted.get(label) if epoch == self._floor else None
        if posted:
            self._reading = posted.popleft()
            if not posted:
                del self._posted[label]
        else:
            self._reading = early = Early(_FRAME_BYTES + size)
            self._count_early(epoch, early.bytes)
            self._early.setdefault((epoch, label), deque()).append(early)
        self._room = self._reading.room(size)

    def _count_early(self, epoch: int, size: int) -> None:
        if epoch > self._floor:
            self._ahead_bytes += size
        else:
            self._early_bytes += size
        if self._ahead_bytes > _MOST_AHEAD_BYTES:
            raise ConnectionError(
                f"sent more than {_MOST_AHEAD_BYTES} bytes for meetings that have not begun"
            )
        if self._early_bytes > self._most_early_bytes:
            raise ConnectionError(
                f"sent more than {self._most_early_bytes} bytes that are not waited for"
            )

    def _forget(self) -> None:
        self._reading = _NOBODY
        self._room = _SCRATCH

    # ---- from one meeting to the next

    def raise_floor(self, epoch: int) -> None:
        """Drop everything of meetings before `epoch`, in both directions."""
        self._floor = epoch
        self.outside_since = None
        self._posted.clear()
        self._keep_early(epoch)
        if self._reading is not None and self._reading_epoch < epoch:
            self._forget()
        self._withdraw(lambda frame: frame.epoch < epoch and frame.kind not in LEAVING)

    def keep_out(self) -> None:
        """Keep nothing of the peer: it is not a member of the present meeting."""
        self.outside_since = time.monotonic()
        self._keep_early(self._floor + 1)

    def _keep_early(self, first: int) -> None:
        """Keep only frames of the meeting `first` and of later ones."""
        self._early = {key: early for key, early in self._early.items() if key[0] >= first}
        self._early_bytes = self._ahead_bytes = 0
        for (epoch, _), early in self._early.items():
            taken = sum(each.bytes for each in early)
            if epoch > self._floor:
                self._ahead_bytes += taken
            else:
                self._early_bytes += taken

    def stop_feeding(self, epoch: int, kinds: Container[int] = FEEDING) -> None:
        """Drop frames queued for that meeting ahead of it."""
        if Kind.PROOF in kinds:  # the proof may be among the withdrawn frames
            self.proved_for = -1
        self._withdraw(lambda frame: frame.epoch == epoch and frame.kind in kinds)

    def _withdraw(self, unwanted: Callable[[Outgoing], bool]) -> None:
        for queue in self._queues:
            for _ in range(len(queue)):
                frame = queue.popleft()
                if not unwanted(frame):
                    queue.append(frame)
        writing = self._writing
        if writing is None or not unwanted(writing):
            return
        if writing.started or self._wire.half_out:
            writing.own_the_rest()
        else:
            self._writing = None
