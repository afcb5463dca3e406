"""Cost of a change of generation for many workers: meeting, announcing states, agreeing.

    python -m bench.meeting [--workers 4,16,64,256] [--rounds 10] [--processes 4] [--layers 48]

Each simulated worker has its own links, listener and threads, and nothing of training; they share
a few processes of this machine and talk over real sockets. They meet again and again on the links
they have, as from one generation to the next: along the tree, and all with the host (`star`), as
where no other card is known. What they say and read is what workers that train do, each draws the
agreement, and then all vote, as at a step's end. Then one is killed, and the rest meet at once.

All share this machine's few cores, so the time of a meeting is mostly that of the processors for
all of them. What a worker needs on a machine of its own is the processor time, each one's and the
root's. Messages and bytes are those of one meeting, without the frames by which workers take leave
of the one before; memory is what their processes have written to, per worker.
"""

import argparse
import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from oobleck.core.codec import encode
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.worker.recovery.recover import Standing, read_standings
from oobleck.worker.recovery.rejoin import Held, RecoveryState, agree
from oobleck.worker.step.salvage import Attempt
from oobleck.worker.transport.connect import Announced
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.links.link import Link, Outgoing
from oobleck.worker.transport.links.wire import HEADER, LEAVING, Kind, Label
from oobleck.worker.transport.tree import (
    MOST_MESHED,
    joined,
    parts,
    ring_neighbours,
    tree_neighbours,
)

HOST = "127.0.0.1"
SECRET = b"s" * 32
#: Stages per pipeline.
_STAGES = 8
_MICROBATCHES = 64
#: Numbers in a vote.
_BALLOT = 16
#: Time until all processes have the order to meet.
_LEAD_S = 0.05


@dataclass(frozen=True)
class Order:
    """Order to meet: the members, and the time."""

    epoch: int
    start_at: float
    #: By rank.
    cards: tuple[str, ...]
    along_tree: bool
    layers: int


@dataclass(frozen=True)
class Figures:
    """Figures of one worker's part in a meeting."""

    met_at: float
    agreed_at: float
    voted_at: float
    links_made: int
    #: Links made during the vote.
    vote_links_made: int
    messages: int
    sent_bytes: int
    #: Processor seconds of the whole part, and of computing the agreement.
    processor_s: float
    agreeing_s: float


class CountedLinks(Links):
    """Links that count outgoing frames, except those of departures."""

    def __init__(self) -> None:
        self.made = self.messages = self.sent_bytes = 0
        super().__init__(HOST, silence_s=60)

    def _open(self, *opened: Any) -> None:
        self.made += 1
        super()._open(*opened)

    def _write(self, link: Link, epoch: int, label: Label, *content: memoryview) -> Outgoing:
        if Kind(label.kind) not in LEAVING:
            self.messages += 1
            self.sent_bytes += HEADER.size + sum(len(piece) for piece in content)
        return super()._write(link, epoch, label, *content)


class SimulatedWorker:
    def __init__(self) -> None:
        self.links = CountedLinks()
        self._transport: LinkTransport | None = None

    def _spent_s(self) -> float:
        """Return the processor seconds of this thread and of the links' own one."""
        clock = time.pthread_getcpuclockid(self.links._traffic.thread.ident or 0)
        return time.thread_time() + time.clock_gettime(clock)

    def meet(self, order: Order) -> Figures:
        links, size = self.links, len(order.cards)
        rank = order.cards.index(links.card.text)
        word = joined([encode(Announced()), standing_of(rank, order.layers)])
        near = ring_neighbours(rank, size) | tree_neighbours(rank, size)
        if size <= MOST_MESHED:
            near = set(range(size))
        cards = {other: Card.read(text) for other, text in enumerate(order.cards)}
        before = links.made, links.messages, links.sent_bytes
        time.sleep(max(0.0, order.start_at - time.monotonic()))
        spent_s = self._spent_s()
        if self._transport is not None:
            self._transport.dispose()
        self._transport = LinkTransport(links, order.epoch, SECRET, rank, size)
        known = cards if order.along_tree else {0: cards[0]}
        words = self._transport.meet(cards[0], near - {rank}, word, lambda: None, known)
        met_at, before_s = time.monotonic(), time.thread_time()
        members = [member(each) for each in range(size)]
        agreed = agree(read_standings(members, [parts(each, 2)[1] for each in words]).states)
        agreeing_s = time.thread_time() - before_s
        assert agreed.step == 100, "all have committed it"
        agreed_at, spent_s = time.monotonic(), self._spent_s() - spent_s
        after = links.made, links.messages, links.sent_bytes
        ballot = torch.ones(_BALLOT)
        self._transport.all_reduce(ballot, tuple(range(size))).wait()
        assert ballot[0] == size, "all have voted"
        return Figures(
            met_at=met_at,
            agreed_at=agreed_at,
            voted_at=time.monotonic(),
            links_made=after[0] - before[0],
            vote_links_made=links.made - after[0],
            messages=after[1] - before[1],
            sent_bytes=after[2] - before[2],
            processor_s=spent_s,
            agreeing_s=agreeing_s,
        )


def member(rank: int) -> WorkerId:
    return WorkerId(NodeName(f"node{rank:03}"), 0)


def standing_of(rank: int, layers: int) -> bytes:
    """Return the standing of a worker that was interrupted in step 101."""
    each = -(-layers // _STAGES)
    own = range(rank % _STAGES * each, min(layers, (rank % _STAGES + 1) * each))
    state = RecoveryState(
        committed=100,
        begun=101,
        voted=100,
        voted_generation=Generation(1),
        joined=1,
        layer_count=layers,
        layers={layer: Held(100) for layer in own},
        former={},
    )
    done = [rank % _MICROBATCHES]
    attempt = Attempt.of(dict.fromkeys(own, done), done, done, _MICROBATCHES)
    return joined([encode(Standing("00" * 32, state)), encode(attempt)])


def own_bytes() -> int:
    """Return the bytes of memory that this process shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def serve(orders: Connection, count: int) -> None:
    """Run a process with `count` workers."""
    gc.collect()  # before counting, since it writes to memory that is shared with the parent
    gc.disable()  # each worker's would look at the objects of all
    before = own_bytes()
    workers = [SimulatedWorker() for _ in range(count)]
    orders.send([worker.links.card.text for worker in workers])
    with ThreadPoolExecutor(count) as pool:
        while (order := orders.recv()) is not None:
            if isinstance(order, Order):
                figures = list(pool.map(lambda worker: worker.meet(order), workers))
                gc.collect()
                orders.send((figures, own_bytes() - before))
            else:  # the worker to kill
                workers.pop(order).links.close()
                orders.send(None)
    os._exit(0)  # all at once: none is to miss another


class Crowd:
    """Group of processes that together have `count` workers."""

    def __init__(self, count: int, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self._ends: list[Connection] = []
        self.cards: list[list[str]] = []
        shares = [count // processes + (n < count % processes) for n in range(processes)]
        for share in filter(None, shares):
            here, there = context.Pipe()
            context.Process(target=serve, args=(there, share), daemon=True).start()
            self._ends.append(here)
            self.cards.append(here.recv())
        self._epoch = 0

    def kill_last(self) -> None:
        self._ends[-1].send(len(self.cards[-1]) - 1)
        self.cards[-1].pop()
        self._ends[-1].recv()

    def meet(self, *, along_tree: bool, layers: int) -> tuple[float, list[Figures], int]:
        """Hold a meeting; return its begin, each worker's figures, and the memory of all
        processes."""
        self._epoch += 1
        cards = tuple(card for some in self.cards for card in some)
        start_at = time.monotonic() + _LEAD_S
        order = Order(self._epoch, start_at, cards, along_tree, layers)
        for end in self._ends:
            end.send(order)
        answers = [end.recv() for end in self._ends]
        figures = [each for some, _ in answers for each in some]
        return start_at, figures, sum(grown for _, grown in answers)

    def end(self) -> None:
        for end in self._ends:
            end.send(None)


def row(what: str, rounds: Sequence[tuple[float, list[Figures], int]]) -> str:
    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    count = len(rounds[0][1])
    met_ms = median([1e3 * (max(t.met_at for t in figures) - at) for at, figures, _ in rounds])
    agreed_ms = median(
        [1e3 * (max(t.agreed_at for t in figures) - at) for at, figures, _ in rounds]
    )
    made = median([sum(t.links_made for t in figures) / 2 for _, figures, _ in rounds])
    vote_ms = median(
        [1e3 * max(t.voted_at - t.agreed_at for t in figures) for _, figures, _ in rounds]
    )
    vote_made = median([sum(t.vote_links_made for t in figures) / 2 for _, figures, _ in rounds])
    messages = median([sum(t.messages for t in figures) for _, figures, _ in rounds])
    sent_kib = median([sum(t.sent_bytes for t in figures) / 1024 for _, figures, _ in rounds])
    root_kib = median([figures[0].sent_bytes / 1024 for _, figures, _ in rounds])
    each_ms = median(
        [1e3 * statistics.mean(t.processor_s for t in figures) for _, figures, _ in rounds]
    )
    agree_ms = median(
        [1e3 * statistics.mean(t.agreeing_s for t in figures) for _, figures, _ in rounds]
    )
    root_ms = median([1e3 * figures[0].processor_s for _, figures, _ in rounds])
    memory_kib = rounds[-1][2] / 1024 / count
    return (
        f"{count:7}  {what:17}  {met_ms:8.1f}  {agreed_ms:9.1f}  {made:9.0f}  {messages:8.0f}"
        f"  {sent_kib:8.0f}  {root_kib:8.0f}  {each_ms:11.2f}  {agree_ms:14.2f}  {root_ms:11.2f}"
        f"  {memory_kib:10.0f}  {vote_ms:7.1f}  {vote_made:10.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--workers", default="4,16,64,256")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--layers", type=int, default=48)
    options = parser.parse_args()
    print(
        "workers  meeting              met ms  agreed ms  new links  messages  sent KiB  root KiB"
        "  cpu ms each  of it to agree  cpu ms root  memory KiB"
        "  vote ms  vote links"
    )
    # Decode once here: msgspec's first decoding of a type is not safe in several threads at once.
    read_standings([member(0)], [standing_of(0, options.layers)])
    for count in map(int, options.workers.split(",")):
        for along_tree in (True, False):
            way = "tree" if along_tree else "star"
            crowd = Crowd(count, options.processes)
            rounds = [
                crowd.meet(along_tree=along_tree, layers=options.layers)
                for _ in range(options.rounds + 1)
            ]
            print(row(f"{way}, first", rounds[:1]), flush=True)
            print(row(f"{way}, again", rounds[1:]), flush=True)
            crowd.kill_last()
            without = crowd.meet(along_tree=along_tree, layers=options.layers)
            print(row(f"{way}, one killed", [without]), flush=True)
            crowd.end()


if __name__ == "__main__":
    main()
