"""NCCL between GPUs: the messages of a program and the sums of gradients.

There is one process group per set of owners, for sums, and one per link (a sender and a receiver).
A link has its own communicator and stream, and its messages go one way, so they arrive in the order
in which they are sent, and no two workers can wait for each other. Everything else goes over the
`host` transport: host tensors (votes, recovery states), and layer state between workers that the
program does not connect, since making a communicator would take longer than it saves.

An abort ends kernels that wait for a peer, and what they leave in the tensors means nothing. So
every call raises after an abort, and the host waits for each receive: else gradients computed from
garbage would count as a part of the step. For sums, of which nothing is computed before the vote,
and for sends, `Pending.wait` only orders what is queued on the device later behind the result;
`complete` is where the host learns whether everything has happened. torch's own watchdog must leave
errors alone (`oobleck.host.device.worker_environment`).
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, Store, Work

from oobleck.worker.runtime import pulse
from oobleck.worker.runtime.errors import TransportError, peers_may_fail
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.group_store import GroupStore
from oobleck.worker.transport.transport import (
    DISPOSE_DELAY_S,
    OPERATION_TIMEOUT,
    Group,
    Pending,
    Transport,
)

#: From one rank to another.
NcclLink = tuple[int, int]

#: NCCL finds out about the machines' wires while it makes a communicator.
CONNECT_TIMEOUT = timedelta(seconds=60)


class ProcessGroup(Protocol):
    """What is used of ProcessGroupNCCL."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[Tensor], options: AllreduceOptions) -> Work: ...

    def abort(self) -> None: ...


#: Makes a process group from its store, this member's number and the number of members.
MakeGroup = Callable[[Store, int, int], ProcessGroup]


def make_nccl_group(store: Store, rank: int, size: int) -> ProcessGroup:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # builds of torch for CPUs lack it

    options = ProcessGroupNCCL.Options()
    options._timeout = OPERATION_TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)  # type: ignore[return-value]  # stubs


class _Queued:
    """An operation on the device's own queue; keeps its tensor until its end is queued too."""

    def __init__(self, transport: "NcclTransport", work: Work, tensor: Tensor) -> None:
        self._transport = transport
        self._work = work
        self._tensor = tensor

    def wait(self) -> None:
        self._transport.check()
        with peers_may_fail():
            self._work.wait()


class _Arriving(_Queued):
    """A receive, whose end the host sees: apart from the device's other work, which goes on."""

    def wait(self) -> None:
        self._transport.check()
        with peers_may_fail(), self._transport.apart():
            self._work.wait()
        self._transport.check()


class NcclTransport:
    """Groups of one generation on one GPU per rank."""

    def __init__(
        self,
        store: GroupStore,
        host: Transport,
        device: torch.device,
        *,
        groups: Sequence[Group],
        links: Sequence[NcclLink],
        waits: Waits,
        make_group: MakeGroup = make_nccl_group,
    ) -> None:
        """`groups` and `links`: of this rank; those that two ranks both have must come in the same
        order on both.

        Each is connected here, in that order, so that the first message of a step need not wait
        until its peer comes to it. Raises TransportError when one cannot be, or `waits` is
        released meanwhile; then `host` is the caller's to end.
        """
        self.rank = host.rank
        self.size = host.size
        self._host = host
        self._device = device
        #: Where the host waits for what arrives.
        self._arrivals: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._arrivals = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no types
        self._lock = threading.Lock()
        self._aborted = False
        self._owners: dict[Group, ProcessGroup] = {}
        self._links: dict[NcclLink, ProcessGroup] = {}
        limit_s = CONNECT_TIMEOUT.total_seconds()
        try:
            for group in groups:
                if self.rank in group and len(group) > 1:
                    name = "owners-" + "-".join(map(str, group))
                    self._owners[group] = self._build(store, name, group, make_group)
                    waits.run(partial(self._try_owners, group), limit_s)
            for link in links:
                if self.rank in link:
                    name = f"link-{link[0]}-{link[1]}"
                    self._links[link] = self._build(store, name, link, make_group)
                    waits.run(partial(self._try_link, link), limit_s)
        except BaseException:
            self._abort_groups()
            raise

    def _build(
        self,
        store: GroupStore,
        name: str,
        members: tuple[int, ...],
        make_group: MakeGroup,
    ) -> ProcessGroup:
        index = members.index(self.rank)
        return store.build(
            name, lambda part: make_group(part, index, len(members)), CONNECT_TIMEOUT
        )

    def _try_owners(self, group: Group) -> None:
        self.all_reduce(torch.zeros(1, device=self._device), group).wait()
        self.complete()

    def _try_link(self, link: NcclLink) -> None:
        probe = torch.zeros(1, device=self._device)
        if self.rank == link[0]:
            self.send(probe, link[1], 0).wait()
        else:
            self.receive(probe, link[0], 0).wait()
        self.complete()

    def check(self) -> None:
        """Raises TransportError after an abort."""
        if self._aborted:
            raise TransportError("the groups were aborted")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is waited for within has happened after it."""
        if self._arrivals is None:
            yield
            return
        with torch.cuda.stream(self._arrivals):
            yield
        with pulse.WAITING:
            self._arrivals.synchronize()

    def _on_device(self, tensor: Tensor) -> bool:
        return tensor.device == self._device

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        group = self._links.get((self.rank, peer))
        if group is None or not self._on_device(tensor):
            return self._host.send(tensor, peer, tag)
        self.check()
        with peers_may_fail():
            return _Queued(self, group.send([tensor], 1, 0), tensor)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        group = self._links.get((peer, self.rank))
        if group is None or not self._on_device(tensor):
            return self._host.receive(tensor, peer, tag)
        self.check()
        with peers_may_fail():
            return _Arriving(self, group.recv([tensor], 0, 0), tensor)

    def all_reduce(self, tensor: Tensor, group: Group) -> Pending:
        owners = self._owners.get(group)
        if owners is None or not self._on_device(tensor):
            return self._host.all_reduce(tensor, group)
        self.check()
        with peers_may_fail():
            return _Queued(self, owners.allreduce([tensor], AllreduceOptions()), tensor)

    def gather(self, word: bytes) -> list[bytes]:
        return self._host.gather(word)

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self._host.all_gather(tensor)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        self._host.broadcast(tensor, root)

    def complete(self) -> None:
        """An abort ends the wait as well: the kernels that it waits for end."""
        if self._device.type == "cuda":
            with pulse.WAITING:
                torch.cuda.current_stream(self._device).synchronize()
        self.check()
        self._host.complete()

    def abort(self) -> None:
        # First the mark, then the kernels: whoever sees a result after this does not use it.
        self._abort_groups()
        self._host.abort()

    def _abort_groups(self) -> None:
        with self._lock:
            first, self._aborted = not self._aborted, True
        if first:
            for group in (*self._links.values(), *self._owners.values()):
                group.abort()

    def dispose(self) -> None:
        """Communicators are aborted, not closed, which would be a talk with their other members;
        later, as peers may still read what was sent last. No daemon thread: an interpreter that
        ends while one frees a group aborts the process."""
        threading.Thread(target=self._free, name="dispose-groups").start()
        self._host.dispose()

    def _free(self) -> None:
        time.sleep(DISPOSE_DELAY_S)
        self._abort_groups()
