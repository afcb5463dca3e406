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

NCCL's own rules are kept, and whoever breaks one is told (`Device.misused`): a communicator is for
one thread at a time, be it to launch or to ask, and a device for one launch at a time, whichever
group it is of. A launch takes time, most where its group is not connected; it holds a lock of the
group then, which an abort needs. An operation that has failed counts as completed while its kernel
runs on, until an abort. Within a node a lost peer is no error at all; over a network it is one
(`Fabric.network`). Unless torch is told to do without (`environment`), a watchdog asks about the
operations, too. Where it asks beside a launch, it takes that for the state of the group for ever,
so that no error is seen any more; for each failed operation it sleeps, and the end of the group
waits for it.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions

from oobleck.host.gpu.devices import worker_environment
from oobleck.worker.transport.nccl.group import Identifiers

#: A test that has come to a halt must not hold up the run.
_PATIENCE_S = 60.0
_POLL_S = 0.001
#: Time that a launch takes.
_LAUNCH_S = 0.0002
#: Longest wait of a group's first use for its connection; much shorter than that of workers.
_READY_S = 2.0
#: Sleep of the watchdog for a failed operation, in parts of the time that dumps are waited for.
_SLEEPS = 4
_DUMP_MILSEC = 15_000
_KEY = "0"
#: What workers have torch do.
WORKERS: Mapping[str, str] = worker_environment("cuda")

#: What a test has a rank's next call of some kind do first: it may raise, or take its time. The
#: calls: make, connect, send, recv, allreduce, alltoall, end (of an operation), synchronize, abort.
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


class Alone:
    """Where one thread may be at a time."""

    def __init__(self, misused: list[str] | None) -> None:
        """`misused`: told of each that comes while another one is there. None: many may be."""
        self._misused = misused
        self._lock = threading.Lock()
        #: What the one that is there does.
        self.inside = ""

    @contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """Raises AssertionError where another one is there."""
        with self._lock:
            other, self.inside = self.inside, self.inside or what
        if other and self._misused is not None:
            self._misused.append(f"{what} beside {other}")
            raise AssertionError(self._misused[-1])
        try:
            yield
        finally:
            self.inside = ""


class Device:
    """What a rank computes on."""

    def __init__(self, room: int = 4, streams: int = 32, *, strict: bool = True) -> None:
        """`room`: kernels that run at once; `streams`: those of the pool; `strict`: one launch at
        a time."""
        self._streams = [threading.Lock() for _ in range(streams)]
        self._taken = 0
        self._changed = threading.Condition()
        self._room = room
        self._running: set[object] = set()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        #: Computations: those that were queued, and those among them that are done.
        self._queued = self.computed = 0
        #: Calls that NCCL does not allow.
        self.misused: list[str] = []
        #: Launches, and what connects.
        self.launches = Alone(self.misused if strict else None)

    def compute(self, computation: Callable[[], None]) -> None:
        """Queue a computation. They run one after the other, while the host goes on."""
        if not self._queued:
            threading.Thread(target=self._compute, name="fake device", daemon=True).start()
        self._queued += 1
        self._queue.put(computation)

    def mark(self) -> "Mark":
        return Mark(self, self._queued)

    def close(self) -> None:
        """Compute no more."""
        self._queue.put(None)

    def _compute(self) -> None:
        while (computation := self._queue.get()) is not None:
            computation()
            self.computed += 1

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


class Mark:
    """Behind the computations that were queued before it."""

    def __init__(self, device: Device, behind: int) -> None:
        self._device = device
        self._behind = behind

    def query(self) -> bool:
        return self._device.computed >= self._behind


class Fabric:
    """What connects the devices; one for all ranks."""

    def __init__(self, together: int = 0, *, network: bool = False) -> None:
        """`together`: no group is connected before all members of so many have come, so that one
        who waits for a group before it begins another one waits for ever. `network`: what others
        have an operation under way with, and that goes, is an error."""
        self.lock = threading.Condition()
        self.network = network
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
        ask: Callable[[], Exception | None] = lambda: None,
        faults: Faults | None = None,
        *,
        blocks: bool = True,
    ) -> None:
        """`ask`: returns the group's error. `blocks`: torch has no watchdog, and waits itself."""
        self._faults = {} if faults is None else faults
        self._ask = ask
        self._blocks = blocks
        self._ended = threading.Event()
        self._error: Exception | None = None

    def end(self) -> None:
        self._ended.set()

    @property
    def has_ended(self) -> bool:
        """Whether its kernel has."""
        return self._ended.is_set()

    def wait_for(self, seconds: float) -> bool:
        """Whether it has ended by then."""
        return self._ended.wait(seconds)

    def is_completed(self) -> bool:
        """True also where its group has failed, though its kernel may run."""
        self._error = self._error or self._ask()
        return self._error is not None or self._ended.is_set()

    def exception(self) -> Exception | None:
        return self._error

    def synchronize(self) -> None:
        """On a GPU it orders what is queued after; host memory has no queue."""
        self._faults.pop("synchronize", _nothing)()

    def wait(self) -> bool:
        self.synchronize()
        if self._blocks:
            self._ended.wait()
        return True


def _nothing() -> None:
    pass


#: Over a network.
_PEER_GONE = "ncclRemoteError", "remote process exited or there was a network error"


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
        environment: Mapping[str, str] = WORKERS,
    ) -> None:
        """`environment`: torch's."""
        self._faults = {} if faults is None else faults
        self._strike("make")
        if not identifiers.check([_KEY]):
            identifiers.set(_KEY, fabric.identifier())
        self.communicator = fabric.communicator(identifiers.get(_KEY), size)
        self.rank = rank
        self._device = device
        self._sums = 0
        self._exchanges = 0
        #: NCCL's own calls on it.
        self._calls = Alone(device.misused)
        #: Held by a first use while it is not connected, and by an abort.
        self._lock = threading.Lock()
        #: What has failed, and whether anybody will ever hear.
        self._error: Exception | None = None
        self._is_deaf = False
        #: Operations whose kernels have not ended.
        self._works: list[FakeWork] = []
        self._aborted = False
        #: While an abort is under way.
        self.aborting = threading.Event()
        self._used: set[str] = set()
        #: Of the device's pool, from when it begins to connect.
        self.stream = -1
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fake NCCL", daemon=True).start()
        dump_s = int(environment.get("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", _DUMP_MILSEC)) / 1000
        self._has_watchdog = environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "0"
        self._watchdog = threading.Thread(
            target=self._watch, args=(_SLEEPS * dump_s,), name="fake watchdog", daemon=True
        )
        if self._has_watchdog:
            self._watchdog.start()

    def _strike(self, call: str) -> None:
        self._faults.pop(call, _nothing)()

    @property
    def is_aborted(self) -> bool:
        return self._aborted

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        with self._device.launches.entered("a connect"), self._calls.entered("a connect"):
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

        return self._enqueue("send", kernel)

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

        return self._enqueue("recv", kernel)

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> FakeWork:
        """An empty sum waits until all are connected, and launches nothing."""
        (tensor,), number = tensors, self._sums
        if not tensor.numel():
            return self._connected()
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

        return self._enqueue("allreduce", kernel)

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

        return self._enqueue("alltoall", kernel)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        with self.communicator.changed:
            self.communicator.gone.add(self.rank)
            self.communicator.changed.notify_all()
        self._queue.put(None)
        self._strike("abort")
        self.aborting.set()
        self._device.synchronize()
        self.aborting.clear()
        # Nobody else has it by now, so this thread destroys it, too.
        if self._has_watchdog:
            self._watchdog.join()

    def _ask(self) -> Exception | None:
        """The group's error. Raises AssertionError where torch would hold Python's lock until an
        abort is over, and where another thread is in NCCL."""
        assert not self.aborting.is_set(), "asked during an abort"
        self._is_deaf = self._is_deaf or bool(self._calls.inside)
        with self._calls.entered("a question"):
            return self._failure()

    def _failure(self) -> Exception | None:
        if self._is_deaf or self._aborted:
            return None
        if self._error is None and self.communicator.fabric.network:
            lost = self.communicator.gone - {self.rank}
            if lost and not all(work.has_ended for work in self._works):
                self._error = nccl_error(*_PEER_GONE, "Connection closed")
        return self._error

    def _watch(self, sleep_s: float) -> None:
        """torch's watchdog: it has a lock of its own with torch, and none with NCCL."""
        failed: set[FakeWork] = set()
        while not self._aborted:
            works = [work for work in self._works if not work.has_ended]
            self._is_deaf = self._is_deaf or bool(works and self._calls.inside)
            for work in works:
                if work not in failed and self._failure() is not None:
                    failed.add(work)
                    time.sleep(sleep_s)
            time.sleep(_POLL_S)

    def _connected(self) -> FakeWork:
        work = FakeWork(self._ask)
        with self._calls.entered("a question"):
            self._until_connected()
        work.end()
        return work

    def _enqueue(self, what: str, kernel: Callable[[], None]) -> FakeWork:
        with self._device.launches.entered(f"a {what}"), self._calls.entered(f"a {what}"):
            self._strike(what)
            self._until_connected()
            if what not in self._used:
                self._used.add(what)
                self._device.synchronize()
            time.sleep(_LAUNCH_S)
        work = FakeWork(self._ask, self._faults, blocks=not self._has_watchdog)

        def run() -> None:
            has_turn = self._device.turn_in(self.stream, lambda: self._aborted)
            self._device.enter(work, lambda: self._aborted)
            try:
                kernel()
                self._strike("end")
            except Exception as raised:  # noqa: BLE001  # what a test has it raise
                self._error = raised
                with self.communicator.changed:
                    self._until(lambda: False)
            finally:
                self._device.leave(work)
                if has_turn:
                    self._device.done_in(self.stream)
                work.end()

        self._works = [each for each in self._works if not each.has_ended] + [work]
        self._queue.put(run)
        return work

    def _until(self, done: Callable[[], bool]) -> None:
        """With the group's lock: until `done` or aborted."""
        self.communicator.changed.wait_for(lambda: done() or self._aborted)

    def _until_connected(self) -> None:
        """As torch does where a communicator is made without waiting: its first use waits, and
        holds a lock that an abort needs."""
        with self._lock:
            end_at = time.monotonic() + _READY_S
            while not self._aborted and not self.communicator.is_connected:
                if time.monotonic() > end_at:
                    raise RuntimeError("NCCL timeout")
                time.sleep(_POLL_S)
            if self._aborted:
                raise RuntimeError("NCCL communicator was aborted")

    def _run(self) -> None:
        while (kernel := self._queue.get()) is not None:
            kernel()
            del kernel  # and what it was for


class RankOfFabric:
    """Makes the groups of one rank, and keeps them for tests to look at."""

    def __init__(
        self,
        fabric: Fabric,
        device: Device | None = None,
        environment: Mapping[str, str] = WORKERS,
    ) -> None:
        """`environment`: torch's."""
        self.device = device or Device()
        self.groups: list[FakeGroup] = []
        #: Multiprocessors that each of them may take.
        self.most_ctas: list[int] = []
        self.faults: Faults = {}
        self._fabric = fabric
        self._environment = environment

    def mark(self) -> Mark:
        return self.device.mark()

    def take_stream(self) -> int:
        return self.device.take_stream()

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> FakeGroup:
        group = FakeGroup(
            self._fabric, self.device, identifiers, rank, size, self.faults, self._environment
        )
        self.most_ctas.append(most_ctas)
        self.groups.append(group)
        return group
