"""What strangers could do to a store in which workers met, done at the one port that a worker has:
real workers meet and train meanwhile, and keep nothing of it."""

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.plan import Plan
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.wire import HEADER, Kind
from oobleck.worker.transport.meeting import _MEETING, epoch_of
from oobleck.worker.transport.tree import entry
from support.director import Director, WarmWorkers, make_plan, worker_named
from support.folders import TEXT
from support.reference import train_reference

BOTH = [worker_named("a"), worker_named("b")]
#: The value of a key of a store, and how many.
VALUE_BYTES, VALUES = 1 << 20, 480
_LISTENING = "0A"


def plan_of(generation: int) -> Plan:
    return make_plan(generation, [[("a", 3), ("b", 3)]], [6])


def listens_at(pid: int) -> list[int]:
    """The ports of a process."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            found.append(str(each.readlink()))
    own = {match[1] for name in found if (match := re.fullmatch(r"socket:\[(\d+)\]", name))}
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING and inode in own:
                ports.append(int(local.rpartition(":")[2], 16))
    return ports


def most_resident_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


def say(card: Card, said: bytes) -> None:
    with contextlib.suppress(OSError), socket.create_connection((card.host, card.port), 20) as call:
        call.sendall(said)


def store_much(card: Card) -> None:
    """As a store's client sets values: a query, a key, a value, all with their lengths."""
    for number in range(VALUES):
        key = b"key %d" % number
        head = b"\x01" + len(key).to_bytes(8, "little") + key
        say(card, head + VALUE_BYTES.to_bytes(8, "little") + bytes(VALUE_BYTES))


def say_without_greeting(card: Card) -> None:
    """That one has come, what all have said, and that it is all off."""
    for meeting in range(2):
        for generation in range(1, 4):
            for kind in (Kind.STANDING, Kind.TABLE, Kind.CALLED_OFF, Kind.GIVEN_UP):
                word = b"" if kind in (Kind.CALLED_OFF, Kind.GIVEN_UP) else entry(1, b"false")
                epoch = epoch_of(generation, meeting)  # type: ignore[arg-type]  # any number
                say(card, HEADER.pack(epoch, kind, _MEETING, 0, len(word)) + word)


@contextlib.contextmanager
def attacked(cards: list[Card]) -> Iterator[None]:
    """Again and again, and from begin to end at least once."""
    over, begun = threading.Event(), threading.Barrier(2 * len(cards) + 1)

    def store(card: Card) -> None:
        begun.wait(60)
        store_much(card)

    def forge(card: Card) -> None:
        begun.wait(60)
        while not over.is_set():
            say_without_greeting(card)

    threads = [threading.Thread(target=do, args=(c,)) for do in (store, forge) for c in cards]
    for thread in threads:
        thread.start()
    begun.wait(60)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_what_could_be_done_to_a_store_does_nothing_to_a_worker(warm: WarmWorkers) -> None:
    job = JobSpec(
        name="unasked",
        model=ModelSpec(layers=4, hidden=32, heads=2, sequence_length=16),
        data=DataSpec(text=(TEXT,)),
        training=TrainingSpec(steps=6, global_batch=6, precision="fp64"),
    )
    with Director(warm, job) as cluster:
        cluster.start("a", "b")
        workers = [cluster.workers[worker] for worker in BOTH]
        cards = [Card.read(worker.card) for worker in workers]
        before = [most_resident_bytes(worker.pid) for worker in workers]
        with attacked(cards):
            cluster.assign(plan_of(1))
            for card in cards:
                with pytest.raises(RuntimeError):  # nobody answers
                    TCPStore(
                        card.host,
                        card.port,
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=1),
                    ).set("outcome", "aborted")
            cluster.wait_finished(plan_of(1))
            assert [listens_at(worker.pid) for worker in workers] == [[c.port] for c in cards]
        after = [most_resident_bytes(worker.pid) for worker in workers]
        cluster.stop()
        assert cluster.losses() == pytest.approx(
            {step.step: step.loss for step in train_reference(job).steps}, rel=1e-12
        )
    # Which training itself needs some of.
    grown = [now - then for now, then in zip(after, before, strict=True)]
    assert max(grown) < VALUES * VALUE_BYTES // 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10.0.0.1:80",
        "ab@10.0.0.1:80",
        "00" * 16 + "@10.0.0.1:99999",
        "00" * 16 + "@10.0.0.1:0",
        "00" * 16 + "@10.0.0.1",
        "00" * 16 + "@host:80",
        "zz" * 16 + "@10.0.0.1:80",
    ],
)
def test_a_card_by_which_nobody_can_be_called_is_another_ones_fault(text: str) -> None:
    with pytest.raises(TransportError, match="cannot be read"):
        Card.read(text)


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "fe80::1%eth0"])
def test_a_card_is_what_it_was_told_as(host: str) -> None:
    card = Card(bytes(range(16)), host, 80)
    assert Card.read(card.text) == card
