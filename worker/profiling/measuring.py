"""Measurements that the agent asks for, outside any generation, and their reports.

Owns how two workers meet, and how they measure their link through the transport of training. That
times round trips, so no clocks are compared: a small message gives the latency, a large one the
rate. The lower quartile counts, because other load on the hosts delays some messages by far. The
first worker decides the sizes and reports; the other answers.

A failed measurement is reported and has no other effect. An assignment or a newer request cancels
it at once.
"""

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from statistics import quantiles

import torch

from oobleck.core.ids import Generation
from oobleck.core.messages import LinkMeasured, LinkPair, Measure, Measured
from oobleck.core.profile import LinkMeasurement, Scope
from oobleck.core.sharing import sharing_sizes
from oobleck.planner.programs.communicators import Wiring
from oobleck.worker.context import WorkerContext
from oobleck.worker.profiling.measure_layers import Check, measure_alone, measure_layers
from oobleck.worker.runtime.errors import JobError, Superseded, TransportError
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.meeting import epoch_of, secret_of
from oobleck.worker.transport.transport import Transport

#: Round trips of small messages: at least this long, within these bounds.
LATENCY_BUDGET_S = 0.05
LEAST_SMALL, MOST_SMALL = 10, 200
#: Target duration of a large message, within these bounds of its size.
LARGE_S = 0.03
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
LARGE_ROUNDS = 5
WARM_UP = 2

_TAG = 1
_LEAST_S = 1e-9


def measure_link(
    transport: Transport, scope: Scope, device: torch.device, check: Check
) -> LinkMeasurement | None:
    """Measure the link between the transport's two workers, both of which call this.

    Return None on the worker that answers. `device`: device of the tensors that training sends.
    Raise TransportError, and what `check` raises.
    """
    if transport.rank != 0:
        _answer(transport, device, check)
        return None
    round_trips = partial(_round_trips, transport, device, check)
    small = round_trips(1, WARM_UP)
    rounds = int(LATENCY_BUDGET_S / max(_LEAST_S, min(small)))
    rounds = max(LEAST_SMALL, min(MOST_SMALL, rounds))
    latency_s = _quick(round_trips(1, rounds)) / 2
    first_s = min(round_trips(LEAST_BYTES, WARM_UP)) / 2
    size = int(LEAST_BYTES * LARGE_S / max(_LEAST_S, first_s))
    size = max(LEAST_BYTES, min(MOST_BYTES, size))
    round_trips(size, 1)
    large_s = _quick(round_trips(size, LARGE_ROUNDS)) / 2
    _announce(transport, 0, 0)
    return LinkMeasurement(
        scope=scope,
        latency_s=latency_s,
        bytes_per_s=size / max(_LEAST_S, large_s - latency_s),
    )


def _quick(seconds: list[float]) -> float:
    return quantiles(seconds, n=4)[0]


def _announce(transport: Transport, size: int, rounds: int) -> None:
    transport.send(torch.tensor([size, rounds]), 1, _TAG).wait()


def _round_trips(
    transport: Transport, device: torch.device, check: Check, size: int, rounds: int
) -> list[float]:
    """Return the seconds of each of `rounds` round trips of `size` bytes."""
    _announce(transport, size, rounds)
    message, reply = torch.zeros(2, size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(rounds):
        check()
        started = time.perf_counter()
        sent = transport.send(message, 1, _TAG)
        transport.receive(reply, 1, _TAG).wait()
        sent.wait()
        transport.complete()
        seconds.append(time.perf_counter() - started)
    return seconds


def _answer(transport: Transport, device: torch.device, check: Check) -> None:
    while True:
        check()
        announced = torch.zeros(2, dtype=torch.int64)
        transport.receive(announced, 0, _TAG).wait()
        size, rounds = announced.tolist()
        if rounds == 0:
            return
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        for _ in range(rounds):
            transport.receive(message, 0, _TAG).wait()
            transport.send(message, 0, _TAG).wait()


log = logging.getLogger(__name__)

#: No generation has been entered yet.
_BEFORE = Generation(0)
_MEMBERS = 2
_BOTH_WAYS = Wiring((("link", (0, 1)), ("link", (1, 0))))
_SCOPES: Sequence[Scope] = ("intra_node", "inter_node")
#: Lower numbers are meetings of the generation itself.
_FIRST_MEETING = 2


class Measuring:
    """Measurer of one worker: its part in measurements of the model and of links."""

    def __init__(self, context: WorkerContext, device_kind: str) -> None:
        """Prepare. `device_kind`: name of the device in measurements."""
        self._context = context
        self._device_kind = device_kind
        self._control = context.control
        #: Newest generation entered; a newer one cancels a measurement.
        self._generation = _BEFORE

    def run(self, wish: Measure, generation: Generation) -> None:
        """Measure and report.

        Return when all is reported, or when a newer assignment than `generation` or a newer request
        cancels it.
        """
        self._generation = generation
        if not wish.alone:
            self._context.faults.reached("before:measure", generation=_BEFORE, step=0)
        try:
            self._control.report(self._measured(wish))
            for pair in wish.meetings:
                if self._context.worker in pair.workers:
                    self._measure_link(wish, pair)
        except Superseded:
            log.info("measurement cancelled")

    def _check(self) -> None:
        self._control.check_measuring(self._generation)

    def _measured(self, wish: Measure) -> Measured:
        job, device = self._context.job, self._context.connector.device
        try:
            if wish.alone:
                # The state is outdated before this is asked for, and its memory is needed.
                self._context.state.keep_only(())
                found_s = measure_alone(job, device, self._check)
                return Measured(attempt=wish.attempt, measurement=None, alone_s=found_s)
            sizes = sharing_sizes(job.training.microbatch, wish.gpus)
            found = measure_layers(job, device, self._device_kind, self._check, sizes=sizes)
        except (
            RuntimeError,
            MemoryError,
            JobError,
        ) as error:  # from torch, mostly for lack of memory
            log.warning("layers not measured", extra={"reason": str(error)})
            problem = str(error).partition("\n")[0] or type(error).__name__
            return Measured(attempt=wish.attempt, measurement=None, problem=problem)
        return Measured(attempt=wish.attempt, measurement=found)

    def _measure_link(self, wish: Measure, pair: LinkPair) -> None:
        link: LinkMeasurement | None = None
        problem = ""
        try:
            link = self._meet(wish, pair)
        except TransportError as error:
            self._check()  # it may have been aborted because it is no longer wanted
            log.warning("link not measured", extra={"reason": str(error)})
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
                # Two workers in different generations would wait for each other.
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
            transport.abort()  # release the other worker
            raise
        finally:
            self._control.on_abrupt(None)
            transport.dispose()
