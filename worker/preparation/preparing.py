"""Preparation of a coming plan while training goes on: make before break.

A plan for a step boundary is announced to all its workers and those of the previous plan. Each
compiles its program, opens missing links, and sends layers ahead of the plan to the workers that
will hold them (`source`, `sink`). A worker votes for the switch once it is ready. State that has
not arrived by then is fetched when the plan is entered, as after a loss. If a newer plan replaces
the coming one, all preparation for it is dropped. Must not know how plans are made.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Container, Sequence
from functools import partial

import torch

from oobleck.core.ids import Generation, WorkerId
from oobleck.core.messages import Assign
from oobleck.core.plan import Plan
from oobleck.core.routes import LayerLost
from oobleck.planner.programs.communicators import wiring_of
from oobleck.planner.programs.compiler.compile import Work
from oobleck.planner.programs.compiler.own import OwnProgram, compile_own
from oobleck.planner.programs.transfer import Transfer, plan_transfers
from oobleck.worker.context import WorkerContext
from oobleck.worker.preparation.sink import Sink
from oobleck.worker.preparation.source import ACKNOWLEDGED, REFUSED, Over, Source
from oobleck.worker.state.layout import layer_sizes
from oobleck.worker.state.precision import state_dtype
from oobleck.worker.state.progress import Omissions
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.link import Content, Incoming
from oobleck.worker.transport.links.wire import Label
from oobleck.worker.transport.meeting import epoch_of, secret_of

log = logging.getLogger(__name__)


def compile_program(context: WorkerContext, plan: Plan, work: Work | None = None) -> OwnProgram:
    """Return this worker's part of `plan`; `work`: the remaining work of an interrupted step."""
    job = context.job
    width = state_dtype(job.training.precision).itemsize
    sizes = layer_sizes(job.model, job.training.optimizer.no_decay)
    layer_bytes = [size * width for size in sizes]
    return compile_own(
        plan, context.worker, tied=job.model.ties, layer_bytes=layer_bytes, work=work
    )


class _Coming:
    """Preparation of one coming plan."""

    def __init__(self, context: WorkerContext, assign: Assign, present: Plan | None) -> None:
        """Begin with `assign`. `present`: the plan that it replaces; None: there is none."""
        self.plan = assign.plan
        self.epoch = epoch_of(assign.plan.generation, 1)
        self._secret = secret_of(assign.rendezvous.prefix)
        #: This worker's program; None until it is compiled, or if the worker is not in the plan.
        self.own: OwnProgram | None = None
        self._context = context
        self._assign = assign
        self._present = present
        #: True once the ends of all streams are sent.
        self._left = present is None
        #: Whether this worker has taken over the layers fed to it.
        self.taken = False
        self.sink = Sink(
            context.links,
            self,
            context.state,
            context.job.training,
            assign.plan.shards.get(context.worker, ()),
        )
        self._cards = {
            worker: Card.read(card)
            for worker, card in zip(assign.plan.workers, assign.rendezvous.cards, strict=False)
            if card
        }
        #: Sources by taker; None until the transfers are known.
        self._sources: dict[bytes, Source] | None = None
        context.links.favour(self.epoch, self._cards.values())
        context.links.expect(self._secret, self)

    def feed(self, peer: bytes, label: Label) -> Incoming | None:
        if label not in (ACKNOWLEDGED, REFUSED):
            return self.sink.frame(peer, label)
        source = (self._sources or {}).get(peer)
        return Content(partial(source.answered, label)) if source is not None else None

    def cut(self, peer: bytes) -> None:
        self.sink.cut(peer)
        source = (self._sources or {}).get(peer)
        if source is not None:
            source.cut = True

    def work_out(self) -> None:
        """Compile, connect and find the transfers: work that grows with the number of workers. Runs
        in a thread of its own."""
        sources: dict[bytes, Source] = {}
        try:
            if self._context.worker in self.plan.workers:
                own = compile_program(self._context, self.plan)
                self._connect()
                self.own = own
            sources = self._make_sources()
        except Exception:
            # Thread boundary: entering the plan repeats the work and raises the error.
            log.exception("a plan cannot be prepared")
        # Takers that know the plan answer before the next step boundary. The sources must be in
        # place first, or the answers would find none.
        with self._context.links.lock:
            self._sources = sources
            for source in sources.values():
                source.offer()

    def _make_sources(self) -> dict[bytes, Source]:
        context = self._context
        transfers = self._own_transfers()
        context.links.connect([self._cards[taker] for taker in transfers], self.epoch)
        members = self._present.workers if self._present is not None else ()
        sources: dict[bytes, Source] = {}
        for taker, own in transfers.items():
            identity, newcomer = self._cards[taker].identity, taker not in members
            sources[identity] = Source(
                context.links, self, context.state, identity, own, newcomer=newcomer
            )
        return sources

    def _connect(self) -> None:
        """Connect to the peers that the plan needs.

        Of two peers, the one with the larger identity connects.
        """
        context, workers = self._context, self.plan.workers
        tied = context.job.model.ties
        wiring = wiring_of(self.plan, context.worker, tied=tied, ordered=False)
        rank = workers.index(context.worker)
        ranks = context.connector.near(rank, len(workers), wiring)
        near = [self._cards[workers[rank]] for rank in ranks if workers[rank] in self._cards]
        identity = context.links.identity
        context.links.connect([card for card in near if identity > card.identity], self.epoch)

    def _own_transfers(self) -> dict[WorkerId, list[Transfer]]:
        present, assign, job = self._present, self._assign, self._context.job
        if present is None or assign.restore:
            return {}
        away = set() if assign.handover else set(assign.leaving)
        held = {worker: shards for worker, shards in present.shards.items() if worker not in away}
        found: defaultdict[WorkerId, list[Transfer]] = defaultdict(list)
        try:
            transfers = plan_transfers(
                held,
                assign.plan,
                state_bytes=layer_sizes(job.model, job.training.optimizer.no_decay),
            )
        except LayerLost:
            return {}
        for transfer in transfers:
            if transfer.source == self._context.worker and transfer.destination in self._cards:
                found[transfer.destination].append(transfer)
        return found

    def sources(self) -> Sequence[Source]:
        """Return the sources, as far as they are known yet."""
        return tuple((self._sources or {}).values())

    def is_ready(self, committed: int) -> bool:
        return self._sources is not None and all(
            source.is_ready(committed) for source in self._sources.values()
        )

    def leave(self) -> None:
        """End the streams after the newest committed step, as the previous plan ends.

        May be repeated.
        """
        if self._left or self._present is None:
            return
        self._left = True
        for source in self.sources():
            source.end(self._context.progress, self._present.generation)

    def close(self) -> None:
        self._context.links.call_off(self)
        self.sink.close()


class Preparing:
    """Preparation of the next plan by this worker. Used by the training thread."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._coming: _Coming | None = None
        self._thread: threading.Thread | None = None

    def look(self, present: Plan) -> None:
        """Begin to prepare a plan that has been announced, at a step boundary of `present`."""
        assign = self._context.control.announced(present.generation)
        if assign is not None and not self._is_for(assign):
            self._begin(assign, present)

    def _is_for(self, assign: Assign) -> bool:
        return self._coming is not None and self._coming.plan.generation == assign.plan.generation

    def _begin(self, assign: Assign, present: Plan | None) -> None:
        self.drop()
        coming = self._coming = _Coming(self._context, assign, present)
        log.info("preparing", extra={"generation": assign.plan.generation})
        self._thread = threading.Thread(target=coming.work_out, name="prepare", daemon=True)
        self._thread.start()
        self._reached("preparing")

    def _reached(self, point: str) -> None:
        assert self._coming is not None, "only asked of a plan that is prepared"
        generation, step = self._coming.plan.generation, self._context.progress.committed
        self._context.faults.reached(point, generation=generation, step=step)

    def reduced(self, step: int, layers: Container[int]) -> None:
        """Feed the gradients of `layers` in `step`, which are reduced."""
        for source in self._sources():
            source.reduced(step, layers)

    def committed(self, step: int, scale: float | None, step_s: float, omitted: Omissions) -> None:
        """Report to the sources that `step` is committed.

        `scale`: scale of its gradients; None: the step was skipped.
        """
        for source in self._sources():
            source.committed(step, scale, step_s, omitted)
            self._reached("feeding")

    def _sources(self) -> Sequence[Source]:
        return self._coming.sources() if self._coming is not None else ()

    def ready_for(self, step: int) -> Generation | None:
        """Return the generation that this worker is ready to switch to after `step`, or None."""
        coming = self._coming
        if coming is None or not coming.is_ready(step - 1):
            return None
        self._reached("prepared")
        return coming.plan.generation

    def enter(self, assign: Assign) -> None:
        """Enter the plan of `assign`, and drop preparation for any other plan.

        A worker that is in no plan yet receives its layers from now on.
        """
        if self._coming is not None and self._is_for(assign):
            self._coming.leave()
            return
        self.drop()
        if assign.boundary and self._context.worker in assign.plan.workers:
            self._begin(assign, None)

    def own_program(self, plan: Plan) -> OwnProgram:
        """Return this worker's part of `plan`, compiling it unless it was prepared."""
        coming = self._coming
        if coming is not None and coming.plan.generation == plan.generation:
            assert self._thread is not None, "it was begun"
            self._thread.join()
            if coming.own is not None:
                return coming.own
        return compile_program(self._context, plan)

    def take_over(self, host: LinkTransport) -> int:
        """Adopt the layers that have been fed, once all have arrived; return their bytes.

        Raise TransportError if a feeding worker is lost meanwhile.
        """
        coming = self._coming
        if coming is None or coming.taken:
            return 0
        coming.taken = True
        self._reached("before:take over")
        sink, state, progress = coming.sink, self._context.state, self._context.progress
        host.wait(sink.is_over, sink.feeders)
        words = sink.last_words()
        if len({(word.step, word.lineage, word.generation) for word in words}) != 1:
            return 0
        word = words[0]
        anew = not self._stands_at(word)
        if anew and self._may_count_beside(word):
            return 0
        whole = sink.whole_layers(word.step, anew=anew)
        if whole and anew:
            state.keep_only(())
            progress.restart(word.step, word.lineage, word.missed, word.step)
            progress.join(word.step, word.lineage, word.skipped, word.missed, word.generation)
            self._learn_vote(words)
        for layer in whole:
            state.adopt(layer)
        count = sum(layer.storage.nbytes for layer in whole)
        log.info("took over", extra={"layers": len(whole), "bytes": count, "voted": progress.voted})
        return count

    def _learn_vote(self, words: Sequence[Over]) -> None:
        """Learn the vote on the step of the adopted layers.

        These layers count only beside those of workers that can reach that step.
        """
        for word in words:
            if word.ballot:
                ballot = torch.frombuffer(bytearray(word.ballot), dtype=torch.float64)
                self._context.progress.learn(word.step, word.voted_generation, ballot)

    def _stands_at(self, word: Over) -> bool:
        """Return whether this worker's layers have the generation and step of the fed layers."""
        progress = self._context.progress
        # A worker that has the gradients can still commit the step; with a fed copy it could not.
        return progress.reduced <= progress.committed and (
            (progress.joined, progress.lineage, progress.committed)
            == (word.generation, word.lineage, word.step)
        )

    def _may_count_beside(self, word: Over) -> bool:
        """Return whether the others might still need the layers that this worker holds.

        No worker goes back more than one step behind the sources, nor behind a checkpoint to which
        all went back.
        """
        progress = self._context.progress
        return (
            bool(self._context.state.layers)
            and progress.lineage >= word.lineage
            and max(progress.committed, progress.voted) >= word.step - 1
        )

    def drop(self) -> None:
        """Drop the plan under preparation, if there is one."""
        if self._coming is not None:
            self._coming.close()
            self._coming = None
