"""Measures the link between two workers, through the transport that training uses.

It times round trips, so no clocks are compared: of a small message for the latency, of a large one
for the rate. The lower quartile counts, since what else runs on the hosts delays some by far. The
first of the two workers decides the sizes and reports; the other answers.
"""

import time
from functools import partial
from statistics import quantiles

import torch

from oobleck.core.profile import LinkMeasurement, Scope
from oobleck.worker.profiling.measure_layers import Check
from oobleck.worker.transport.transport import Transport

#: Small messages: until this time is over, and within these bounds.
LATENCY_BUDGET_S = 0.05
LEAST_SMALL, MOST_SMALL = 10, 200
#: Large ones take about this long each, as far as the bounds let them.
LARGE_S = 0.03
LEAST_BYTES, MOST_BYTES = 1 << 20, 64 << 20
LARGE_ROUNDS = 5
WARM_UP = 2

_TAG = 1
_LEAST_S = 1e-9


def measure_link(
    transport: Transport, scope: Scope, device: torch.device, check: Check
) -> LinkMeasurement | None:
    """Measure the link between the two workers of the transport; both call this. Return None for
    the one that answers. `device`: where the tensors lie that training sends. Raises
    TransportError, and what `check` raises."""
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
    """Return the seconds of each of `rounds` messages of `size` bytes there and back."""
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
