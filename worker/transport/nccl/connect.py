"""Connecting of communicators, all at once, in a thread of its own, while training continues.

First a worker begins those of which it is the first member, and sends the others NCCL's identifier.
Then it begins the others as their identifiers arrive. So the longest chain of workers that wait for
each other has two, however the communicators overlap.

Then each is used once, so that no step has to wait for a first use, which may wait for the whole
device. That happens one after the other, in an order that all workers share, when all members have
reached it (`lines`). There is no deadlock: of all unfinished ones, the first one in the order can
end, since its members have finished all before it. Training launches meanwhile without waiting for
the device, so its kernels end.

A call of NCCL's may never return; giving up leaves its thread behind. A member that leaves in order
ends only the connecting. The generation is about to end, and some may not know the result of its
last vote yet.

If connecting takes too long, the generation ends, and the next one tries again. If that takes too
long as well, for example because NCCL's traffic is blocked, everything goes over the host from then
on. Steps are committed meanwhile, so repeated attempts would end one generation after the other.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch

from oobleck.planner.profile.memory import GROUP_CTAS, LINK_CTAS
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.wire import Kind, Label
from oobleck.worker.transport.nccl.aborts import peers_may_fail
from oobleck.worker.transport.nccl.communicator import (
    Communicator,
    Key,
    Line,
    Name,
    key_of,
    part_of,
)
from oobleck.worker.transport.nccl.communicators import Communicators
from oobleck.worker.transport.nccl.group import Identifiers, use_device
from oobleck.worker.transport.words import Words

log = logging.getLogger(__name__)

#: NCCL examines the machines' wires while it makes a communicator.
LIMIT_S = 60.0
#: The same where training waits for it and could do without: state may go over the host.
STATE_LIMIT_S = 15.0
_POLL_S = 0.001
#: Part of an identifier's note; a line's own notes have 0.
_IDENTIFIER_PART = 1


class _Left(Exception):
    """Departure of a member in order."""


class Connecting:
    """Connecting of the communicators of one meeting that not all members have."""

    def __init__(
        self,
        names: Mapping[Name, Key],
        links: LinkTransport,
        communicators: Communicators,
        news: Callable[[], None],
        limit_s: float = LIMIT_S,
        *,
        needed: bool,
    ) -> None:
        """Begin connecting.

        `names`: all with this rank, in the order of first use; there are links to their members.
        `news`: called from the thread when it is done or has failed, and when a line has news.
        `needed`: it must not take too long.
        """
        self._names = names
        self._links = links
        self._communicators = communicators
        self._news = news
        self._limit_s = limit_s
        self._needed = needed
        self._end_at = time.monotonic() + limit_s
        self._members = {rank for _, group in names for rank in group} - {links.rank}
        #: Held while one is made, or NCCL is asked for the state of its use.
        self._lock = threading.RLock()
        self._given_up = False
        #: True if it will never be done, although training is unharmed.
        self._vain = False
        #: Error that ended it, unless it was given up or is in vain.
        self.failure: Exception | None = None
        #: Results, complete once it is `done`.
        self.made: dict[Name, Communicator] = {}
        self.lines: dict[Name, Line] = {}
        self.done = False
        # A daemon: one that is stuck in the driver must not hold up the end of the process.
        self._thread = threading.Thread(target=self._run, name="connect", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise its error, and TransportError if it takes too long."""
        if self.failure is not None:
            raise self.failure
        if not self.done:
            self._check_in_time()

    def _check_in_time(self) -> None:
        """Check that the groups connect in time. Called from any thread, since its own may be in a
        call that does not return."""
        if self._vain or time.monotonic() <= self._end_at:
            return
        self._communicators.late = True
        why = f"NCCL's groups did not connect in {self._limit_s:g} s"
        if self._needed:
            raise TransportError(why)
        with self._lock:
            first, self._vain = not self._vain, True
        if first:
            told = {"why": f"{why}; check the network between the nodes (oobleck doctor)"}
            log.warning("staged through host memory, which is slow", extra=told)
            self._communicators.end(self.made.values())

    def wait(self) -> None:
        """Wait, in the training thread, until it is done. Raises as `check` does, and
        TransportError when a member leaves."""
        while not self.done:
            self.check()
            self._links.check_there(self._members)
            with pulse.WAITING:
                self._thread.join(_POLL_S)

    def give_up(self) -> list[Communicator]:
        """Give up, and return what was made; some may be connected. Callable from any thread."""
        with self._lock:
            self._given_up = True
        if self._thread.is_alive():
            self._communicators.leave_behind(self._thread)
        return list(self.made.values())

    # ---- in the thread

    def _run(self) -> None:
        try:
            device = self._communicators.device
            use_device(device)
            with _own_stream(device):
                self._begin_all()
                for name in self._names:
                    self._try(name, device)
            self._communicators.late = False
            self.done = True
        except _Left:
            self._vain = True
        except Exception as error:  # noqa: BLE001  # handed on
            # Last resort of the thread: users of the transport raise it.
            self.failure = None if self._is_over else error
        self._news()

    @property
    def _is_over(self) -> bool:
        return self._given_up or self._vain

    def _begin_all(self) -> None:
        rank, links = self._links.rank, self._links.links
        arriving: dict[Name, Words] = {}
        for name in self._names:
            self.lines[name] = Line(self._links, name, part_of(name, rank), self._news)
        with links.lock:
            self._links.check()
            for name in self._names:
                first = name[1][0]
                if first != rank:
                    arriving[name] = Words()
                    links.post(self._links.reach(first), _label(name), arriving[name])
        for name in self._names:
            if name not in arriving:
                identifiers = Identifiers()
                self._make(name, identifiers)
                word = memoryview(msgspec.msgpack.encode(identifiers.written))
                with links.lock:
                    self._links.check()
                    for member in name[1][1:]:
                        links.send(self._links.reach(member), _label(name), word)
        for name, words in arriving.items():
            self._until(words.is_there)
            self._make(name, Identifiers(_unpacked(words.content)))

    def _make(self, name: Name, identifiers: Identifiers) -> None:
        """Make the communicator and begin to connect it. It is recorded before, since an abort must
        end that, too."""
        key, links = self._names[name], self._links
        most_ctas = LINK_CTAS if name[0] in ("link", "state") else GROUP_CTAS
        member = name[1].index(links.rank)
        with peers_may_fail():
            made = self._communicators.make(key, links.epoch, member, identifiers, most_ctas)
        with self._lock:
            over = self._is_over
            if not over:
                self.made[name] = made
        if over:
            self._communicators.end([made])
            self._check()
        with made.calling():
            made.group.eager_connect_single_device(self._communicators.device)

    def _try(self, name: Name, device: torch.device) -> None:
        """Use it once."""
        communicator, line = self.made[name], self.lines[name]
        part = part_of(name, self._links.rank)
        count = 2 * len(name[1]) if part == "exchange" else 1
        probes = [torch.zeros(1, device=device) for _ in range(count)]
        line.want(partial(communicator.launch, part, probes))

        def is_launched() -> bool:
            line.advance()
            return communicator.launched > 0

        def has_ended() -> bool:
            with self._lock:  # it may wait for an abort with Python's lock
                self._check()
                return communicator.has_ended()

        self._until(is_launched)
        self._until(has_ended)
        communicator.connected = True

    def _until(self, done: Callable[[], bool]) -> None:
        while True:
            self._check()
            if done():
                return
            time.sleep(_POLL_S)

    def _check(self) -> None:
        self._check_in_time()
        if self._is_over:
            raise TransportError("the groups were aborted")
        self._links.check_there(())
        if self._links.any_left(self._members):
            raise _Left


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a stream of this thread's own on a GPU. Otherwise a first use would wait for all
    queued computation."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # no types


def _label(name: Name) -> Label:
    return Label(Kind.NOTE, key_of(name), _IDENTIFIER_PART)


def _unpacked(told: bytes | bytearray) -> dict[str, bytes]:
    """Unpack identifiers. Raises TransportError if the bytes are invalid."""
    try:
        return msgspec.msgpack.decode(told, type=dict[str, bytes])
    except msgspec.DecodeError as error:
        raise TransportError(f"a peer sent an invalid identifier: {error}") from error
