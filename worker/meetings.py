"""The meetings of a generation: who meets whom, and what is told of a peer that is gone.

Owns the two kinds of meeting (the plan's own, and the one in which those who leave hand over what
they alone hold) and the report of a loss. How members come to talk is `membership`'s. Must not know
what they do then.
"""

import logging
from collections.abc import Mapping, Sequence

from oobleck.host.ipc.messages import Assign, PeerLost
from oobleck.planner.ids import Generation, WorkerId
from oobleck.planner.programs.instructions import Program
from oobleck.worker.membership import Membership
from oobleck.worker.recovery.recover import members_of
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.errors import TransportError, Unreached
from oobleck.worker.runtime.faults import FaultInjector
from oobleck.worker.step.commit import TrainingProgress
from oobleck.worker.step.executor import owner_groups
from oobleck.worker.transport.connect import Connector, links_of
from oobleck.worker.transport.nccl import Link
from oobleck.worker.transport.rendezvous import StoreServer
from oobleck.worker.transport.transport import Group

log = logging.getLogger(__name__)


class Meetings:
    """Of one worker, over all generations."""

    def __init__(
        self,
        *,
        worker: WorkerId,
        connector: Connector,
        own_store: StoreServer,
        progress: TrainingProgress,
        control: Control,
        faults: FaultInjector,
    ) -> None:
        self._worker = worker
        self._connector = connector
        self._own_store = own_store
        self._progress = progress
        self._control = control
        self._faults = faults

    def hand_over(self, assign: Assign) -> Membership:
        """Meet the plan's workers and those that leave. Raises as `join` does."""
        return self._member(assign, members_of(assign), groups=(), links=(), meeting="/handover")

    def join(self, assign: Assign, programs: Mapping[WorkerId, Program]) -> Membership:
        """Meet the plan's workers, to run `programs`.

        Raises TransportError when one is lost or not to be reached, Superseded when a newer
        generation is wanted.
        """
        plan = assign.plan
        self._probe("before:rendezvous", assign)
        return self._member(
            assign,
            plan.workers,
            groups=owner_groups(programs.values(), plan),
            links=links_of(programs, plan),
        )

    def lost(
        self, generation: Generation, error: TransportError, silent: Sequence[WorkerId] = ()
    ) -> None:
        """Tell the agent that a peer is gone; from any thread, more than once if need be. `silent`:
        those whose hosts do not answer."""
        log.warning("peer lost", extra={"generation": generation, "detail": str(error)})
        way_gone = error if isinstance(error, Unreached) else None
        unreached = set(silent)
        if way_gone and way_gone.worker:
            unreached.add(way_gone.worker)
        self._control.report(
            PeerLost(
                generation=generation,
                step=self._progress.begun,
                detail=str(error),
                unreached=tuple(sorted(unreached)),
                store_unreached=way_gone is not None and way_gone.worker is None,
            )
        )

    def _member(
        self,
        assign: Assign,
        members: Sequence[WorkerId],
        *,
        groups: Sequence[Group],
        links: Sequence[Link],
        meeting: str = "",
    ) -> Membership:
        try:
            return Membership(
                assign,
                self._worker,
                members=members,
                own_store=self._own_store,
                connector=self._connector,
                groups=groups,
                links=links,
                control=self._control,
                on_lost=lambda detail, silent: self.lost(
                    assign.plan.generation, TransportError(detail), silent
                ),
                on_arrival=lambda: self._probe("before:connect", assign),
                meeting=meeting,
            )
        except Unreached as error:
            raise error.of(members) from None

    def _probe(self, point: str, assign: Assign) -> None:
        generation = assign.plan.generation
        self._faults.reached(point, generation=generation, step=self._progress.begun)
