"""A worker's membership in one generation: its transport, and the loss of its peers.

Owns joining, leaving (on purpose or because a peer is lost), and the report of a loss. Must not
know what members compute.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.messages import Assign, PeerLost
from oobleck.core.plan import Plan
from oobleck.planner.programs.communicators import NO_WIRING, Wiring, wiring_of
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime.errors import CalledOff, Released, Superseded, TransportError, Unreached
from oobleck.worker.transport.connect import Moving
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.meeting import epoch_of, secret_of
from oobleck.worker.transport.transport import Transport
from oobleck.worker.transport.tree import FAN_OUT, joined, parts

log = logging.getLogger(__name__)


def handover_members(assign: Assign) -> tuple[WorkerId, ...]:
    """Return the plan's workers, and those that leave after they hand over state, by rank."""
    return tuple(sorted({*assign.plan.workers, *assign.leaving}))


def join_handover(context: WorkerContext, assign: Assign, standing: bytes) -> "Membership":
    """Join the workers of `handover_members`. Raise what `join` raises."""
    return Membership(context, assign, handover_members(assign), standing, suffix="/handover")


def join(
    context: WorkerContext,
    assign: Assign,
    standing: bytes,
    moving: Callable[[Plan, Sequence[bytes]], Moving],
) -> "Membership":
    """Join the plan's workers.

    `standing`: this worker's announcement to the others when it joins. `moving`: maps all
    announcements to the state that moves. Raise TransportError if a worker is lost or unreachable,
    Superseded if a newer generation is wanted.
    """
    plan = assign.plan
    _probe(context, "before:rendezvous", assign)
    ties, gpu = context.job.model.ties, context.connector.has_gpu
    wiring = wiring_of(plan, context.worker, tied=ties, ordered=gpu)
    # At a boundary most state has moved in advance, and the rest is agreed on after the meeting.
    little = assign.boundary or assign.restore
    found = None if little else partial(moving, plan)
    return Membership(context, assign, plan.workers, standing, wiring=wiring, moving=found)


def _probe(context: WorkerContext, point: str, assign: Assign) -> None:
    step = context.progress.begun
    context.faults.reached(point, generation=assign.plan.generation, step=step)


def report_lost(
    context: WorkerContext,
    generation: Generation,
    error: TransportError,
    silent: Sequence[WorkerId] = (),
    *,
    left: bool = False,
) -> None:
    """Report to the agent that a peer is lost.

    May be called from any thread, and repeatedly: the same loss is reported once. `silent`: peers
    whose hosts do not answer. `left`: no peer is lost, but this worker leaves the others.
    """
    way_gone = error if isinstance(error, Unreached) else None
    unreached = set(silent)
    if way_gone and way_gone.worker:
        unreached.add(way_gone.worker)
    lost = PeerLost(
        generation=generation,
        step=context.progress.begun,
        detail=str(error),
        unreached=tuple(sorted(unreached)),
        host_unreached=way_gone is not None and way_gone.worker is None,
        left=left,
    )
    if context.control.report_lost(lost) and not isinstance(error, Released):
        log.warning("peer lost", extra={"generation": generation, "detail": lost.detail})


def _names_of(assign: Assign) -> Mapping[bytes, str]:
    """Return the names of the plan's workers, by identity, as far as the master knew them."""
    cards = zip(assign.plan.workers, assign.rendezvous.cards, strict=False)
    return {Card.read(card).identity: str(worker) for worker, card in cards if card}


class Membership:
    """Connection of this worker to the other members of a generation, until it leaves."""

    def __init__(
        self,
        context: WorkerContext,
        assign: Assign,
        members: Sequence[WorkerId],
        standing: bytes,
        *,
        wiring: Wiring = NO_WIRING,
        suffix: str = "",
        moving: Callable[[Sequence[bytes]], Moving] | None = None,
    ) -> None:
        """Join the other `members`; return when all have joined.

        `suffix`: distinguishes meetings of one generation. `moving`: maps all announcements to the
        state that moves after this meeting. Raise TransportError if a member is lost meanwhile,
        Superseded if a newer generation is wanted; nothing stays open then. Later losses are
        reported from another thread, which also releases every wait for other members.
        """
        generation = assign.plan.generation
        control = context.control
        self._context = context
        self._generation = generation
        self._members = members
        self._lost = threading.Event()
        #: Announcement of each member, by rank.
        self.standings: Sequence[bytes] = ()
        with ExitStack() as undo:
            undo.callback(control.on_abrupt, None)
            control.check_newest(generation)
            epoch = epoch_of(generation, 0 if suffix else 1)
            cards = [Card.read(card) for card in assign.rendezvous.cards if card]
            context.links.favour(epoch, cards)
            #: Transport over the links.
            self.host = LinkTransport(
                context.links,
                epoch,
                secret_of(assign.rendezvous.prefix + suffix),
                members.index(context.worker),
                len(members),
                on_lost=self._peer_lost,
                names=_names_of(assign),
            )
            undo.callback(self.host.abort)
            #: Called at an abrupt change and at the loss of a peer: it ends every wait for others.
            self._release = self.host.abort
            control.on_abrupt(self._release)
            try:
                self.transport = self._connect(assign, standing, wiring, moving)
            except Unreached as error:
                raise error.of(members) from None
            undo.pop_all()
        self._release = self.transport.abort
        control.on_abrupt(self._release)
        with ExitStack() as undo:
            undo.callback(self.leave, orderly=False)
            control.check_wanted(generation)
            if self._lost.is_set():
                raise TransportError("a peer was lost while groups were built")
            undo.pop_all()

    def _connect(
        self,
        assign: Assign,
        standing: bytes,
        wiring: Wiring,
        moving: Callable[[Sequence[bytes]], Moving] | None,
    ) -> Transport:
        """Wait for all members, and connect to this worker's neighbours."""
        context, generation, host = self._context, self._generation, self.host
        connector = context.connector
        near = connector.near(host.rank, host.size, wiring)

        def check_newest() -> None:
            context.control.check_newest(generation)

        try:
            at = Card.read(assign.rendezvous.host)
            trained = context.progress.begun > 0
            word = joined([connector.announced(wiring, trained=trained), standing])
            cards = self._cards_of_all(assign)
            announced = [parts(each, 2) for each in host.meet(at, near, word, check_newest, cards)]
        except CalledOff:
            raise Superseded(Generation(generation + 1)) from None
        devices, self.standings = zip(*announced, strict=True)
        _probe(context, "before:connect", assign)
        found = None if moving is None else partial(moving, self.standings)
        return connector.equip(host, devices, wiring, found)

    def _cards_of_all(self, assign: Assign) -> Mapping[int, Card] | None:
        """Return the members' cards by rank, as far as the master knew them.

        None if they are not needed, or if the members are not the plan's workers.
        """
        if len(self._members) <= FAN_OUT or tuple(self._members) != assign.plan.workers:
            return None
        cards = enumerate(assign.rendezvous.cards)
        return {rank: Card.read(card) for rank, card in cards if card}

    def _peer_lost(self, detail: str) -> None:
        report_lost(self._context, self._generation, TransportError(detail), self.silent())
        self._lost.set()
        self._release()

    @property
    def peers(self) -> Sequence[WorkerId]:
        return [member for member in self._members if member != self._context.worker]

    def is_lost(self, within_s: float) -> bool:
        """Wait for the loss of a peer, at most `within_s` seconds; return whether one is lost."""
        return self._lost.wait(within_s)

    def silent(self) -> Sequence[WorkerId]:
        """Return peers whose hosts have been silent for about the time that counts as a loss."""
        return [self._members[rank] for rank in self.host.silent()]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Replace errors in the block by this worker's own transport failure, if it has one.

        Otherwise the error would blame peers that were lost because of that failure.
        """
        try:
            yield
        except Unreached:
            raise
        except TransportError:
            if (failure := self.transport.failure) is not None:
                raise failure from None
            raise

    def stand_down(self) -> None:
        """Stop reporting lost peers, because training is over."""
        self.host.stand_down()

    def leave(self, *, orderly: bool) -> None:
        """Leave the generation.

        A disorderly end aborts the transport, which releases peers that wait for this worker.
        """
        self._context.control.on_abrupt(None)
        if not orderly:
            self.transport.abort()
        self.transport.dispose()
