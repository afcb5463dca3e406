"""Carries out the agent's wish to measure, outside of any generation, and reports the results.

Owns how two workers come to measure their link. A measurement that fails is reported and costs
nothing else; an assignment or a newer wish calls it off at once."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack

from oobleck.core.ids import Generation
from oobleck.core.messages import LinkMeasured, LinkPair, Measure, Measured
from oobleck.core.profile import LinkMeasurement, Scope
from oobleck.planner.profile.sharing import sharing_sizes
from oobleck.worker.context import WorkerContext
from oobleck.worker.profiling.measure_layers import measure_alone, measure_layers
from oobleck.worker.profiling.measure_link import measure_link
from oobleck.worker.runtime.errors import JobError, Superseded, TransportError
from oobleck.worker.transport.connect import Wiring
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.card import Card
from oobleck.worker.transport.meeting import epoch_of, secret_of

log = logging.getLogger(__name__)

#: Nothing is entered yet.
_BEFORE = Generation(0)
_MEMBERS = 2
_BOTH_WAYS = Wiring((("link", (0, 1)), ("link", (1, 0))))
_SCOPES: Sequence[Scope] = ("intra_node", "inter_node")
#: Those before are a generation's own.
_FIRST_MEETING = 2


class Measuring:
    """Measurements of the job's model and the links, as far as one worker takes part in them."""

    def __init__(self, context: WorkerContext, device_kind: str) -> None:
        """`device_kind`: what the measurement calls the device."""
        self._context = context
        self._device_kind = device_kind
        self._control = context.control
        #: The last one that was entered: a newer one calls a measurement off.
        self._generation = _BEFORE

    def run(self, wish: Measure, generation: Generation) -> None:
        """Measure and report. Returns when all is reported, or when it is called off by an
        assignment that is newer than `generation`, or by a newer wish."""
        self._generation = generation
        if not wish.alone:
            self._context.faults.reached("before:measure", generation=_BEFORE, step=0)
        try:
            self._control.report(self._measured(wish))
            for pair in wish.meetings:
                if self._context.worker in pair.workers:
                    self._measure_link(wish, pair)
        except Superseded:
            log.info("measuring was called off")

    def _check(self) -> None:
        self._control.check_measuring(self._generation)

    def _measured(self, wish: Measure) -> Measured:
        job, device = self._context.job, self._context.connector.device
        try:
            if wish.alone:
                # What it holds was out of date before it was asked, and room is needed.
                self._context.state.keep_only(())
                found_s = measure_alone(job, device, self._check)
                return Measured(attempt=wish.attempt, measurement=None, alone_s=found_s)
            sizes = sharing_sizes(job.training.microbatch, wish.gpus)
            found = measure_layers(job, device, self._device_kind, self._check, sizes=sizes)
        except (
            RuntimeError,
            MemoryError,
            JobError,
        ) as error:  # of torch; mostly for want of memory
            log.warning("layers were not measured", extra={"reason": str(error)})
            problem = str(error).partition("\n")[0] or type(error).__name__
            return Measured(attempt=wish.attempt, measurement=None, problem=problem)
        return Measured(attempt=wish.attempt, measurement=found)

    def _measure_link(self, wish: Measure, pair: LinkPair) -> None:
        link: LinkMeasurement | None = None
        problem = ""
        try:
            link = self._meet(wish, pair)
        except TransportError as error:
            self._check()  # it was aborted because it is no longer wanted
            log.warning("link was not measured", extra={"reason": str(error)})
            problem = str(error)
        if pair.workers[0] == self._context.worker:
            report = LinkMeasured(
                attempt=wish.attempt, scope=pair.scope, link=link, problem=problem
            )
            self._control.report(report)

    def _meet(self, wish: Measure, pair: LinkPair) -> LinkMeasurement | None:
        where, rank = pair.rendezvous, pair.workers.index(self._context.worker)
        connector, links = self._context.connector, self._context.links
        meeting = _FIRST_MEETING + 2 * wish.attempt + _SCOPES.index(pair.scope)
        with ExitStack() as undo:
            undo.callback(self._control.on_abrupt, None)
            self._check()
            if self._generation != _BEFORE:
                # Two that differ in what they have entered would wait for each other.
                raise TransportError("this worker has entered a generation")
            epoch, secret = epoch_of(_BEFORE, meeting), secret_of(where.prefix)
            host = LinkTransport(links, epoch, secret, rank, _MEMBERS)
            undo.callback(host.abort)
            self._control.on_abrupt(host.abort)
            at, word = Card.read(where.host), connector.announced(_BOTH_WAYS)
            words = host.meet(at, {1 - rank}, word, self._check)
            transport = connector.equip(host, words, _BOTH_WAYS)
            undo.pop_all()
        self._control.on_abrupt(transport.abort)
        try:
            self._check()
            return measure_link(transport, pair.scope, connector.device, self._check)
        except BaseException:
            transport.abort()  # release the other one
            raise
        finally:
            self._control.on_abrupt(None)
            transport.dispose()
