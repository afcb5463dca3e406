"""NCCL as it may behave at its worst, on host memory, for ranks that are threads of one process.

Each rank has a device. A group has a queue on it that runs one operation after the other, each a
kernel that takes up a part of the device until its peer has come: a send until it is taken, a
receive until something comes, a sum or an exchange until all are there. Few kernels fit on a device
at once. Work that the device must be free for (`Device.synchronize`: the first use of a kernel,
memory that is freed) waits for all kernels that run. A group is connected when all its members have
come. An abort marks the group, which ends its kernels and leaves garbage where a message should be,
and then frees memory, and so waits for the kernels of all other groups; whoever asks about the
group then would wait for that, and Python with it. The first use of each operation of a group waits
for all kernels of the device. A group runs in the next stream of the device's pool, whoever is in
that already, and a stream runs one kernel at a time. What real NCCL does not promise is not done
here: nothing is buffered, and nothing ends by itself.
"""

import queue
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions

from oobleck.worker.transport.nccl.group import Identifiers

#: A test that has come to a halt must not hold up the run.
_PATIENCE_S = 60.0
#: Time after which an operation is taken to be stuck.
_STUCK_S = 20.0
_POLL_S = 0.001
_KEY = "0"

#: What a test has a rank's next call of some kind do first: it may raise, or take its time. The
#: calls: make, connect, send, recv, allreduce, alltoall, end (of an operation), wait, abort.
Faults = dict[str, Callable[[], None]]


#: NCCL's result where CUDA has failed, by its name and in words.
CUDA_FAILED = "ncclUnhandledCudaError", "unhandled cuda error (run with NCCL_DEBUG=INFO)"


def raising(error: Exception) -> Callable[[], None]:
    def strike() -> None:
        raise error

    return strike


def nccl_error(result: str, words: str, last: str) -> RuntimeError:
    """As torch words it: NCCL's result by its name and in words, and its last warning."""
    return torch.distributed.DistBackendError(
        f"NCCL error in: NCCLUtils.hpp:95, {words}, NCCL version 2.29.7\n{result}: "
        f"\nLast error:\n{last}"
    )


class Device:
    """What a rank computes on."""

    def __init__(self, room: int = 4, streams: int = 32) -> None:
        """`room`: kernels that run at once; `streams`: those of the pool."""
        self._streams = [threading.Lock() for _ in range(streams)]
        self._taken = 0
        self._changed = threading.Condition()
        self._room = room
        self._running: set[object] = set()

    def take_stream(self) -> int:
        self._taken += 1
        return self._taken % len(self._streams)

    def turn_in(self, stream: int, ended: Callable[[], bool]) -> bool:
        """Wait until nothing runs in the stream; False where it has `ended` first."""
        while not self._streams[stream].acquire(timeout=_POLL_S):
            if ended():
                return False
        return True

    def done_in(self, stream: int) -> None:
        self._streams[stream].release()

    def enter(self, kernel: object, ended: Callable[[], bool]) -> None:
        """Return when there is room, or `ended`."""
        with self._changed:
            while len(self._running) >= self._room and not ended():
                self._changed.wait(_POLL_S)
            self._running.add(kernel)

    def leave(self, kernel: object) -> None:
        with self._changed:
            self._running.discard(kernel)
            self._changed.notify_all()

    @property
    def running(self) -> int:
        """Kernels."""
        return len(self._running)

    def synchronize(self) -> None:
        """Wait for all kernels that run now. Raises TimeoutError: they wait for somebody who waits
        for this."""
        with self._changed:
            running = set(self._running)
            if not self._changed.wait_for(lambda: not running & self._running, _PATIENCE_S):
                raise TimeoutError("the device is never free")


class Fabric:
    """What connects the devices; one for all ranks."""

    def __init__(self, together: int = 0) -> None:
        """`together`: no group is connected before all members of so many have come, so that one
        who waits for a group before it begins another one waits for ever."""
        self.lock = threading.Condition()
        self._together = together
        self._communicators: dict[bytes, Communicator] = {}
        self._made = 0

    def identifier(self) -> bytes:
        with self.lock:
            self._made += 1
            return f"fake-{self._made}".encode()

    @property
    def is_open(self) -> bool:
        with self.lock:
            return sum(each.all_have_come for each in self._communicators.values()) >= (
                self._together
            )

    def communicator(self, identifier: bytes, size: int) -> "Communicator":
        with self.lock:
            return self._communicators.setdefault(identifier, Communicator(self, size))


class Communicator:
    """What the members of a group share."""

    def __init__(self, fabric: Fabric, size: int) -> None:
        self.fabric = fabric
        self.size = size
        #: Of its own: a change concerns none of the other groups.
        self.changed = threading.Condition()
        self._come: set[int] = set()
        #: Members that have aborted it.
        self.gone: set[int] = set()
        #: Of each direction, what a sender holds out.
        self.offered: dict[tuple[int, int], Tensor] = {}
        #: Of each sum, by its number: what each member has brought.
        self.brought: dict[int, dict[int, Tensor]] = {}
        #: Of each exchange, by its number: what each member has for all.
        self.held_out: dict[int, dict[int, list[Tensor]]] = {}

    def come(self, rank: int) -> None:
        with self.changed:
            self._come.add(rank)

    @property
    def all_have_come(self) -> bool:
        return len(self._come) == self.size

    @property
    def is_connected(self) -> bool:
        return self.all_have_come and self.fabric.is_open


class FakeWork:
    """An operation that was queued."""

    def __init__(
        self,
        aborting: threading.Event | None = None,
        faults: Faults | None = None,
        hopeless: Callable[[], bool] = lambda: False,
    ) -> None:
        """`aborting`: an abort of its group is under way. `hopeless`: whether a member that it
        needs has left."""
        self._faults = {} if faults is None else faults
        self.is_hopeless = hopeless
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._aborting = aborting

    def end(self, error: BaseException | None = None) -> None:
        self._error = error
        self._ended.set()

    def is_completed(self) -> bool:
        """Raises AssertionError where torch would hold Python's lock until an abort is over."""
        assert self._aborting is None or not self._aborting.is_set(), "asked during an abort"
        return self._ended.is_set()

    def exception(self) -> BaseException | None:
        return self._error

    def wait_for(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        return self._ended.wait(seconds)

    def wait(self) -> bool:
        """On a GPU it orders what is queued after; host memory has no queue, so it returns when the
        operation has ended, or cannot end any more.

        One that is stuck behind another, whose member has left, does not know that. On a GPU its
        worker would go on and hear of the member, so here it does after a while.
        """
        self._faults.pop("wait", _nothing)()
        end_at = time.monotonic() + _STUCK_S
        while not self._ended.wait(_POLL_S) and not self.is_hopeless():
            if time.monotonic() > end_at:
                break
        return True


def _nothing() -> None:
    pass


class FakeGroup:
    """One member of a group."""

    def __init__(
        self,
        fabric: Fabric,
        device: Device,
        identifiers: Identifiers,
        rank: int,
        size: int,
        faults: Faults | None = None,
    ) -> None:
        self._faults = {} if faults is None else faults
        self._strike("make")
        if not identifiers.check([_KEY]):
            identifiers.set(_KEY, fabric.identifier())
        self.communicator = fabric.communicator(identifiers.get(_KEY), size)
        self.rank = rank
        self._device = device
        self._sums = 0
        self._exchanges = 0
        self._aborted = False
        #: While an abort is under way.
        self.aborting = threading.Event()
        self._used: set[str] = set()
        #: Of the device's pool, from when it begins to connect.
        self.stream = -1
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake NCCL", daemon=True).start()

    def _strike(self, call: str) -> None:
        self._faults.pop(call, _nothing)()

    @property
    def is_aborted(self) -> bool:
        return self._aborted

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        self._strike("connect")
        self.stream = self._device.take_stream()
        self.communicator.come(self.rank)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,), way = tensors, (self.rank, peer)
        offered = self.communicator.offered

        def kernel() -> None:
            with self.communicator.changed:
                offered[way] = tensor
                self.communicator.changed.notify_all()
                self._until(lambda: way not in offered)

        return self._enqueue("send", kernel, lambda: peer in self.communicator.gone)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        (tensor,), way = tensors, (peer, self.rank)
        offered = self.communicator.offered

        def kernel() -> None:
            with self.communicator.changed:
                self._until(lambda: way in offered)
                if self._aborted:
                    tensor.fill_(float("nan"))
                else:
                    tensor.copy_(offered.pop(way))
                self.communicator.changed.notify_all()

        return self._enqueue("recv", kernel, lambda: peer in self.communicator.gone)

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> FakeWork:
        (tensor,), number = tensors, self._sums
        self._sums += 1
        brought = self.communicator.brought

        def kernel() -> None:
            with self.communicator.changed:
                mine = brought.setdefault(number, {})
                mine[self.rank] = tensor.clone()
                self.communicator.changed.notify_all()
                self._until(lambda: len(mine) == self.communicator.size)
                if self._aborted:
                    tensor.fill_(float("nan"))
                else:
                    tensor.copy_(sum(mine[rank] for rank in sorted(mine)))

        def hopeless() -> bool:
            with self.communicator.changed:
                return bool(self.communicator.gone - brought.get(number, {}).keys())

        return self._enqueue("allreduce", kernel, hopeless)

    def alltoall(
        self, received: list[Tensor], sent: list[Tensor], options: AllToAllOptions
    ) -> FakeWork:
        number, held_out = self._exchanges, self.communicator.held_out
        self._exchanges += 1
        assert len(received) == len(sent) == self.communicator.size
        assert all(tensor.is_contiguous() for tensor in (*received, *sent))

        def kernel() -> None:
            with self.communicator.changed:
                mine = held_out.setdefault(number, {})
                mine[self.rank] = [tensor.clone() for tensor in sent]
                self.communicator.changed.notify_all()
                self._until(lambda: len(mine) == self.communicator.size)
                for rank, tensor in enumerate(received):
                    if self._aborted:
                        tensor.fill_(float("nan"))
                    else:
                        tensor.copy_(mine[rank][self.rank])

        def hopeless() -> bool:
            with self.communicator.changed:
                return bool(self.communicator.gone - held_out.get(number, {}).keys())

        return self._enqueue("alltoall", kernel, hopeless)

    def abort(self) -> None:
        self._aborted = True
        with self.communicator.changed:
            self.communicator.gone.add(self.rank)
            self.communicator.changed.notify_all()
        self._queue.put(None)
        self._strike("abort")
        self.aborting.set()
        self._device.synchronize()
        self.aborting.clear()

    def _enqueue(
        self, what: str, kernel: Callable[[], None], hopeless: Callable[[], bool]
    ) -> FakeWork:
        self._strike(what)
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")
        self._until_connected()
        if what not in self._used:
            self._used.add(what)
            self._device.synchronize()
        work = FakeWork(self.aborting, self._faults, hopeless)

        def run() -> None:
            has_turn = self._device.turn_in(self.stream, lambda: self._aborted)
            self._device.enter(work, lambda: self._aborted)
            error: Exception | None = None
            try:
                kernel()
                self._strike("end")
            except Exception as raised:  # noqa: BLE001  # what a test has it raise
                error = raised
            finally:
                self._device.leave(work)
                if has_turn:
                    self._device.done_in(self.stream)
                work.end(error)

        self._queue.put(run)
        return work

    def _until(self, done: Callable[[], bool]) -> None:
        """With the group's lock: until `done` or aborted."""
        self.communicator.changed.wait_for(lambda: done() or self._aborted)

    def _until_connected(self) -> None:
        """As torch does where a communicator is made without waiting: its first use waits."""
        while not self.communicator.is_connected:
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted")
            time.sleep(_POLL_S)

    def _run(self) -> None:
        while (kernel := self._queue.get()) is not None:
            kernel()
            del kernel  # and what it was for


class RankOfFabric:
    """Makes the groups of one rank, and keeps them for tests to look at."""

    def __init__(self, fabric: Fabric, device: Device | None = None) -> None:
        self.device = device or Device()
        self.groups: list[FakeGroup] = []
        self.faults: Faults = {}
        self._fabric = fabric

    def take_stream(self) -> int:
        return self.device.take_stream()

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> FakeGroup:
        group = FakeGroup(self._fabric, self.device, identifiers, rank, size, self.faults)
        self.groups.append(group)
        return group
