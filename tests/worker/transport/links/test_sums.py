"""Sums over links: what they keep in memory."""

import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from oobleck.worker.transport.linked import LinkTransport
from support.meeting import Party

SIZE = 1 << 18
ROUNDS = 30


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
def test_shares_that_come_before_they_are_waited_for_do_not_pile_up() -> None:
    """They have memory of their own each time, so nobody takes it again where it is kept."""

    def add(transport: LinkTransport) -> float:
        total = torch.ones(SIZE)
        if transport.rank == 0:
            transport.gather(b"")  # behind the other one's share
            transport.all_reduce(total, (0, 1)).wait()
        else:
            pending = transport.all_reduce(total, (0, 1))
            transport.gather(b"")
            pending.wait()
        return float(total.mean())

    with Party(2) as party:
        party.meet()
        party.everywhere(add)
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(ROUNDS):
            assert party.everywhere(add) == [2.0, 2.0]
        after, _ = tracemalloc.get_traced_memory()
    assert after - before < 3 * SIZE * 4
