"""What every transport must do, run on each of them: over links that are made on demand, along a
tree or between all, staged, and in NCCL's wiring.

NCCL between workers needs a GPU for each; its transport runs over a fake (support.fake_nccl), and
what that transport alone must do is in test_nccl. The ranks are threads of this process, with
sockets between them. On a GPU (`--device cuda:0`) they share it, over the staged transport.
"""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from oobleck.host.gpu.devices import worker_environment
from oobleck.planner.programs.communicators import Name, wiring_of
from oobleck.planner.programs.transfer import Transfer
from oobleck.worker.runtime.device import torch_version
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.transport.connect import LEAST_TORCH, Announced, Moving, choose, ways_of_state
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.links.calls import Card
from oobleck.worker.transport.links.hub import Links
from oobleck.worker.transport.meeting import secret_of
from oobleck.worker.transport.nccl.connect import Communicators
from oobleck.worker.transport.nccl.group import Aborts, Identifiers, NcclMaker
from oobleck.worker.transport.nccl.transport import NcclTransport
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.transport import Transport, tell_all
from oobleck.worker.transport.tree import tree_neighbours
from support.devices import device
from support.fake_nccl import Fabric, RankOfFabric
from support.plans import plan_of_cuts, worker

SIZE = 3
NAMES: list[Name] = [
    *(("owners", group) for group in ((0, 1), (0, 1, 2), (1, 2))),
    *(("link", way) for way in ((0, 1), (1, 0), (1, 2))),
    ("stage", (2, 0, 1)),
]
CPU = torch.device("cpu")


class Rank:
    """One worker: its links, and the transport of a meeting."""

    def __init__(self, kind: str, fabric: Fabric, rank: int) -> None:
        self.links = Links("127.0.0.1", silence_s=5, sealed=kind != "mesh")
        self.host = LinkTransport(self.links, 1, secret_of(kind), rank, SIZE)
        self.nccl = RankOfFabric(fabric)
        self._kind = kind
        self._rank = rank
        self.transport: Transport = self.host

    def meet(self, host: Card) -> Transport:
        near = {"mesh": range(SIZE), "linked": tree_neighbours(self._rank, SIZE)}
        whom = set(near.get(self._kind, ())) - {self._rank}
        self.host.meet(host, whom, b"", lambda: None)
        if self._kind in ("staged", "nccl"):
            self.transport = StagedTransport(self.host, everything=True)
        if self._kind == "nccl":
            communicators = Communicators(CPU, Aborts(CPU), self.nccl)
            has = [frozenset[bytes]()] * SIZE
            self.transport = NcclTransport(self.host, self.transport, communicators, NAMES, has)
        return self.transport

    def end(self) -> None:
        self.transport.abort()
        self.transport.dispose()
        self.links.close()


@pytest.fixture(params=["on demand", "linked", "mesh", "staged", "nccl"])
def everywhere(request: pytest.FixtureRequest):
    """Runs a function of a transport on all ranks at once, with tensors where tests compute, and
    returns what each returned."""
    if device().type != "cpu" and request.param != "staged":
        pytest.skip("a transport between host tensors, or for a GPU per rank")
    fabric = Fabric()
    workers = [Rank(request.param, fabric, rank) for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        ranks = list(pool.map(lambda worker: worker.meet(workers[0].links.card), workers))

        def there(function: Callable[[Transport], object], transport: Transport) -> object:
            with device():
                return function(transport)

        def run(function: Callable[[Transport], object]) -> list[object]:
            return list(pool.map(partial(there, function), ranks))

        yield run
        for worker in workers:
            worker.end()


def test_messages_arrive_by_tag_and_in_order(everywhere):
    """Links that a program has, both ways, and one (2 to 0) that only a transfer of state has."""

    def talk(transport: Transport):
        at = transport.rank
        sent = [
            transport.send(torch.full((2, 3), 10.0 * at + tag), peer, tag)
            for peer, tag in {0: [(1, 1), (1, 2)], 1: [(0, 3), (2, 4)], 2: [(0, 5)]}[at]
        ]
        got = []
        for peer, tag in {0: [(1, 3), (2, 5)], 1: [(0, 1), (0, 2)], 2: [(1, 4)]}[at]:
            tensor = torch.zeros(2, 3)
            transport.receive(tensor, peer, tag).wait()
            got.append(tensor.unique().tolist())
        for pending in sent:
            pending.wait()
        transport.complete()
        return got

    assert everywhere(talk) == [[[13.0], [25.0]], [[1.0], [2.0]], [[14.0]]]


def test_everyone_hears_what_everyone_says(everywhere):
    def talk(transport: Transport):
        return tell_all(transport, ("ü" * transport.rank,), tuple[str, ...])

    assert everywhere(talk) == [[("",), ("ü",), ("üü",)]] * SIZE


def test_what_is_no_message_is_the_fault_of_the_peer_and_not_of_the_job(everywhere):
    def talk(transport: Transport):
        if transport.rank == 1:
            return len(transport.gather(b"\xff" * 16))
        with pytest.raises(TransportError, match=r"^the message of rank 1 is not a valid tuple: "):
            tell_all(transport, ("",), tuple[str, ...])
        return None

    assert everywhere(talk) == [None, SIZE, None]


def test_sums_over_every_group_are_in_place(everywhere):
    def add(transport: Transport):
        results = []
        for group in ((0, 1), (0, 1, 2), (1, 2), (transport.rank,)):
            if transport.rank in group:
                tensor = torch.full((4,), transport.rank + 1.0)
                transport.all_reduce(tensor, group).wait()
                transport.complete()
                results.append(tensor.unique().tolist())
        return results

    assert everywhere(add) == [
        [[3.0], [6.0], [1.0]],
        [[3.0], [6.0], [5.0], [2.0]],
        [[6.0], [5.0], [3.0]],
    ]


@pytest.mark.parametrize("group", [(2, 0, 1), (0, 1, 2)], ids=["wired", "not wired"])
def test_members_exchange_pieces_of_any_size_by_their_places_in_the_group(everywhere, group):
    """Twice at once, of two types, and some pieces are empty. What lies beside stays."""

    def size(sender: int, receiver: int) -> int:
        return 0 if sender == receiver else (sender + 2 * receiver) % 4

    def talk(transport: Transport):
        own, found = group.index(transport.rank), []
        for turn, dtype in enumerate([torch.float64, torch.bfloat16]):
            whole = torch.full((SIZE, 4), -1.0, dtype=dtype)
            sent = [
                torch.full((size(own, each),), own * 10.0 + each + turn, dtype=dtype)
                for each in range(SIZE)
            ]
            received = [whole[each, : size(each, own)] for each in range(SIZE)]
            found.append((whole, transport.exchange(sent, received, group, turn)))
        for _, pending in found:
            pending.wait()
        transport.complete()
        return [whole.tolist() for whole, _ in found]

    def expected(rank: int) -> list[list[list[float]]]:
        own = group.index(rank)
        return [
            [
                [each * 10.0 + own + turn] * size(each, own) + [-1.0] * (4 - size(each, own))
                for each in range(SIZE)
            ]
            for turn in range(2)
        ]

    assert everywhere(talk) == [expected(rank) for rank in range(SIZE)]


def test_what_is_exchanged_may_be_one_tensor_for_all(everywhere):
    """As the share of a layer's weights is."""
    group = (2, 0, 1)

    def talk(transport: Transport):
        own, share = group.index(transport.rank), torch.full((3,), transport.rank + 1.0)
        sent, whole = [share] * SIZE, torch.zeros(SIZE * 3)
        received = list(whole.split(3))
        sent[own] = received[own] = share[:0]
        transport.exchange(sent, received, group, 0).wait()
        return whole.tolist()

    assert everywhere(talk) == [
        [3.0] * 3 + [0.0] * 3 + [2.0] * 3,
        [3.0] * 3 + [1.0] * 3 + [0.0] * 3,
        [0.0] * 3 + [1.0] * 3 + [2.0] * 3,
    ]


def test_a_part_of_a_tensor_is_sent_and_received_alone(everywhere):
    """Staging copies what is asked for and nothing around it."""

    def talk(transport: Transport):
        whole = torch.arange(6.0) if transport.rank == 0 else torch.zeros(6)
        if transport.rank == 0:
            transport.send(whole[2:4], 1, 0).wait()
        elif transport.rank == 1:
            transport.receive(whole[3:5], 0, 0).wait()
        return whole.tolist()

    assert everywhere(talk)[1] == [0.0, 0.0, 0.0, 2.0, 3.0, 0.0]


def test_what_has_not_gone_out_goes_while_something_else_is_waited_for(everywhere):
    """More small messages than the kernel holds are on their way while a large one is awaited,
    which the peer sends when it has them all."""
    small, count, large = 128 << 10, 60, 512 << 10

    def talk(transport: Transport):
        if transport.rank == 2:
            return None
        giving_up = threading.Timer(30, transport.abort)
        giving_up.start()
        peer = 1 - transport.rank
        whole = torch.full((large,), 8.0)
        if transport.rank == 0:
            sends = [transport.send(torch.full((small,), float(n)), peer, n) for n in range(count)]
            transport.receive(whole, peer, count).wait()
            for send in sends:
                send.wait()
            seen = whole.unique().tolist()
        else:
            tensor, seen = torch.zeros(small), []
            for n in range(count):
                transport.receive(tensor, peer, n).wait()
                seen += tensor.unique().tolist()
            transport.send(whole, peer, count).wait()
        giving_up.cancel()
        return seen

    assert everywhere(talk) == [[8.0], [float(n) for n in range(count)], None]


def test_gathering_and_spreading(everywhere):
    def talk(transport: Transport):
        gathered = transport.all_gather(torch.tensor([transport.rank, 7]))
        spread = torch.tensor([float(transport.rank)])
        transport.broadcast(spread, 1)
        return [part.tolist() for part in gathered], spread.tolist()

    assert everywhere(talk) == [([[0, 7], [1, 7], [2, 7]], [1.0])] * SIZE


@pytest.mark.skipif(device().type != "cuda", reason="of NCCL itself, which needs a GPU")
def test_a_group_comes_up_again_after_every_abort_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in worker_environment("cuda").items():
        monkeypatch.setenv(name, value)
    threads = []
    for _ in range(20):
        group = NcclMaker(device()).make(Identifiers(), 0, 1, 1)
        group.eager_connect_single_device(device())
        tensor = torch.full((1000,), 3.0, device=device())
        group.allreduce([tensor], AllreduceOptions()).wait()
        assert tensor.unique().tolist() == [3.0]
        group.abort()
        del group
        threads.append(len(os.listdir("/proc/self/task")))
    assert max(threads[10:]) <= max(threads[:10])


@pytest.mark.skipif(device().type != "cuda", reason="of torch's pool, which needs a GPU")
def test_a_group_takes_the_stream_behind_the_one_that_was_taken_last(
    monkeypatch: pytest.MonkeyPatch,
):
    for name, value in worker_environment("cuda").items():
        monkeypatch.setenv(name, value)
    maker = NcclMaker(device())
    ring = [maker.take_stream() for _ in range(32)]
    assert [maker.take_stream() for _ in range(32)] == ring
    group = maker.make(Identifiers(), 0, 1, 1)
    group.eager_connect_single_device(device())
    assert maker.take_stream() == ring[1]
    group.abort()


def test_nothing_keeps_a_tensor_once_it_was_sent_received_or_summed(everywhere):
    """Not even until the next collection of cycles, which may be long after."""

    def talk(transport: Transport):
        before, after = (transport.rank - 1) % SIZE, (transport.rank + 1) % SIZE
        everyone, size = tuple(range(SIZE)), 1 << 20
        tensors = [torch.ones(size) for _ in range(4)]
        seen = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        pending = [
            transport.receive(tensors[0], before, 1),
            transport.send(tensors[1], after, 1),
            transport.all_reduce(tensors[2], everyone, [tensors[3]]),
        ]
        pieces = [[torch.ones(0 if to == transport.rank else 9) for to in everyone] for _ in "ab"]
        seen += [weakref.ref(piece.untyped_storage()) for piece in pieces[0] + pieces[1]]
        pending.append(transport.exchange(pieces[0], pieces[1], everyone, 2))
        for each in pending:
            each.wait()
        transport.complete()
        transport.gather(b"")
        del tensors, pieces, pending, each
        return [number for number, storage in enumerate(seen) if storage() is not None]

    gc.collect()
    gc.disable()
    try:
        assert everywhere(talk) == [[]] * SIZE
    finally:
        gc.enable()


def test_who_moves_much_state_connects_for_it_unless_that_took_too_long():
    members = [worker(number) for number in range(3)]
    moved = Transfer(layer=0, source=members[2], destination=members[0])
    moving = Moving(members, [moved], [100])
    told = [Announced(board=name, nccl="2.29") for name in "abc"]
    assert ways_of_state(moving, told, 100) == [("state", (2, 0))]
    assert ways_of_state(moving, told, 101) == []
    late = [*told[:2], Announced(board="c", nccl="2.29", late=True)]
    assert ways_of_state(moving, late, 100) == []
    full = [Announced(board="a", groups=31), *told[1:]]
    assert ways_of_state(moving, full, 100) == []


def test_an_abort_releases_those_who_wait_and_refuses_all_later_use(everywhere):
    started = threading.Barrier(SIZE)

    def wait(transport: Transport):
        pending = transport.receive(torch.zeros(1), {0: 1, 1: 2, 2: 0}[transport.rank], 9)
        started.wait(60)
        if transport.rank == 0:
            transport.abort()
        with pytest.raises(TransportError):
            pending.wait()
        transport.abort()
        with pytest.raises(TransportError):
            transport.all_reduce(torch.zeros(1), (0, 1, 2)).wait()
        return True

    assert everywhere(wait) == [True] * SIZE


@pytest.mark.parametrize(
    ("name", "wanted", "told", "choice"),
    [
        ("cpu", "auto", ["", ""], "links"),
        ("cpu", "tcp", ["", ""], "links"),
        ("cuda:0", "auto", ["a/0 2.29", "b/0 2.29"], "nccl"),
        ("cuda:0", "tcp", ["a/0 2.29", "b/0 2.29"], "staged"),
        # Two workers on a GPU, or on parts of it, which NCCL does not connect.
        ("cuda:1", "auto", ["a/0 2.29", "a/0 2.29"], "staged"),
        ("cuda:0", "auto", ["a/0 2.29", ""], "staged"),
        # Other versions refuse each other, again and again.
        ("cuda:0", "auto", ["a/0 2.29", "b/0 2.27"], "staged"),
        # torch has streams for so many groups.
        ("cuda:0", "auto", ["a/0 2.29 31", "b/0 2.29 3"], "nccl"),
        ("cuda:0", "auto", ["a/0 2.29 3", "b/0 2.29 32"], "staged"),
    ],
)
def test_the_choice(name, wanted, told, choice):
    said = [[*one.split(), "", "", "0"] if not one else [*one.split(), "0"] for one in told]
    devices = [Announced(board=a, nccl=b, torch=LEAST_TORCH, groups=int(c)) for a, b, c, *_ in said]
    assert choose(name != "cpu", wanted, devices) == choice


def test_a_torch_that_is_not_safe_with_nccl_is_named(caplog):
    told = [Announced(board=board, nccl="2.29", torch=LEAST_TORCH) for board in "ab"]
    assert choose(True, "auto", told) == "nccl"
    told[1] = Announced(board="b", nccl="2.29", torch=(2, 9))
    assert choose(True, "auto", told) == "staged"
    assert "torch 2.9," in caplog.records[-1].why
    assert torch_version() >= LEAST_TORCH


@pytest.mark.parametrize(("pipelines", "stages"), [(2, 4), (4, 4), (8, 1)])
def test_pipelines_of_stages_of_eight_gpus_go_over_nccl(pipelines, stages):
    plan = plan_of_cuts(*[([(1, 8)] * stages, 4)] * pipelines)
    wirings = [wiring_of(plan, each, tied=True, ordered=False) for each in plan.workers]
    told = [
        Announced(board=str(each), nccl="2.29", torch=LEAST_TORCH, groups=len(wiring.names))
        for each, wiring in zip(plan.workers, wirings, strict=True)
    ]
    assert choose(True, "auto", told) == "nccl"
