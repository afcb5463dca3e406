"""Choice and construction of a generation's transport.

All workers must choose the same: the choice follows from the job, and from the announcements of all
devices at the meeting. Must not know how messages travel.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from oobleck.core.codec import decode, encode
from oobleck.core.ids import WorkerId
from oobleck.core.job.spec import TransportName
from oobleck.core.messages import Launch
from oobleck.host.gpu.devices import SHARED
from oobleck.planner.profile.memory import GPU_CONTEXT_BYTES
from oobleck.planner.programs.communicators import (
    MOST_COMMUNICATORS,
    NO_WIRING,
    Name,
    Wiring,
    for_state,
    in_rounds,
)
from oobleck.planner.programs.transfer import Transfer
from oobleck.worker.runtime.device import (
    held_by_others,
    limit_allocator,
    nccl_version,
    open_device,
    torch_version,
)
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl.connect import LIMIT_S, STATE_LIMIT_S, Communicators, stamps_of
from oobleck.worker.transport.nccl.group import Aborts, GroupMaker, NcclMaker
from oobleck.worker.transport.nccl.transport import NcclTransport
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.transport import Transport
from oobleck.worker.transport.tree import (
    MOST_MESHED,
    ring_neighbours,
    sum_neighbours,
    tree_neighbours,
)

Choice = Literal["links", "staged", "nccl"]

#: Least number of chunks, 1 GiB together, for which two workers connect an NCCL group to move
#: state. Through the host that much takes half a second to one, about the time to connect a group.
#: An estimate: no GPU has been measured.
CONNECTED_CHUNKS = 16

#: Least version of torch over NCCL. Earlier ones ask NCCL about a communicator while another thread
#: of theirs is in it, which may end the process (pytorch/pytorch#169484).
LEAST_TORCH = (2, 10)

log = logging.getLogger(__name__)


def choose(has_gpu: bool, wanted: TransportName, devices: Sequence["Announced"]) -> Choice:
    """Return the kind of transport; `devices`: announcements by rank.

    NCCL is used if the job allows it, every worker has a GPU of its own, all have the same NCCL and
    a torch that is safe with it, and none is in too many groups. Otherwise links carry the tensors
    of CPUs directly, and those of GPUs staged in host memory.

    NCCL connects neither the parts of a divided GPU nor different versions of itself. If there are
    more groups than torch has streams, some share a stream. Their operations would then wait for
    each other, perhaps in another order than at their peers: a deadlock.
    """
    if not has_gpu:
        return "links"
    if wanted != "auto":
        return "staged"
    boards = {one.board for one in devices if one.board}
    versions = sorted({one.nccl for one in devices if one.nccl})
    if len(boards) < len(devices):
        log.info("staged through host memory", extra={"why": "workers share a GPU, or have none"})
        return "staged"
    most = max(one.groups for one in devices)
    oldest = min(one.torch for one in devices)
    why = ""
    if oldest < LEAST_TORCH:
        why = "a node has torch {}.{}, which is not safe with NCCL; install {}.{} or newer".format(
            *oldest, *LEAST_TORCH
        )
    elif len(versions) > 1:
        why = f"nodes have NCCL {' and '.join(versions)}; install one torch on all"
    elif most > MOST_COMMUNICATORS:
        why = f"a worker would be in {most} groups of NCCL's, and {MOST_COMMUNICATORS} work"
    if why:
        log.warning("staged through host memory, which is slow", extra={"why": why})
    return "staged" if why else "nccl"


@dataclass(frozen=True, slots=True)
class Moving:
    """State that moves before the first step."""

    #: By rank.
    members: Sequence[WorkerId]
    transfers: Sequence[Transfer]
    #: Bytes of each layer's state.
    layer_bytes: Sequence[int]


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """Announcement of a worker's device to the others at a meeting."""

    #: Board of its GPU, or of its part of one, unique over all hosts. Empty: none.
    board: str = ""
    #: Version of NCCL, which talks only to its own version.
    nccl: str = ""
    #: Major and minor version of torch.
    torch: tuple[int, int] = (0, 0)
    #: Number of NCCL groups that it would be in.
    groups: int = 0
    #: Groups that it has, as `Communicators.stamps`.
    has: bytes = b""
    #: True if it has begun a step before.
    trained: bool = False
    #: True if connecting took too long the last time.
    late: bool = False


def ways_of_state(moving: Moving, devices: Sequence[Announced], least_bytes: int) -> list[Name]:
    """Return the NCCL groups that are made to move state, each as (purpose, ranks): one for each
    pair that moves at least `least_bytes`, in the order of first use.

    Empty if connecting took too long on some member the last time. `devices`: announcements, by
    rank.
    """
    if any(one.late for one in devices):
        return []
    rank = {member: index for index, member in enumerate(moving.members)}
    has = {member: one.groups for member, one in zip(moving.members, devices, strict=True)}
    found = for_state(moving.transfers, moving.layer_bytes, has, least_bytes=least_bytes)
    return [
        (one.purpose, tuple(rank[member] for member in one.members))
        for each in in_rounds(found)
        for one in each
    ]


class Connector:
    """Device of one worker, and its announcements to meetings."""

    def __init__(self, launch: Launch) -> None:
        """Open the device; raises NodeError when this host does not have it."""
        self.device, self._board = open_device(launch.device)
        self._wanted = launch.job.resources.transport
        self._stage_everything = launch.stage_everything
        maker: GroupMaker = NcclMaker(self.device)
        if launch.nccl is not None:
            module, name, given = launch.nccl
            maker = getattr(importlib.import_module(module), name)(given)
            self._board = str(launch.worker)
        self._least_moved = launch.chunk_bytes * CONNECTED_CHUNKS
        self._shared = SHARED in launch.device_kind
        self._context_bytes = launch.context_bytes or GPU_CONTEXT_BYTES
        self._device_bytes = 0
        aborts = Aborts(self.device, replaced=launch.replaced)
        self._communicators = Communicators(self.device, aborts, maker)

    @property
    def has_gpu(self) -> bool:
        return bool(self._board)

    def announced(self, wiring: Wiring, *, trained: bool = False) -> bytes:
        """Return the announcement of this device. `trained`: it has begun a step before."""
        if not self._board:
            return encode(Announced())
        announcement = Announced(
            board=self._board,
            nccl=nccl_version(),
            torch=torch_version(),
            groups=len(wiring.names),
            has=self._communicators.stamps(),
            trained=trained,
            late=self._communicators.late,
        )
        return encode(announcement)

    def held_by_others(self) -> int:
        """Return the bytes of this worker's GPU that other processes hold, if it is the only worker
        there."""
        beside = self._context_bytes + self._device_bytes
        return 0 if self._shared else held_by_others(self.device, beside)

    def near(self, rank: int, size: int, wiring: Wiring) -> set[int]:
        """Return the ranks that a worker has links to from the beginning.

        Few workers are linked to all, so that a dead one is noticed at once. Among many, a worker
        is linked to its neighbours in rank and in its trees of gatherings and votes. It is also
        linked to those it exchanges messages and sums with.
        """
        if size <= MOST_MESHED:
            return set(range(size)) - {rank}
        near = tree_neighbours(rank, size) | ring_neighbours(rank, size)
        for purpose, members in wiring.names:
            # NCCL's sums begin when all owners have announced that they are ready.
            if purpose != "owners" or self._board:
                near.update(members)
            else:
                found = sum_neighbours(members.index(rank), len(members))
                near.update(members[index] for index in found)
        return near - {rank}

    def equip(
        self,
        host: LinkTransport,
        words: Sequence[bytes],
        wiring: Wiring,
        moving: Callable[[], Moving] | None = None,
    ) -> Transport:
        """Return the transport of the workers that have met, whose host tensors use `host`.

        `words`: announcements, by rank; `moving`: returns the state that moves first, the same on
        all workers; None: little moves. Raises TransportError if it cannot be built, or `host` is
        aborted meanwhile; HelperLost or NodeError if the GPU is no longer usable.
        """
        self._communicators.aborts.settle(host.check)
        try:
            devices = [decode(Announced, word) for word in words]
        except ValueError as error:
            raise TransportError(f"a member's announcement of its device is {error}") from error
        choice = choose(self.has_gpu, self._wanted, devices)
        below: Transport = host
        if choice != "links" or self._stage_everything:
            below = StagedTransport(host, everything=self._stage_everything)
        if wiring is NO_WIRING:
            return below
        self._device_bytes = wiring.device_bytes if choice == "nccl" else 0
        if choice != "nccl":
            self.release()
            limit_allocator(self.device, self._context_bytes)
            return below
        limit_allocator(self.device, self._context_bytes + wiring.device_bytes)
        has = [stamps_of(one.has) for one in devices]
        ways: list[Name] = []
        if moving is not None:
            ways = ways_of_state(moving(), devices, self._least_moved)
        # Connect before training if that costs nothing: before the first step of all, or if
        # training waits for much state anyway. Otherwise connect while training continues.
        at_once = bool(ways) or not any(one.trained for one in devices)
        own = [way for way in ways if host.rank in way[1] and ("link", way[1]) not in wiring.names]
        return NcclTransport(
            host,
            below,
            self._communicators,
            (*own, *wiring.names),
            has,
            at_once=at_once,
            late=any(one.late for one in devices),
            moves_state=bool(ways),
            limit_s=STATE_LIMIT_S if ways else LIMIT_S,
        )

    def release(self) -> None:
        """Return the GPU resources of this worker: it is in no plan that uses NCCL."""
        self._communicators.end_all()
