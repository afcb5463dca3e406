"""The transport over TCP: torch.distributed's gloo backend, and our own connections for small
messages.

Owns gloo's groups, and how what is blocked in them is released. Must not know programs, layers or
plans.

Gloo's own `abort` does nothing. A receive that nobody answers, with a time-out of its own, makes
gloo close every pair of that group; this releases operations that are blocked, here and, by the
closed sockets, at the peers. Gloo forgets some operations then; see `waiting` and `gloo_work`.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, cast

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    Store,
    Work,
)

from oobleck.worker.runtime.errors import TransportError, peers_may_fail
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.gloo_work import end_wait
from oobleck.worker.transport.peer_connections import (
    MOST_BYTES,
    MOST_SUM_BYTES,
    MeshSum,
    PeerConnections,
    Watch,
    nobody_watches,
)
from oobleck.worker.transport.rendezvous import CONNECT_LIMIT, RendezvousStore
from oobleck.worker.transport.transport import DISPOSE_DELAY_S, OPERATION_TIMEOUT, Group, Pending

_ABORT_TAG = (1 << 31) - 1
#: Transports that are over and not yet freed, beside the one that is being built.
_MOST_LEFT = 2


class _GlooGroup(Protocol):
    """What torch's type stubs leave out of ProcessGroupGloo."""

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Work: ...

    def allreduce(self, tensors: list[torch.Tensor], options: AllreduceOptions) -> Work: ...

    def allgather(
        self,
        outputs: list[list[torch.Tensor]],
        inputs: list[torch.Tensor],
        options: AllgatherOptions,
    ) -> Work: ...

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> Work: ...


class _Done:
    def wait(self) -> None:
        pass


class _GlooWork:
    """A gloo operation; keeps its tensors alive until it is done."""

    def __init__(
        self,
        work: Work,
        tensors: Sequence[torch.Tensor],
        waits: Waits,
        connections: PeerConnections | None,
    ) -> None:
        self._work = work
        self._tensors = tensors
        self._waits = waits
        self._connections = connections

    def wait(self) -> None:
        wait, connections = partial(self._work.wait, OPERATION_TIMEOUT), self._connections
        end = partial(end_wait, self._work)
        with peers_may_fail():
            if self._work.is_completed():  # never so of a receive
                done = wait()
            elif connections is not None and connections.blocked:
                # Whom this worker waits for may itself wait for what has not gone out yet.
                done = self._waits.run(wait, meanwhile=connections, end=end)
            else:
                done = self._waits.run(wait, end=end)
        if not done:
            raise TransportError("the wait for a message was ended")


def _closes_all_pairs(backend: _GlooGroup, peer: int) -> bool:
    """Whether an unanswered receive from `peer` has made gloo close every pair of the group.

    It has when its time-out struck. Where the pair with `peer` was broken already, as that with
    a dead process is, the receive fails at once and leaves the other pairs as they are.
    """
    try:
        backend.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError as error:
        return "Application timeout" in str(error)
    return False


class _Disposal(threading.Thread):
    """Frees what a transport holds, a while after its end or when it is told to hurry. No daemon:
    an interpreter that ends while a group is being freed in one aborts the process."""

    def __init__(self, free: Callable[[], None]) -> None:
        super().__init__(name="dispose-transport")
        self._free = free
        self._hurry = threading.Event()

    def run(self) -> None:
        # Peers that are a moment behind may still read what was sent last.
        self._hurry.wait(DISPOSE_DELAY_S)
        self._free()

    def hurry(self) -> None:
        self._hurry.set()
        self.join(DISPOSE_DELAY_S)


def _make_room() -> None:
    """However fast plans follow each other, a worker has few transports at a time. All that are
    met now have left those of long before."""
    leaving = [thread for thread in threading.enumerate() if isinstance(thread, _Disposal)]
    for disposal in leaving[:-_MOST_LEFT]:
        disposal.hurry()


def connect_timeout(size: int) -> timedelta:
    """How long building a group of `size` may take, once all members are known to have arrived.

    12 ranks on two cores take some 15 ms, but on a host that is busy with other things a member
    may be away for seconds. A member's death is not waited out: it releases the others.
    """
    return CONNECT_LIMIT + timedelta(milliseconds=20) * size


class GlooTransport:
    """Gloo groups over TCP: one of all ranks, and one per distinct set of a layer's owners."""

    def __init__(
        self,
        rendezvous: RendezvousStore,
        rank: int,
        size: int,
        groups: Sequence[Group],
        address: str,
        waits: Waits,
        *,
        peers: Collection[int] = (),
        meshed: bool = False,
        watch: Watch = nobody_watches,
    ) -> None:
        """`groups` must be the same sequence on all ranks: they are built in that order. Messages
        that are not large go to `peers` over connections of our own; each is one of the other's
        peers. `meshed`, the same on all: they are all others. `watch` is shown these connections.

        Raises TransportError when one cannot be built, or `waits` is released meanwhile.
        """
        _make_room()
        self.rank = rank
        self.size = size
        self._address = address
        self._everyone: Group = tuple(range(size))
        self._lock = threading.Lock()
        self._aborted = False
        self._meshed = meshed
        self._waits = waits
        self._backends: dict[Group, _GlooGroup] = {}
        for group in [self._everyone, *(g for g in groups if g != self._everyone)]:
            if rank in group and len(group) > 1:
                self._backends[group] = self._build(rendezvous, group)
        self._connections = (
            PeerConnections(rendezvous, rank, peers, address, watch=watch) if peers else None
        )

    def _build(self, rendezvous: RendezvousStore, group: Group) -> _GlooGroup:
        timeout = connect_timeout(len(group))
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # stubs call it Options
        options._timeout = timeout
        options._threads = 2
        options._devices = [ProcessGroupGloo.create_device(hostname=self._address)]
        name = "-".join(map(str, group)) if group != self._everyone else "everyone"
        rank = group.index(self.rank)

        def build(store: Store) -> ProcessGroupGloo:
            return ProcessGroupGloo(store, rank, len(group), options)

        return cast(_GlooGroup, rendezvous.connect(name, build, timeout))

    def _pending(self, work: Work, tensors: Sequence[torch.Tensor]) -> Pending:
        return _GlooWork(work, tensors, self._waits, self._connections)

    def _connections_for(self, tensor: torch.Tensor, peer: int) -> PeerConnections | None:
        """Both ends ask, and find the same: it follows from the link and the message's size."""
        connections = self._connections
        if connections is None or peer not in connections.peers or tensor.nbytes > MOST_BYTES:
            return None
        return connections

    def _mesh_for(self, tensor: torch.Tensor, group: Group) -> PeerConnections | None:
        small = tensor.nbytes <= MOST_SUM_BYTES
        return self._connections if self._meshed and small and group == self._everyone else None

    def send(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        if (connections := self._connections_for(tensor, peer)) is not None:
            return connections.send(tensor, peer, tag)
        with peers_may_fail():
            work = self._backends[self._everyone].send([tensor], peer, tag)
        return self._pending(work, [tensor])

    def receive(self, tensor: torch.Tensor, peer: int, tag: int) -> Pending:
        if (connections := self._connections_for(tensor, peer)) is not None:
            return connections.receive(tensor, peer, tag)
        with peers_may_fail():
            work = self._backends[self._everyone].recv([tensor], peer, tag)
        return self._pending(work, [tensor])

    def all_reduce(self, tensor: torch.Tensor, group: Group) -> Pending:
        if len(group) == 1:
            return _Done()
        if (connections := self._mesh_for(tensor, group)) is not None:
            return MeshSum(connections, tensor, self.rank, self.size)
        options = AllreduceOptions()
        options.timeout = OPERATION_TIMEOUT
        with peers_may_fail():
            work = self._backends[group].allreduce([tensor], options)
        return self._pending(work, [tensor])

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        if self.size == 1:
            return [tensor]
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = OPERATION_TIMEOUT
        with peers_may_fail():
            work = self._backends[self._everyone].allgather([gathered], [tensor], options)
        self._pending(work, [tensor, *gathered]).wait()
        return gathered

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        if self.size == 1:
            return
        options = BroadcastOptions()
        options.rootRank = root
        options.timeout = OPERATION_TIMEOUT
        with peers_may_fail():
            work = self._backends[self._everyone].broadcast([tensor], options)
        self._pending(work, [tensor]).wait()

    def complete(self) -> None:
        """Nothing: gloo's waits end with the operation."""

    def abort(self) -> None:
        with self._lock:
            first, self._aborted = not self._aborted, True
            backends = list(self._backends.items())
        if not first:
            return
        if self._connections is not None:
            self._connections.abort()
        # The group of all ranks comes first: most of what blocks, blocks in it.
        for group, backend in backends:
            for peer, rank in enumerate(group):
                if rank != self.rank and _closes_all_pairs(backend, peer):
                    break
        self._waits.release()

    def dispose(self) -> None:
        """Free threads and sockets, later and in the background: it takes tens of milliseconds."""
        _Disposal(self._free).start()

    def _free(self) -> None:
        self._waits.close()
        if self._connections is not None:
            self._connections.close()
        self._backends.clear()
