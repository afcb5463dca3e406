"""Chooses the transport of a generation and builds it.

All workers must choose the same: the choice follows from the job, and from what all say of their
devices when they meet. Must not know how messages travel.
"""

import logging
from collections.abc import Sequence
from typing import Literal

import msgspec
import torch

from oobleck.host.ipc.messages import Launch
from oobleck.planner.codec import decode, encode
from oobleck.planner.ids import WorkerId
from oobleck.planner.job.spec import TransportName
from oobleck.planner.programs.instructions import (
    Message,
    Program,
    SendActivation,
    SendGradient,
    SyncGradient,
)
from oobleck.planner.programs.plan import Plan
from oobleck.worker.runtime.device import nccl_version, open_device
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl.aborts import Aborts
from oobleck.worker.transport.nccl.transport import NcclLink, NcclTransport
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.transport import Group, Transport
from oobleck.worker.transport.tree import (
    MOST_MESHED,
    ring_neighbours,
    sum_neighbours,
    tree_neighbours,
)

Choice = Literal["links", "staged", "nccl"]

log = logging.getLogger(__name__)

#: torch has 32 streams of a priority; the transport itself uses one.
MOST_GROUPS = 31


def choose(device: torch.device, wanted: TransportName, told: Sequence["Announced"]) -> Choice:
    """NCCL where the job leaves the choice, every worker has a GPU that it shares with none, all
    have the same NCCL, and none is in too many groups. `told`: by rank.

    Links carry the tensors of CPUs as they are; a GPU's are staged for them. NCCL does not connect
    the parts of a divided GPU, or another version of itself; and groups beyond torch's streams
    share one, where operations of the one wait behind those of the other, in another order than at
    their peers perhaps.
    """
    if device.type == "cpu":
        return "links"
    if wanted != "auto":
        return "staged"
    boards = {one.board for one in told if one.board}
    versions = sorted({one.nccl for one in told if one.nccl})
    if len(boards) < len(told):
        log.info("staged through host memory", extra={"why": "workers share a GPU, or have none"})
        return "staged"
    most = max(one.groups for one in told)
    why = ""
    if len(versions) > 1:
        why = f"nodes have NCCL {' and '.join(versions)}; install one torch on all"
    elif most > MOST_GROUPS:
        why = f"a worker would be in {most} groups of NCCL's, and {MOST_GROUPS} work"
    if why:
        log.warning("staged through host memory, which is slow", extra={"why": why})
    return "staged" if why else "nccl"


def ways_of(worker: WorkerId, program: Program, plan: Plan) -> list[NcclLink]:
    """Sender and receiver, as ranks, of all messages that `worker` sends and receives in a step.

    Workers that hold layers together exchange weights and gradients, each with each.
    """
    rank = {worker: index for index, worker in enumerate(plan.workers)}
    own = rank[worker]
    ways = {
        (own, rank[step.peer])
        if isinstance(step, SendActivation | SendGradient)
        else (rank[step.peer], own)
        for step in program
        if isinstance(step, Message)
    }
    for hold in plan.holds:
        if worker in hold.workers:
            others = [rank[other] for other in hold.workers if other != worker]
            ways.update(way for other in others for way in ((own, other), (other, own)))
    return sorted(ways)


def owner_groups(program: Program, plan: Plan) -> list[Group]:
    """The distinct owner sets of the program, as ranks."""
    rank = {worker: index for index, worker in enumerate(plan.workers)}
    return sorted(
        {
            tuple(sorted(rank[owner] for owner in step.owners))
            for step in program
            if isinstance(step, SyncGradient)
        }
    )


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker tells the others of its device when they meet."""

    #: The board that its GPU, or its part of one, is on; no two hosts have the same. Empty: none.
    board: str = ""
    #: Of NCCL, which talks to its own version alone.
    nccl: str = ""
    #: How many groups of NCCL's it would be in.
    groups: int = 0


class Connector:
    """What one worker brings to every meeting: its device."""

    def __init__(self, launch: Launch) -> None:
        """Raises NodeError when this host does not have the device."""
        self.device, self._board = open_device(launch.device)
        self._wanted = launch.job.resources.transport
        self._stage_everything = launch.stage_everything
        self._aborts = Aborts(self.device)

    def announced(self, groups: Sequence[Group], ways: Sequence[NcclLink]) -> bytes:
        """What the others must know of this device. `groups`, `ways`: of this worker."""
        if not self._board:
            return encode(Announced())
        count = sum(len(group) > 1 for group in groups) + len(ways)
        return encode(Announced(board=self._board, nccl=nccl_version(), groups=count))

    def near(
        self, rank: int, size: int, groups: Sequence[Group], ways: Sequence[NcclLink]
    ) -> set[int]:
        """Ranks that a worker has links to from the begin: few workers to all, so that whoever
        dies is missed at once; many to those before and behind it, those that the gatherings and
        votes go by, and those it exchanges messages and sums with."""
        if size <= MOST_MESHED:
            return set(range(size)) - {rank}
        near = tree_neighbours(rank, size) | ring_neighbours(rank, size)
        near.update(peer for way in ways for peer in way)
        for group in groups:
            found = sum_neighbours(group.index(rank), len(group))
            # NCCL's sums begin when all owners have said that they are ready.
            near.update(group if self._board else (group[index] for index in found))
        return near - {rank}

    def equip(
        self,
        host: LinkTransport,
        words: Sequence[bytes],
        *,
        groups: Sequence[Group],
        ways: Sequence[NcclLink],
    ) -> Transport:
        """The transport of those who have met, whose host tensors go over `host`.

        `words`: what each has announced. Raises TransportError when it cannot be built, or `host`
        is aborted meanwhile; NodeError where this node's GPU cannot be used any more.
        """
        self._aborts.settle(host.check)
        choice = choose(self.device, self._wanted, [decode(Announced, word) for word in words])
        below: Transport = host
        if choice != "links" or self._stage_everything:
            below = StagedTransport(host, everything=self._stage_everything)
        if choice != "nccl":
            return below
        return NcclTransport(host, below, self.device, self._aborts, groups=groups, ways=ways)
