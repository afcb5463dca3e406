"""Chooses the transport of a generation and builds it.

All workers must choose the same: the choice follows from the job, and from what all say of their
devices in the store where they meet. Must not know how messages travel.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import permutations
from typing import Literal

import torch

from oobleck.host.ipc.messages import Launch
from oobleck.planner.ids import WorkerId
from oobleck.planner.job.spec import TransportName
from oobleck.planner.programs.instructions import (
    Program,
    SendActivation,
    SendGradient,
    SyncGradient,
)
from oobleck.planner.programs.plan import Plan
from oobleck.worker.runtime.device import open_device
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.gloo import GlooTransport
from oobleck.worker.transport.nccl import Link, NcclTransport
from oobleck.worker.transport.peer_connections import MOST_MESHED, Watch, nobody_watches
from oobleck.worker.transport.rendezvous import RendezvousStore
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.transport import Group, Transport

Choice = Literal["gloo", "staged", "nccl"]

_HOST_ONLY = "host only"


def choose(device: torch.device, wanted: TransportName, *, gpus_for_all: bool) -> Choice:
    """NCCL where the job leaves the choice and every worker has a GPU that it shares with none.

    Between CPUs gloo reads and writes the tensors themselves; a GPU's are staged for it.
    """
    if device.type == "cpu":
        return "gloo"
    return "nccl" if gpus_for_all and wanted == "auto" else "staged"


def links_of(programs: Mapping[WorkerId, Program], plan: Plan) -> list[Link]:
    """Sender and receiver of all messages of a step, as ranks; sorted, so the same for all.

    Workers that hold layers together exchange weights and gradients, each with each.
    """
    rank = {worker: index for index, worker in enumerate(plan.workers)}
    messages = {
        (rank[worker], rank[instruction.peer])
        for worker, program in programs.items()
        for instruction in program
        if isinstance(instruction, SendActivation | SendGradient)
    }
    exchanges = {
        (rank[one], rank[other])
        for hold in plan.holds
        for one, other in permutations(hold.workers, 2)
    }
    return sorted(messages | exchanges)


def owner_groups(programs: Iterable[Program], plan: Plan) -> list[Group]:
    """The distinct owner sets of all programs, as ranks, in an order that is the same for all."""
    rank = {worker: index for index, worker in enumerate(plan.workers)}
    return sorted(
        {
            tuple(sorted(rank[owner] for owner in instruction.owners))
            for program in programs
            for instruction in program
            if isinstance(instruction, SyncGradient)
        }
    )


class Connector:
    """What one worker brings to every rendezvous: its address and its device."""

    def __init__(self, launch: Launch) -> None:
        """Raises NodeError when this host does not have the device."""
        self.address = launch.address
        self.silence_s = launch.silence_s
        self.device, self._gpu = open_device(launch.device)
        self._wanted = launch.job.resources.transport
        self._stage_everything = launch.stage_everything

    def announce(self, rendezvous: RendezvousStore) -> None:
        """Say what the others must know of this device, before this worker arrives there."""
        if not self._gpu or rendezvous.add(f"gpu {self._gpu}", 1) > 1:
            rendezvous.set(_HOST_ONLY, "1")

    def connect(
        self,
        rendezvous: RendezvousStore,
        rank: int,
        size: int,
        *,
        groups: Sequence[Group],
        links: Sequence[Link],
        waits: Waits,
        watch: Watch = nobody_watches,
    ) -> Transport:
        """The transport of those who meet at `rendezvous`, once all have arrived. `watch` is shown
        the connections that carry messages, with the peers' ranks. Raises TransportError when it
        cannot be built, or `waits` is released meanwhile."""
        gpus = self.device.type != "cpu" and not rendezvous.has(_HOST_ONLY, timedelta(0))
        choice = choose(self.device, self._wanted, gpus_for_all=gpus)
        # Sums over owners go over NCCL then; only the vote and the like are the host's.
        over_host = () if choice == "nccl" else groups
        meshed = size <= MOST_MESHED
        peers = set(range(size)) if meshed else {p for link in links if rank in link for p in link}
        host: Transport = GlooTransport(
            rendezvous,
            rank,
            size,
            over_host,
            self.address,
            waits,
            peers=peers - {rank},
            meshed=meshed,
            watch=watch,
        )
        if choice != "gloo" or self._stage_everything:
            host = StagedTransport(host, everything=self._stage_everything)
        if choice != "nccl":
            return host
        try:
            return NcclTransport(
                rendezvous, host, self.device, groups=groups, links=links, waits=waits
            )
        except BaseException:
            host.dispose()
            raise
