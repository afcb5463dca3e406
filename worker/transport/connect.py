"""Chooses the transport of a generation and builds it.

All workers must choose the same: the choice follows from the job, and from what all say of their
devices when they meet. Must not know how messages travel.
"""

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
from oobleck.worker.runtime.device import open_device
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.group_store import GroupStore, StoreServer
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl import NcclLink, NcclTransport
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.transport import Group, Transport
from oobleck.worker.transport.tree import (
    MOST_MESHED,
    ring_neighbours,
    sum_neighbours,
    tree_neighbours,
)

Choice = Literal["links", "staged", "nccl"]


def choose(device: torch.device, wanted: TransportName, *, gpus_for_all: bool) -> Choice:
    """NCCL where the job leaves the choice and every worker has a GPU that it shares with none.

    Links carry the tensors of CPUs as they are; a GPU's are staged for them.
    """
    if device.type == "cpu":
        return "links"
    return "nccl" if gpus_for_all and wanted == "auto" else "staged"


def links_of(worker: WorkerId, program: Program, plan: Plan) -> list[NcclLink]:
    """Sender and receiver, as ranks, of all messages that `worker` sends and receives in a step;
    sorted, so those of two workers that both have are in the same order on both.

    Workers that hold layers together exchange weights and gradients, each with each.
    """
    rank = {worker: index for index, worker in enumerate(plan.workers)}
    own = rank[worker]
    links = {
        (own, rank[step.peer])
        if isinstance(step, SendActivation | SendGradient)
        else (rank[step.peer], own)
        for step in program
        if isinstance(step, Message)
    }
    for hold in plan.holds:
        if worker in hold.workers:
            others = [rank[other] for other in hold.workers if other != worker]
            links.update(link for other in others for link in ((own, other), (other, own)))
    return sorted(links)


def owner_groups(program: Program, plan: Plan) -> list[Group]:
    """The distinct owner sets of the program, as ranks; sorted, so those of two workers that both
    have are in the same order on both."""
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

    #: Empty: it has none.
    gpu: str = ""
    #: Where NCCL's groups would find each other: host:port.
    store: str = ""


class Connector:
    """What one worker brings to every meeting: its device."""

    def __init__(self, launch: Launch) -> None:
        """Raises NodeError when this host does not have the device."""
        self.device, self._gpu = open_device(launch.device)
        self._wanted = launch.job.resources.transport
        self._stage_everything = launch.stage_everything
        self._store = StoreServer(launch.address) if self._gpu else None

    def announced(self) -> bytes:
        """What the others must know of this device."""
        store = self._store.endpoint if self._store is not None else ""
        return encode(Announced(gpu=self._gpu, store=store))

    def near(
        self, rank: int, size: int, groups: Sequence[Group], links: Sequence[NcclLink]
    ) -> set[int]:
        """Ranks that a worker has links to from the begin: few workers to all, so that whoever
        dies is missed at once; many to those before and behind it, those that the gatherings and
        votes go by, and those it exchanges messages and sums with."""
        if size <= MOST_MESHED:
            return set(range(size)) - {rank}
        near = tree_neighbours(rank, size) | ring_neighbours(rank, size)
        near.update(peer for link in links for peer in link)
        for group in groups:
            found = sum_neighbours(group.index(rank), len(group))
            near.update(group[index] for index in found)
        return near - {rank}

    def equip(
        self,
        host: LinkTransport,
        words: Sequence[bytes],
        prefix: str,
        *,
        groups: Sequence[Group],
        links: Sequence[NcclLink],
        waits: Waits,
    ) -> Transport:
        """The transport of those who have met, whose host tensors go over `host`.

        `words`: what each has announced; `prefix`: tells this meeting from others. Raises
        TransportError when it cannot be built, or `waits` is released meanwhile.
        """
        told = [decode(Announced, word) for word in words]
        gpus = [one.gpu for one in told if one.gpu]
        alone = len(set(gpus)) == len(told)
        choice = choose(self.device, self._wanted, gpus_for_all=alone)
        below: Transport = host
        if choice != "links" or self._stage_everything:
            below = StagedTransport(host, everything=self._stage_everything)
        if choice != "nccl":
            return below
        assert self._store is not None, "it has a GPU"
        store = GroupStore(told[0].store, prefix, own=self._store, waits=waits)
        return NcclTransport(store, below, self.device, groups=groups, links=links, waits=waits)
