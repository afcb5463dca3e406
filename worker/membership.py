"""A worker's part in one generation: the groups it talks in and the lifeline it is watched by.

Owns joining (meet at the store, build the groups, close the ring) and the two ways of leaving:
on purpose, and because a peer is gone.
"""

from collections.abc import Callable, Sequence

from oobleck.host.ipc.messages import Assign
from oobleck.planner.ids import WorkerId
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.lifeline import Lifeline
from oobleck.worker.transport.nccl import Link
from oobleck.worker.transport.rendezvous import RendezvousStore, StoreServer, await_arrival
from oobleck.worker.transport.transport import Group


class Membership:
    """Holds what connects this worker to the others of a generation, until it leaves."""

    def __init__(
        self,
        assign: Assign,
        worker: WorkerId,
        *,
        members: Sequence[WorkerId],
        own_store: StoreServer,
        connector: Connector,
        groups: Sequence[Group],
        links: Sequence[Link],
        control: Control,
        on_lost: Callable[[str, Sequence[WorkerId]], None],
        on_arrival: Callable[[], None],
        meeting: str = "",
    ) -> None:
        """Join; returns when all `members` have. `meeting`: which one it is, of several in a
        generation.

        Raises TransportError when one is lost on the way, Superseded when a newer generation is
        wanted; nothing is left open then. `on_lost` is told, from another thread and at any time
        once all have arrived, that a peer is gone, and which ones' hosts do not answer;
        whatever waits for others is released then.
        `on_arrival` is called in between.
        """
        generation = assign.plan.generation
        self._control = control
        self._on_lost = on_lost
        self._members = members
        rank, size = members.index(worker), len(members)
        store, prefix = assign.rendezvous.store, assign.rendezvous.prefix + meeting
        waits = Waits()
        self._lost = False
        # What a push of an abrupt change and a neighbour's death release: first whatever waits for
        # the store and for connections ...
        self._release = waits.release
        control.on_abrupt(self._release)
        try:
            control.check_newest(generation)
            rendezvous = RendezvousStore(store, prefix, own=own_store, waits=waits)
            self._lifeline = Lifeline(
                rendezvous, rank, size, connector.address, silence_s=connector.silence_s
            )
            try:
                connector.announce(rendezvous)
                await_arrival(
                    rendezvous, size, lambda: control.check_newest(generation), generation
                )
                on_arrival()
                # Before the groups, in which a death is not noticed while they are built.
                self._lifeline.connect(self._peer_lost, lambda: control.check_wanted(generation))
                self.transport = connector.connect(
                    rendezvous,
                    rank,
                    size,
                    groups=groups,
                    links=links,
                    waits=waits,
                    watch=self._lifeline.show,
                )
            except BaseException:
                self._lifeline.close(goodbye=False)
                raise
        except BaseException:
            control.on_abrupt(None)
            waits.close()
            raise
        # ... and from here on in a group.
        self._release = self.transport.abort
        control.on_abrupt(self._release)
        try:
            control.check_wanted(generation)
            if self._lost:
                raise TransportError("a peer was lost while groups were built")
        except BaseException:
            self.leave(orderly=False)
            raise

    def _peer_lost(self, detail: str) -> None:
        self._on_lost(detail, self.silent())
        self._lost = True
        self._release()

    def silent(self) -> Sequence[WorkerId]:
        """Peers whose hosts have not answered for about as long as makes a lost one."""
        return [self._members[rank] for rank in self._lifeline.silent()]

    def stand_down(self) -> None:
        """Training is over: the end of a neighbour is no loss any more."""
        self._lifeline.close(goodbye=True)

    def leave(self, *, orderly: bool) -> None:
        """Leave the generation; a disorderly end releases the peers that wait for this worker."""
        self._control.on_abrupt(None)
        if not orderly:
            self.transport.abort()
        self._lifeline.close(goodbye=orderly)
        self.transport.dispose()
