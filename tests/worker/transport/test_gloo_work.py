"""Waits for gloo's messages are ended, also for those that it forgets when a connection breaks."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, ProcessGroupGloo

from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport import gloo_work
from oobleck.worker.transport.gloo import GlooTransport
from oobleck.worker.transport.gloo_work import end_wait
from oobleck.worker.transport.rendezvous import RendezvousStore, StoreServer
from support.leftovers import nothing_left_behind

HOST = "127.0.0.1"
HOUR = timedelta(hours=1)
SIZE = 2
ROUNDS = 12
#: Tens of milliseconds on their way.
LARGE = torch.zeros(4 << 20)


@pytest.fixture(scope="module")
def servers() -> list[StoreServer]:
    return [StoreServer(HOST) for _ in range(SIZE)]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SIZE) as pool:
        yield pool


def connect(servers: list[StoreServer], meeting: str, rank: int) -> GlooTransport:
    waits = Waits()
    rendezvous = RendezvousStore(servers[0].endpoint, meeting, own=servers[rank], waits=waits)
    return GlooTransport(rendezvous, rank, SIZE, (), HOST, waits)


def groups(
    servers: list[StoreServer], pool: ThreadPoolExecutor, meeting: str
) -> list[ProcessGroupGloo]:
    def build(rank: int) -> ProcessGroupGloo:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
        waits = Waits()
        rendezvous = RendezvousStore(servers[0].endpoint, meeting, own=servers[rank], waits=waits)
        group = rendezvous.connect(
            "g", lambda store: ProcessGroupGloo(store, rank, SIZE, options), HOUR
        )
        waits.close()
        return group

    return list(pool.map(build, range(SIZE)))


def test_whoever_waits_for_a_message_is_told_that_it_is_not_done(
    servers: list[StoreServer], pool: ThreadPoolExecutor
) -> None:
    first, second = groups(servers, pool, "messages")
    for work in (first.recv([torch.zeros(1)], 1, 0), second.send([LARGE], 0, 1)):  # type: ignore[attr-defined]
        waiting = pool.submit(work.wait, HOUR)
        assert end_wait(work)
        assert waiting.result(60) is False


def test_what_is_no_message_is_left_alone(
    servers: list[StoreServer], pool: ThreadPoolExecutor
) -> None:
    tensors = [torch.ones(1), torch.ones(1)]
    works = [
        group.allreduce([tensor], AllreduceOptions())
        for group, tensor in zip(groups(servers, pool, "sum"), tensors, strict=True)
    ]
    assert not any(end_wait(work) for work in works)
    for work in works:
        work.wait(HOUR)
    assert [tensor.item() for tensor in tensors] == [SIZE] * SIZE


def test_messages_that_an_abort_cuts_off_leave_nothing(
    servers: list[StoreServer], pool: ThreadPoolExecutor
) -> None:
    def talk(transport: GlooTransport) -> None:
        tensor = LARGE.clone()
        give = transport.send if transport.rank else transport.receive
        with contextlib.suppress(TransportError):
            while True:
                give(tensor, 1 - transport.rank, 0).wait()

    def round_of(number: int) -> None:
        pair = list(pool.map(lambda rank: connect(servers, str(number), rank), range(SIZE)))
        aborts = threading.Thread(target=lambda: [transport.abort() for transport in pair])
        talks = [pool.submit(talk, transport) for transport in pair]
        time.sleep(0.002 * (number % 8 + 1))  # at any point of a message
        aborts.start()
        for done in talks:
            done.result(60)
        aborts.join()
        for transport in pair:
            transport.dispose()

    round_of(0)
    with nothing_left_behind():
        for number in range(1, ROUNDS):
            round_of(number)


@pytest.mark.parametrize("library", ["libc10.so", "none.so"])
def test_with_a_torch_that_is_made_otherwise_the_wait_is_given_up_and_the_log_says_so(
    servers: list[StoreServer],
    pool: ThreadPoolExecutor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    library: str,
) -> None:
    monkeypatch.setattr(gloo_work, "LIBRARY", gloo_work.LIBRARY.with_name(library))
    first, _second = groups(servers, pool, library)
    work = first.recv([torch.zeros(1)], 1, 0)  # type: ignore[attr-defined]
    waits = Waits()
    waiting = pool.submit(waits.run, partial(work.wait, HOUR), end=partial(end_wait, work))
    waits.release()
    with pytest.raises(TransportError, match="given up"):
        waiting.result(60)
    assert not end_wait(work)
    (line,) = caplog.records
    assert "does not let waits for gloo's messages be ended" in line.getMessage()
    assert library in str(vars(line)["reason"])
    monkeypatch.undo()
    assert end_wait(work)
    waits.close()
