"""The fake of NCCL for ranks that are processes: a thread of the test's process connects them.

A worker's group asks it, over a socket, to do its operations one after the other. They run on a
device of `support.fake_nccl` that all groups of a process have in common, as if the ranks were
threads. A process that is killed does nothing any more, and those who wait for it wait for ever.
"""

import os
import queue
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, AllToAllOptions

from oobleck.worker.transport.nccl.group import Identifiers
from support.fake_nccl import Alone, Device, Fabric, FakeGroup, FakeWork, Mark

#: How often a thread that waits for something else looks whether its process has ended.
_LOOK_S = 0.02
_KEY = "0"
#: Of a process: which one a group gets is not asked of it, so none is ever given twice.
_STREAMS = 1 << 12
#: What a message is sent as: type, shape and bytes.
_Packed = tuple[str, tuple[int, ...], bytes]


def _packed(tensor: Tensor) -> _Packed:
    # A copy, since what numpy has seen cannot be resized any more.
    content = tensor.clone().view(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content


def _unpacked(packed: _Packed) -> Tensor:
    dtype, shape, content = packed
    if not content:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(bytearray(content), dtype=getattr(torch, dtype)).reshape(shape)


class Switch:
    """Connects the processes of one cluster. A context manager."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name, "switch"))
        self._fabric = Fabric()
        self._devices: dict[int, Device] = {}
        self._listener = Listener(self.path, "AF_UNIX", backlog=256)
        self._members: list[threading.Thread] = []
        self._ended = threading.Event()
        #: The first is readable once the other one is closed.
        self._end, self._ending = socket.socketpair()
        #: Operations that were done.
        self.done = 0
        #: One for each group that a member has begun to connect; added to by several threads.
        self._made: list[FakeGroup] = []
        #: By the members that are there: operations that each has done.
        self._uses: dict[FakeGroup, int] = {}
        #: Of those that are gone.
        self.ended: list[int] = []
        #: Cleared: no group is connected.
        self.connects = threading.Event()
        self.connects.set()
        #: Where it is a text, no group can be used: what that raises.
        self.fails = ""
        self._accepting = threading.Thread(target=self._accept, name="switch")
        self._accepting.start()

    def __enter__(self) -> "Switch":
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._ending.close()
        Client(self.path, "AF_UNIX").close()  # ends the wait for the next one
        self._accepting.join()
        for member in self._members:
            member.join()
        self._listener.close()
        self._end.close()
        self._folder.cleanup()

    @property
    def made(self) -> int:
        """How often a member has begun to connect a group."""
        return len(self._made)

    @property
    def there(self) -> int:
        """Members of groups that have not ended."""
        return len(self._uses)

    def all_are_used(self) -> bool:
        """Whether all members of all groups have used them more than once."""
        return all(count > 1 for count in tuple(self._uses.values()))

    def _accept(self) -> None:
        while True:
            connection = self._listener.accept()
            if self._ended.is_set():
                connection.close()
                return
            member = threading.Thread(target=self._serve, args=(connection,), name="switch member")
            member.start()
            self._members.append(member)

    def _serve(self, connection: Connection) -> None:
        """One member of a group, until it or the test ends."""
        group: FakeGroup | None = None
        try:
            identifier, rank, size, pid = connection.recv()
            # One launches at a time in the process, which is looked at there (`RemoteGroup`).
            device = self._devices.setdefault(pid, Device(streams=_STREAMS, strict=False))
            group = FakeGroup(self._fabric, device, Identifiers({_KEY: identifier}), rank, size)
            group.eager_connect_single_device(None)
            self._uses[group] = 0
            self._made.append(group)
            while self._end not in wait([connection, self._end]):
                connection.send(self._carry_out(group, connection, *connection.recv()))
        except (EOFError, OSError):
            pass  # the process, or its group, has ended
        finally:
            if group is not None:
                self.ended.append(self._uses.pop(group, 0))
                group.abort()
            connection.close()

    def _is_connected(self, group: FakeGroup) -> bool:
        return self.connects.is_set() and group.communicator.is_connected

    def _carry_out(
        self, group: FakeGroup, connection: Connection, what: str, packed: list[_Packed]
    ) -> list[_Packed] | str:
        """Returns what comes of it, or what is wrong. Raises EOFError when the member has
        ended."""
        if what == "connect":
            while not self._is_connected(group):
                self._look_for_end(connection)
                time.sleep(_LOOK_S / 10)
            return self.fails or []
        tensors = list(map(_unpacked, packed))
        if what == "send":
            work, tensors = group.send(tensors, 1, 0), []
        elif what == "receive":
            work = group.recv(tensors, 0, 0)
        elif what == "exchange":
            members = len(tensors) // 2
            tensors, sent = tensors[:members], tensors[members:]
            work = group.alltoall(tensors, sent, AllToAllOptions())
        else:
            work = group.allreduce(tensors, AllreduceOptions())
        while not work.wait_for(_LOOK_S):
            self._look_for_end(connection)
        self.done += 1
        self._uses[group] += 1
        return list(map(_packed, tensors))

    def _look_for_end(self, connection: Connection) -> None:
        """Raise EOFError if the member, which asks nothing in a wait, or the test has ended."""
        if self._ended.is_set() or connection.poll():
            raise EOFError


class RemoteGroup:
    """One member of a group, within a worker."""

    def __init__(
        self, path: str, identifiers: Identifiers, rank: int, size: int, launches: Alone
    ) -> None:
        """`launches`: those of the process."""
        if rank == 0:
            identifiers.set(_KEY, secrets.token_bytes(8))
        self._hello = identifiers.get(_KEY), rank, size, os.getpid()
        self._path = path
        self._connected = False
        self._aborted = threading.Event()
        #: The first is readable once the other one is closed.
        self._end, self._ending = socket.socketpair()
        self._asking = threading.Lock()
        self._launches, self._calls = launches, Alone([])
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        with self._launches.entered("a connect"), self._calls.entered("a connect"):
            self._connection = Client(self._path, "AF_UNIX")
            self._connection.send(self._hello)
        threading.Thread(target=self._run, name="fake NCCL", daemon=True).start()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        return self._enqueue("send", tensors, [])

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        return self._enqueue("receive", tensors, tensors)

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> FakeWork:
        if tensors[0].numel():
            return self._enqueue("sum", tensors, tensors)
        with self._calls.entered("a question"):
            self._connect()
        work = FakeWork(self._error)
        work.end()
        return work

    def alltoall(
        self, received: list[Tensor], sent: list[Tensor], options: AllToAllOptions
    ) -> FakeWork:
        return self._enqueue("exchange", [*received, *sent], received)

    def abort(self) -> None:
        self._aborted.set()
        self._ending.close()
        self._queue.put(None)
        with self._asking:  # whoever waits for an answer has it by now, or looks again
            self._connection.close()

    def _enqueue(self, what: str, tensors: list[Tensor], results: list[Tensor]) -> FakeWork:
        with self._launches.entered(f"a {what}"), self._calls.entered(f"a {what}"):
            self._connect()
        work = FakeWork(self._error)

        def kernel() -> None:
            try:
                for result, packed in zip(results, self._ask(what, tensors), strict=True):
                    result.copy_(_unpacked(packed))
            except (RuntimeError, EOFError, OSError):
                for result in results:
                    result.fill_(float("nan"))
            work.end()

        self._queue.put(kernel)
        return work

    def _connect(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("NCCL communicator was aborted")
        if not self._connected:
            self._connected = True
            self._ask("connect", [])

    def _error(self) -> None:
        with self._calls.entered("a question"):
            return

    def _ask(self, what: str, tensors: list[Tensor]) -> list[_Packed]:
        packed = list(map(_packed, tensors))
        with self._asking:
            if self._aborted.is_set():
                raise RuntimeError("NCCL communicator was aborted")
            self._connection.send((what, packed))
        while True:
            wait([self._connection, self._end])
            with self._asking:
                if self._aborted.is_set():
                    raise RuntimeError("NCCL communicator was aborted")
                if self._connection.poll():
                    answer: list[_Packed] | str = self._connection.recv()
                    if isinstance(answer, str):
                        raise RuntimeError(answer)
                    return answer

    def _run(self) -> None:
        while (kernel := self._queue.get()) is not None:
            kernel()


class RemoteMaker:
    """What workers call in NCCL's place."""

    def __init__(self, path: str) -> None:
        """`path`: of the switch."""
        self._path = path
        self._taken = 0
        self._launches = Alone([])
        self._device = Device()

    def mark(self) -> Mark:
        return self._device.mark()  # which computes nothing: what workers compute is done

    def make(self, identifiers: Identifiers, rank: int, size: int, most_ctas: int) -> RemoteGroup:
        return RemoteGroup(self._path, identifiers, rank, size, self._launches)

    def take_stream(self) -> int:
        # Of a pool as large as torch's; what groups do at the switch they do in others.
        self._taken += 1
        return self._taken % 32
