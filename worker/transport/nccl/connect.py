"""Communicators of one worker over all generations, and the connecting of new ones.

A thread connects all communicators at once while training continues. First a worker begins those of
which it is the first member, and sends NCCL's identifier to the others. Then it begins the rest as
their identifiers arrive. So no worker waits for one that itself waits, however communicators
overlap.

Then each communicator is used once, since a first use may wait for the whole device, and no step
should. First uses follow one another in an order that all workers share, each when all its members
have reached it (`Line`). While a first use is launched, training launches nothing. So it begins
when NCCL has connected the communicator and no operation of training is under way here; then it
waits only for computations. There is no deadlock: operations of training end independently of
connecting, and training continues until its step ends or it waits. In both cases no operation is
under way. So the first unfinished use in the order can end, since its members have finished all
earlier ones.

A call of NCCL's may never return, so giving up abandons the thread. If a member leaves in order,
only the connecting ends: the generation is about to end anyway, and some members may still wait for
the result of its last vote.

If connecting takes too long, the generation ends, and the next one tries again. If that takes too
long as well, for example because NCCL's traffic is blocked, everything goes over the host from then
on. Steps are committed meanwhile, so repeated attempts would end one generation after the other.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import torch

from oobleck.planner.profile.memory import GROUP_CTAS, LINK_CTAS
from oobleck.planner.programs.communicators import Name
from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import HelperLost, InvariantViolation, Released, TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.wire import Kind, Label
from oobleck.worker.transport.nccl.communicator import (
    STAMP_BYTES,
    Communicator,
    Key,
    Line,
    held,
    key_of,
    part_of,
)
from oobleck.worker.transport.nccl.group import (
    ABORT_LIMIT_S,
    Aborts,
    GroupMaker,
    Identifiers,
    ProcessGroup,
    peers_may_fail,
    use_device,
)
from oobleck.worker.transport.tree import Words

# ---- Communicators of one worker, over all its generations: those that are kept, and the end of
# others.
#
# To connect one takes a second or more on real GPUs. So those that a plan wants and that are
# whole at all their members stay, and only the others are made anew. Unwanted ones are ended, so
# a GPU never holds more than the plan's (`oobleck.planner.programs.communicators` counts their
# bytes).
#
# A communicator is *whole* at a member under three conditions. All members have used it, no call
# on it has failed, and all operations that this member launched on it have ended. Its *stamp* is
# a digest of its purpose, its processes, the meeting in which it was made, and the number of
# operations that this member has launched. When workers meet, each sends the stamps of its whole
# ones, and launches nothing on them until all have met. Then a communicator is kept if all its
# members have sent one stamp, and else made anew.
#
# All members decide the same, since all see the same table of stamps. Each keeps its communicator
# if it finds its own stamp at all members. A stamp is of one purpose and processes, and a member
# has at most one for these. So a member finds its own at all exactly if all have one for these,
# and all of them are equal: the same condition for all.
#
# A kept communicator is usable. Equal stamps are of one communicator, since a meeting makes at
# most one for the same purpose and processes. NCCL matches the n-th operation of one member with
# the n-th of the others. All have launched as many, and at each the last one has ended. So
# nothing is under way or in a buffer, and the next operation of each is the same one. This holds
# when the stamps are sent, and nothing is launched before they are read.
#
# A meeting that breaks off may leave members that have decided and members that have not. The
# former have the communicator as it was, or none, or one of another meeting; the others have it
# as it was. So the next meeting finds equal stamps only where both have it as it was. An ended
# process sends nothing, and its replacement has another identity.


# ---- Streams of torch's pool in which communicators run, no two in the same.
#
# torch hands out the streams of a pool in turn and begins again with the first
# (c10/cuda/CUDAStream.h, "Stream pool note"), even if it is still in use. Kept communicators stay
# on theirs while others come and go. So before one is made, this module takes streams from the
# pool until the next one is free.


class StreamRing:
    """Ring of the pool's streams, and which of them are held. Used by one thread at a time, while
    no other thread takes streams of the pool."""

    def __init__(self, take: Callable[[], int]) -> None:
        """Make the ring. `take`: takes the pool's next stream and returns it."""
        self._take = take
        #: In the order in which they are handed out.
        self._ring: list[int] = []
        self._held: set[int] = set()

    def hold_next(self) -> int:
        """Make the pool's next stream one that is not held, hold it from now on, and return it.
        Raises InvariantViolation where all are held."""
        taken = self._take()
        if not self._ring:
            while taken not in self._ring:
                self._ring.append(taken)
                taken = self._take()
        for _ in self._ring:
            following = self._ring[(self._ring.index(taken) + 1) % len(self._ring)]
            if following not in self._held:
                self._held.add(following)
                return following
            taken = self._take()
        raise InvariantViolation(f"{len(self._held)} communicators have a stream of their own each")

    def let_go(self, stream: int) -> None:
        self._held.discard(stream)


def stamps_of(packed: bytes) -> frozenset[bytes]:
    """Split the bytes of `Communicators.stamps` into stamps."""
    starts = range(0, len(packed), STAMP_BYTES)
    return frozenset(packed[start : start + STAMP_BYTES] for start in starts)


def is_kept(stamp: bytes, members: Iterable[int], stamps: Sequence[Collection[bytes]]) -> bool:
    """Return whether all `members` have the communicator of this stamp, whole. `stamps`: all
    workers', by rank."""
    return all(stamp in stamps[member] for member in members)


class Communicators:
    """Communicators of one worker. Used by one thread at a time, except where a method says
    otherwise."""

    def __init__(self, device: torch.device, aborts: Aborts, maker: GroupMaker) -> None:
        self.device = device
        #: Ends under way.
        self.aborts = aborts
        #: Puts a mark behind what a thread has queued on the device.
        self.mark = maker.mark
        self._maker = maker
        self._streams = StreamRing(maker.take_stream)
        #: Held while something is launched or begins to connect on the device.
        self.launching = threading.Lock()
        self._lock = threading.Lock()
        #: True if the last connecting took too long here.
        self.late = False
        #: All and only those that were made and whose end has not begun.
        self._all: dict[Key, Communicator] = {}
        #: Set while no transport uses any.
        self._idle = threading.Event()
        self._idle.set()

    def stamps(self) -> bytes:
        """Return the stamps of all whole ones, once no transport uses them any more."""
        self.await_idle()
        with self._lock:
            whole = [each for each in self._all.values() if each.is_whole()]
        return b"".join(each.stamp for each in whole)

    def keep(
        self, wanted: Mapping[Key, Sequence[int]], stamps: Sequence[Collection[bytes]]
    ) -> dict[Key, Communicator]:
        """Return those of `wanted` that all their members have, and begin to end all others.

        `wanted`: with the ranks of the members; `stamps`: all workers', by rank. Returns at once.
        """
        self.await_idle()
        with self._lock:
            kept = {
                key: each
                for key, each in self._all.items()
                if key in wanted and is_kept(each.stamp, wanted[key], stamps)
            }
            others = [each for key, each in self._all.items() if key not in kept]
        self.end(others)
        return kept

    # ---- for the transport that uses them

    def begin_use(self) -> None:
        self._idle.clear()

    def end_use(self) -> None:
        """End the use: no operation is launched any more. Callable from any thread."""
        self._idle.set()

    def await_idle(self) -> None:
        """Wait until no transport uses them. Raises HelperLost if a transport that was given up
        does not finish soon."""
        with pulse.WAITING:
            if not self._idle.wait(ABORT_LIMIT_S):
                raise HelperLost(
                    f"NCCL did not say within {ABORT_LIMIT_S:g} s what has ended; the worker's "
                    "process is replaced"
                )

    def make(
        self,
        key: Key,
        born: int,
        member: int,
        identifiers: Identifiers,
        most_ctas: int,
    ) -> Communicator:
        """Make a communicator, which exists from then on; connecting it, which follows, takes its
        stream. Raises NCCL's errors."""
        with self._lock:
            stream = self._streams.hold_next()
        try:
            group = self._maker.make(identifiers, member, len(key.processes), most_ctas)
        except BaseException:
            with self._lock:
                self._streams.let_go(stream)
            raise
        made = Communicator(key, born, group, stream)
        with self._lock:
            assert key not in self._all, "the one before was ended"
            self._all[key] = made
        return made

    def end(self, some: Iterable[Communicator]) -> None:
        """Abort them, all at once; return at once. Callable from any thread."""
        ended: list[ProcessGroup] = []
        with self._lock:
            for each in some:
                if self._all.get(each.key) is each:
                    del self._all[each.key]
                    self._streams.let_go(each.stream)
                    ended.append(each.group)
        self.aborts.begin(ended)

    def end_all(self) -> None:
        """End all communicators: no later generation uses any of them."""
        self.await_idle()
        with self._lock:
            left = list(self._all.values())
        self.end(left)


log = logging.getLogger(__name__)

#: Time-out of connecting, in which NCCL examines the machines' topology. It must be shorter than
#: torch's own (TORCH_NCCL_NONBLOCKING_TIMEOUT), after which a peer seems to be lost.
LIMIT_S = 40.0
#: The same for moving state: training waits, and state may go over the host instead.
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
        is_idle: Callable[[], bool],
        limit_s: float = LIMIT_S,
        *,
        needed: bool,
    ) -> None:
        """Begin connecting.

        `names`: all with this rank, in the order of first use; there are links to their members.
        `news`: called from the thread when it is done or has failed, and when a line has news.
        `is_idle`: returns whether no operation on other communicators is under way. `needed`: it
        must not take too long.
        """
        self._names = names
        self._links = links
        self._communicators = communicators
        self._news = news
        self._is_idle = is_idle
        self._limit_s = limit_s
        self._needed = needed
        self._end_at = time.monotonic() + limit_s
        self._members = {rank for _, group in names for rank in group} - {links.rank}
        #: Held while what was made is changed, or NCCL is asked for the state of its use.
        self._lock = threading.RLock()
        self._given_up = False
        #: True if it will never be done, although training is unharmed: a member has left in order,
        #: or it takes too long and is not needed.
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
            fields = {"why": f"{why}; check the network between the nodes (oobleck doctor)"}
            log.warning("staged through host memory, which is slow", extra=fields)
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
            self._communicators.aborts.wait_for(self._thread)
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
        with held(self._communicators.launching, self._check):
            self._check()  # its abort may have begun meanwhile
            with made.calling():
                made.group.eager_connect_single_device(self._communicators.device)

    def _try(self, name: Name, device: torch.device) -> None:
        """Use it once."""
        communicator, line = self.made[name], self.lines[name]
        part = part_of(name, self._links.rank)
        count = 2 * len(name[1]) if part == "exchange" else 1
        probes = [torch.zeros(1, device=device) for _ in range(count)]
        communicator.await_connection(device)
        line.want(partial(communicator.launch, part, probes))

        def is_launched() -> bool:
            with held(self._communicators.launching, self._check):
                if self._is_idle():
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
            raise Released("the groups were aborted")
        self._links.check_there(())
        if self._links.any_left(self._members):
            raise _Left


def _own_stream(
    device: torch.device,
) -> contextlib.AbstractContextManager[torch.Stream | None]:
    """Return a stream of this thread's own on a GPU. Otherwise a first use would wait for all
    queued computation."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.Stream(device)


def _label(name: Name) -> Label:
    return Label(Kind.NOTE, key_of(name), _IDENTIFIER_PART)


def _unpacked(packed: bytes | bytearray) -> dict[str, bytes]:
    """Unpack identifiers. Raises TransportError if the bytes are invalid."""
    try:
        return msgspec.msgpack.decode(packed, type=dict[str, bytes])
    except msgspec.DecodeError as error:
        raise TransportError(f"a peer sent an invalid identifier: {error}") from error
