"""A worker's part in one generation: the transport it talks by, and the loss of its peers.

Owns joining, the two ways of leaving (on purpose, and because a peer is gone), and the report of a
loss. Must not know what members do.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.messages import Assign, PeerLost
from oobleck.core.plan import Plan
from oobleck.worker.context import WorkerContext
from oobleck.worker.runtime.errors import CalledOff, Superseded, TransportError, Unreached
from oobleck.worker.transport.connect import NO_WIRING, Moving, Wiring, wiring_of
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.card import Card
from oobleck.worker.transport.meeting import epoch_of, secret_of
from oobleck.worker.transport.transport import Transport
from oobleck.worker.transport.tree import HANDS
from oobleck.worker.transport.words import joined, parts

log = logging.getLogger(__name__)


def meeting_of(assign: Assign) -> tuple[int, bytes]:
    """The epoch and the secret of the meeting of the plan's workers."""
    return epoch_of(assign.plan.generation, 1), secret_of(assign.rendezvous.prefix)


def handover_members(assign: Assign) -> tuple[WorkerId, ...]:
    """The plan's workers and those that leave and hand over what they alone hold, by rank."""
    return tuple(sorted({*assign.plan.workers, *assign.leaving}))


def join_handover(context: WorkerContext, assign: Assign, standing: bytes) -> "Membership":
    """Join those of `handover_members`. Raises as `join` does."""
    return _join(context, assign, handover_members(assign), standing, suffix="/handover")


def join(
    context: WorkerContext,
    assign: Assign,
    standing: bytes,
    moving: Callable[[Plan, Sequence[bytes]], Moving],
) -> "Membership":
    """Join the plan's workers. `standing`: what this one tells them as it comes; `moving`: what
    moves by what all have told.

    Raises TransportError when one is lost or not to be reached, Superseded when a newer generation
    is wanted.
    """
    plan = assign.plan
    _probe(context, "before:rendezvous", assign)
    ties, gpu = context.job.model.ties, context.connector.has_gpu
    wiring = wiring_of(plan, context.worker, tied=ties, ordered=gpu)
    # At a boundary most has come before, and what has is told behind the meeting.
    little = assign.boundary or assign.restore
    found = None if little else partial(moving, plan)
    return _join(context, assign, plan.workers, standing, wiring=wiring, moving=found)


def _join(
    context: WorkerContext,
    assign: Assign,
    members: Sequence[WorkerId],
    standing: bytes,
    *,
    wiring: Wiring = NO_WIRING,
    suffix: str = "",
    moving: Callable[[Sequence[bytes]], Moving] | None = None,
) -> "Membership":
    try:
        return Membership(context, assign, members, standing, wiring, suffix, moving)
    except Unreached as error:
        raise error.of(members) from None


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
    """Tell the agent that a peer is gone; from any thread, more than once if need be: of the same
    it is told once. `silent`: those whose hosts do not answer. `left`: no peer is gone, but this
    worker leaves the others."""
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
    if context.control.report_lost(lost):
        log.warning("peer lost", extra={"generation": generation, "detail": lost.detail})


def _names_of(assign: Assign) -> Mapping[bytes, str]:
    """Return the names of the plan's workers, by identity, as far as the master knew them."""
    cards = zip(assign.plan.workers, assign.rendezvous.cards, strict=False)
    return {Card.read(card).identity: str(worker) for worker, card in cards if card}


class Membership:
    """Connection of this worker to the others of a generation, until it leaves."""

    def __init__(
        self,
        context: WorkerContext,
        assign: Assign,
        members: Sequence[WorkerId],
        standing: bytes,
        wiring: Wiring,
        suffix: str,
        moving: Callable[[Sequence[bytes]], Moving] | None,
    ) -> None:
        """Returns when all `members` have joined. `suffix`: tells apart the meetings of one
        generation; `moving`: what state moves behind this one, by what all have told.

        Raises TransportError when a member is lost on the way, Superseded when a newer generation
        is wanted; nothing is left open then. Later losses are reported from another thread, and
        release whatever waits for others.
        """
        generation = assign.plan.generation
        control = context.control
        self._context = context
        self._generation = generation
        self._members = members
        self._lost = threading.Event()
        #: What each has told as it came, by rank.
        self.standings: Sequence[bytes] = ()
        with ExitStack() as undo:
            undo.callback(control.on_abrupt, None)
            control.check_newest(generation)
            epoch = epoch_of(generation, 0 if suffix else 1)
            cards = [Card.read(card) for card in assign.rendezvous.cards if card]
            context.links.favour(epoch, cards)
            self._host = LinkTransport(
                context.links,
                epoch,
                secret_of(assign.rendezvous.prefix + suffix),
                members.index(context.worker),
                len(members),
                on_lost=self._peer_lost,
                names=_names_of(assign),
            )
            undo.callback(self._host.abort)
            #: An abrupt change and the loss of a peer call it: whatever waits for others ends.
            self._release = self._host.abort
            control.on_abrupt(self._release)
            self.transport = self._connect(assign, standing, wiring, moving)
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
        """Wait for all members, and connect to those that are near."""
        context, generation, host = self._context, self._generation, self._host
        connector = context.connector
        near = connector.near(host.rank, host.size, wiring)

        def check_newest() -> None:
            context.control.check_newest(generation)

        try:
            at = Card.read(assign.rendezvous.host)
            trained = context.progress.begun > 0
            word = joined([connector.announced(wiring, trained=trained), standing])
            cards = self._cards_of_all(assign)
            told = [parts(each, 2) for each in host.meet(at, near, word, check_newest, cards)]
        except CalledOff:
            raise Superseded(Generation(generation + 1)) from None
        devices, self.standings = zip(*told, strict=True)
        _probe(context, "before:connect", assign)
        found = None if moving is None else partial(moving, self.standings)
        return connector.equip(host, devices, wiring, found)

    def _cards_of_all(self, assign: Assign) -> Mapping[int, Card] | None:
        """Return the cards by rank, as far as the master knew them. None: they are not needed, or
        the members are not the plan's workers."""
        if len(self._members) <= HANDS or tuple(self._members) != assign.plan.workers:
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
        """Peers whose hosts have not answered for about as long as makes a lost one."""
        return [self._members[rank] for rank in self._host.silent()]

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Around what is done in the generation: what has failed in this worker's own part of the
        transport is raised, and not that others are lost for it."""
        try:
            yield
        except Unreached:
            raise
        except TransportError:
            if (failure := self.transport.failure) is not None:
                raise failure from None
            raise

    @property
    def host(self) -> LinkTransport:
        """Transport by way of the links."""
        return self._host

    def stand_down(self) -> None:
        """Training is over: the end of a peer is no loss any more."""
        self._host.stand_down()

    def leave(self, *, orderly: bool) -> None:
        """Leave the generation; a disorderly end releases the peers that wait for this worker."""
        self._context.control.on_abrupt(None)
        if not orderly:
            self.transport.abort()
        self.transport.dispose()
