"""Communicators of one worker, over all its generations: those that are kept, and the end of
others.

To connect one takes a second or more on real GPUs. So those that a plan wants and that are whole at
all their members stay, and only the others are made anew. Unwanted ones are ended, so a GPU never
holds more than the plan's (`oobleck.planner.programs.communicators` counts their bytes).

A communicator is *whole* at a member under three conditions. All members have used it, no call on
it has failed, and all operations that this member launched on it have ended. Its *stamp* is a
digest of its purpose, its processes, the meeting in which it was made, and the number of operations
that this member has launched. When workers meet, each sends the stamps of its whole ones, and
launches nothing on them until all have met. Then a communicator is kept if all its members have
sent one stamp, and else made anew.

All members decide the same, since the stamps are one table for all. A member looks for its own
stamp among those of the others. Each sends at most one stamp for the same purpose and processes. If
it finds its own at all of them, then these are their own too, and they find it at all as well. If
it does not, or has none, then no other one finds its own at all of them.

A kept communicator is usable. Equal stamps are of one communicator, since a meeting makes at most
one for the same purpose and processes. NCCL matches the n-th operation of one member with the n-th
of the others. All have launched as many, and at each the last one has ended. So nothing is under
way or in a buffer, and the next operation of each is the same one. This holds when the stamps are
sent, and nothing is launched before they are read.

A meeting that breaks off may leave members that have decided and members that have not. The former
have the communicator as it was, or none, or one of another meeting; the others have it as it was.
So the next meeting finds equal stamps only where both have it as it was. An ended process sends
nothing, and its replacement has another identity.

Must not know transports, plans or devices' queues.
"""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import HelperLost, InvariantViolation
from oobleck.worker.transport.nccl.aborts import LIMIT_S, Aborts
from oobleck.worker.transport.nccl.communicator import STAMP_BYTES, Communicator, Key
from oobleck.worker.transport.nccl.group import GroupMaker, Identifiers, ProcessGroup

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


def stamps_of(told: bytes) -> frozenset[bytes]:
    """Split the bytes of `Communicators.told` into stamps."""
    starts = range(0, len(told), STAMP_BYTES)
    return frozenset(told[start : start + STAMP_BYTES] for start in starts)


def is_kept(stamp: bytes, members: Iterable[int], told: Sequence[Collection[bytes]]) -> bool:
    """Return whether all `members` have the communicator of this stamp, whole. `told`: by rank."""
    return all(stamp in told[member] for member in members)


class Communicators:
    """Communicators of one worker. Used by one thread at a time, except where a method says
    otherwise."""

    def __init__(self, device: torch.device, aborts: Aborts, maker: GroupMaker) -> None:
        self.device = device
        self._aborts = aborts
        self._maker = maker
        self._streams = StreamRing(maker.take_stream)
        self._lock = threading.Lock()
        #: True if the last connecting took too long here.
        self.late = False
        #: All and only those that were made and whose end has not begun.
        self._all: dict[Key, Communicator] = {}
        #: Set while no transport uses any.
        self._idle = threading.Event()
        self._idle.set()

    def told(self) -> bytes:
        """Return the stamps of all whole ones, once no transport uses them any more."""
        self.await_idle()
        with self._lock:
            whole = [each for each in self._all.values() if each.is_whole()]
        return b"".join(each.stamp for each in whole)

    def keep(
        self, wanted: Mapping[Key, Sequence[int]], told: Sequence[Collection[bytes]]
    ) -> dict[Key, Communicator]:
        """Return those of `wanted`, by the ranks of their members, that all of them have, by the
        stamps in `told`. The others begin to end. Returns at once."""
        self.await_idle()
        with self._lock:
            kept = {
                key: each
                for key, each in self._all.items()
                if key in wanted and is_kept(each.stamp, wanted[key], told)
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
            if not self._idle.wait(LIMIT_S):
                raise HelperLost(
                    f"NCCL did not say within {LIMIT_S:g} s what has ended; the worker's process "
                    "is replaced"
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
        self._aborts.begin(ended)

    def end_all(self) -> None:
        """End all communicators: no later generation uses any of them."""
        self.await_idle()
        with self._lock:
            left = list(self._all.values())
        self.end(left)

    # ---- ends under way

    def leave_behind(self, thread: threading.Thread) -> None:
        """Leave behind a thread that is in a call of NCCL's."""
        self._aborts.wait_for(thread)

    def settle(self, check: Callable[[], None]) -> None:
        """Wait until all aborts have ended, as `Aborts.settle` does."""
        self._aborts.settle(check)
