"""Reading and writing of the links, by a thread of its own or by the one that waits for them.

While others compute, the links' own thread watches every link for its end, accepts callers, and
reads and writes only if an operation cannot wait. A training thread that waits for a message reads
and writes itself, so that no other thread has to wake it. Must not know meetings.
"""

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import InvariantViolation
from oobleck.worker.transport.links.link import Link

_READ = select.EPOLLIN
_END = select.EPOLLRDHUP


class Owner(Protocol):
    """Owner of the links. All methods but `rest_s` are called with the lock held."""

    def on_news(self, link: Link, epoch: int, kind: int, content: bytes) -> None:
        """Handle that the peer enters a meeting or leaves it."""

    def ended(self, link: Link, why: OSError) -> None:
        """Handle the end of the connection."""

    def hear(self, descriptor: int) -> bool:
        """Handle events of a descriptor that is not a link's. Return whether a waiting thread may
        be concerned."""

    def rest_s(self) -> float:
        """Return how long the own thread may sleep without events."""

    def tick(self) -> None:
        """Do work that is due by the clock."""


class Traffic:
    """Reader and writer of the links. Used with the lock held, except `wait` and the bells."""

    def __init__(self, owner: Owner, lock: threading.RLock) -> None:
        self._owner = owner
        self._lock = lock
        self._by_descriptor: dict[int, Link] = {}
        #: Events of all links, for the thread that reads and writes now; and events for the own
        #: thread, which include the former while that is its task.
        self._traffic = select.epoll()
        self.events = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._own_bell = os.eventfd(0, os.EFD_NONBLOCK)
        self._traffic.register(self._bell, _READ)
        self.events.register(self._own_bell, _READ)
        self.events.register(self._traffic, 0)
        self._shown = False
        #: True while the training thread reads and writes.
        self._taken = False
        #: Operations that should continue while the training thread computes.
        self._pressing = 0
        #: Links with frames that wait for the kernel.
        self._blocked: set[int] = set()
        #: Links with frames that wait until no other frame is to be sent, on any link.
        self._holding_back: set[int] = set()
        self.closed = False
        #: Error that has ended a thread; nothing may continue after it.
        self._failure: BaseException | None = None
        self.thread = threading.Thread(target=self._serve, name="links", daemon=True)

    # ---- links

    def add(self, link: Link) -> None:
        """Watch the link. Raises OSError; then the link is not watched."""
        descriptor = link.socket.fileno()
        link.polled_for = _READ | _END
        # Closing the socket removes it from both.
        self._traffic.register(descriptor, link.polled_for)
        self.events.register(descriptor, _END)
        self._by_descriptor[descriptor] = link

    def holds(self, link: Link) -> bool:
        return self._by_descriptor.get(link.socket.fileno()) is link

    def drop(self, link: Link) -> None:
        """Close the link."""
        descriptor = link.socket.fileno()
        del self._by_descriptor[descriptor]
        self._blocked.discard(descriptor)
        self._holding_back.discard(descriptor)
        for poll in (self._traffic, self.events):
            poll.unregister(descriptor)
        link.socket.close()

    def poll_for(self, link: Link) -> None:
        """Update the events polled for the link: writing only while frames wait for the kernel."""
        self._hold_back(link)
        wanted = _READ | _END | (select.EPOLLOUT if link.blocked else 0)
        if wanted == link.polled_for:
            return
        link.polled_for = wanted
        descriptor = link.socket.fileno()
        self._traffic.modify(descriptor, wanted)
        if link.blocked:
            self._blocked.add(descriptor)
        else:
            self._blocked.discard(descriptor)
            if not self._blocked and self._holding_back:
                self.ring_own()
        self.arm()

    def _hold_back(self, link: Link) -> None:
        descriptor = link.socket.fileno()
        if not link.holds_back:
            self._holding_back.discard(descriptor)
        elif descriptor not in self._holding_back:
            self._holding_back.add(descriptor)
            self.ring_own()

    @property
    def holds_back(self) -> bool:
        """True if background frames could be sent soon."""
        return bool(self._holding_back) and not self._blocked

    def write_background(self) -> None:
        """Write some background frames, if no others wait. Called repeatedly while some wait: no
        event reports that less is in flight."""
        for descriptor in tuple(self._holding_back):
            if self._blocked or not self._has_little_in_flight():
                return
            link = self._by_descriptor[descriptor]
            link.write(background=True)
            self.poll_for(link)

    def _has_little_in_flight(self) -> bool:
        # Look at all links: at this end they share one bottleneck.
        return all(link.has_little_in_flight() for link in self._by_descriptor.values())

    # ---- turns of reading and writing

    def press(self, change: int) -> None:
        """Add `change` to the number of operations that the own thread carries on while the
        training thread computes."""
        self._pressing += change
        self.arm()

    def press_anew(self, count: int) -> None:
        """Set the number of such operations to `count`."""
        self._pressing = count

    def arm(self) -> None:
        """Have the own thread read and write, if that is needed and no other thread does."""
        shown = not self._taken and bool(self._pressing or self._blocked)
        if shown != self._shown and not self.closed:
            self._shown = shown
            self.events.modify(self._traffic, _READ if shown else 0)

    def wait(self, done: Callable[[], bool], until: float | None) -> bool:
        """Read and write until `done`, which is called with the lock held and may raise. Return
        False if the clock reaches `until` first. One thread waits at a time."""
        with self._lock:
            self.check_sound()
            if done():
                return True
            assert not self._taken, "one thread waits at a time"
            self._taken = True
            self.arm()
            try:
                while not done():
                    left_s = None if until is None else until - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return False
                    self._lock.release()
                    try:
                        with pulse.WAITING:
                            ready = self._traffic.poll(left_s)
                    finally:
                        self._lock.acquire()
                    self.check_sound()
                    self._carry(ready)
            finally:
                self._taken = False
                self.arm()
        return True

    def _carry(self, ready: Sequence[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            if descriptor == self._bell:
                _silence(self._bell)
            elif (link := self._by_descriptor.get(descriptor)) is not None:
                self._advance(link, events)

    def _advance(self, link: Link, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                link.write()
            if events & ~select.EPOLLOUT:
                self.read(link)
        except BlockingIOError:
            pass
        except OSError as error:
            self._owner.ended(link, error)
            return
        self.poll_for(link)

    def read(self, link: Link) -> None:
        """Read from the link. Raises OSError."""

        def on_news(epoch: int, kind: int, content: bytes) -> None:
            self._owner.on_news(link, epoch, kind, content)

        link.read(on_news)

    # ---- bells

    def ring(self) -> None:
        """Wake the waiting thread to check its condition."""
        self._ring(self._bell)

    def ring_own(self) -> None:
        """Wake the own thread to check the clock."""
        self._ring(self._own_bell)

    def _ring(self, bell: int) -> None:
        if not self.closed:
            os.eventfd_write(bell, 1)

    # ---- the own thread

    def _serve(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Keep the error for users of the links to raise, now or later: no other thread sees it."""
        with self._lock:
            self._failure = error
            self.ring()

    def check_sound(self) -> None:
        if self._failure is not None:
            raise InvariantViolation(f"the links failed: {self._failure!r}")

    def _turn(self) -> bool:
        """Do available work. Return whether there will be more."""
        ready = self.events.poll(self._owner.rest_s())
        with self._lock:
            if self.closed:
                return False
            for descriptor, events in ready:
                self._attend(descriptor, events)
            self._owner.tick()
        return True

    def _attend(self, descriptor: int, events: int) -> None:
        if descriptor == self._own_bell:
            _silence(self._own_bell)
        elif descriptor == self._traffic.fileno():
            if not self._taken:
                self._carry(self._traffic.poll(0))
        elif (link := self._by_descriptor.get(descriptor)) is not None:
            self._advance(link, events)
            self.ring()
        elif self._owner.hear(descriptor):
            self.ring()

    # ---- end

    def stop(self) -> None:
        """End the own thread, soon."""
        self.ring_own()
        self.closed = True

    def close(self) -> None:
        """Close the polls and bells, after the own thread has ended."""
        self._traffic.close()
        self.events.close()
        os.close(self._bell)
        os.close(self._own_bell)


def _silence(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(bell)
