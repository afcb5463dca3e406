"""What every transport must do, run on each of them: over gloo, with connections on links and
between all, staged, and in NCCL's wiring.

NCCL between workers needs a GPU for each; its transport's routing over groups and links is run with
gloo groups in their place. The ranks are threads of this process, with sockets between them. On a
GPU (`--device cuda:0`) they share it, over the staged transport.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions, PrefixStore, ProcessGroupGloo

from oobleck.host.device import worker_environment
from oobleck.worker.runtime.errors import TransportError
from oobleck.worker.runtime.waiting import Waits
from oobleck.worker.transport.connect import choose
from oobleck.worker.transport.gloo import GlooTransport
from oobleck.worker.transport.nccl import NcclTransport, make_nccl_group
from oobleck.worker.transport.peer_connections import MOST_BYTES
from oobleck.worker.transport.rendezvous import RendezvousStore, StoreServer
from oobleck.worker.transport.staged import StagedTransport
from oobleck.worker.transport.tell_all import tell_all
from oobleck.worker.transport.transport import Transport
from support.devices import device

SIZE = 3
GROUPS = ((0, 1), (0, 1, 2), (1, 2))
LINKS = ((0, 1), (1, 0), (1, 2))
CPU = torch.device("cpu")


def gloo_group(store, rank, size):
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=60)
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return ProcessGroupGloo(store, rank, size, options)


def connect(kind: str, servers: list[StoreServer], rank: int) -> Transport:
    waits = Waits()
    rendezvous = RendezvousStore(servers[0].endpoint, kind, own=servers[rank], waits=waits)
    over_host = () if kind == "nccl" else GROUPS
    linked = {peer for link in LINKS if rank in link for peer in link} - {rank}
    peers = {"linked": linked, "mesh": set(range(SIZE)) - {rank}}.get(kind, ())
    host = GlooTransport(
        rendezvous, rank, SIZE, over_host, "127.0.0.1", waits, peers=peers, meshed=kind == "mesh"
    )
    if kind in ("gloo", "linked", "mesh"):
        return host
    staged = StagedTransport(host, everything=True)
    if kind == "staged":
        return staged
    return NcclTransport(
        rendezvous, staged, CPU, groups=GROUPS, links=LINKS, waits=waits, make_group=gloo_group
    )


@pytest.fixture(params=["gloo", "linked", "mesh", "staged", "nccl"])
def everywhere(request: pytest.FixtureRequest):
    """Runs a function of a transport on all ranks at once, with tensors where tests compute, and
    returns what each returned."""
    if device().type != "cpu" and request.param != "staged":
        pytest.skip("a transport between host tensors, or for a GPU per rank")
    servers = [StoreServer("127.0.0.1") for _ in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as pool:
        ranks = list(pool.map(lambda rank: connect(request.param, servers, rank), range(SIZE)))

        def there(function: Callable[[Transport], object], transport: Transport) -> object:
            with device():
                return function(transport)

        def run(function: Callable[[Transport], object]) -> list[object]:
            return list(pool.map(partial(there, function), ranks))

        yield run
        for transport in ranks:
            transport.abort()
            transport.dispose()


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
        return tell_all(transport, ("ü" * transport.rank,), tuple[str, ...], 16)

    assert everywhere(talk) == [[("",), ("ü",), ("üü",)]] * SIZE


def test_what_is_no_message_is_the_fault_of_the_peer_and_not_of_the_job(everywhere):
    def talk(transport: Transport):
        if transport.rank == 1:
            return len(transport.all_gather(torch.full((16,), 255, dtype=torch.uint8)))
        with pytest.raises(TransportError, match=r"^what came from rank 1 is not a valid tuple: "):
            tell_all(transport, ("",), tuple[str, ...], 16)
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
    small, count, large = MOST_BYTES // 4, 60, MOST_BYTES

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


def test_a_group_comes_up_again_after_every_abort_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    """Of one worker: NCCL's own on a GPU, else gloo's in its place."""
    make_group = gloo_group if device().type == "cpu" else make_nccl_group
    for name, value in worker_environment(device().type).items():
        monkeypatch.setenv(name, value)
    store = StoreServer("127.0.0.1").store
    threads = []
    for number in range(20):
        group = make_group(PrefixStore(str(number), store), 0, 1)
        tensor = torch.full((1000,), 3.0, device=device())
        group.allreduce([tensor], AllreduceOptions()).wait()
        assert tensor.unique().tolist() == [3.0]
        group.abort()
        del group
        threads.append(len(os.listdir("/proc/self/task")))
    assert max(threads[10:]) <= max(threads[:10])


def test_an_abort_releases_those_who_wait_and_refuses_all_later_use(everywhere):
    started = threading.Barrier(SIZE)

    def wait(transport: Transport):
        # From no link: what ends a wait there is NCCL's own abort, and gloo's ends none.
        pending = transport.receive(torch.zeros(1), {0: 2, 1: 2, 2: 0}[transport.rank], 9)
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


class EndedByAbort:
    """As NCCL, it ends a receive when it is aborted, and nothing tells that no message came."""

    def __init__(self) -> None:
        self.connected = False
        self.waiting = threading.Event()
        self.ended = threading.Event()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> "EndedByAbort":
        return self

    def wait(self) -> None:
        if self.connected:
            self.waiting.set()
            assert self.ended.wait(60)

    def abort(self) -> None:
        self.ended.set()


def test_what_an_abort_leaves_behind_is_no_message():
    server, waits = StoreServer("127.0.0.1"), Waits()
    rendezvous = RendezvousStore(server.endpoint, "ended", own=server, waits=waits)
    host = GlooTransport(rendezvous, 0, 1, (), "127.0.0.1", waits)
    link = EndedByAbort()
    transport = NcclTransport(
        rendezvous,
        host,
        CPU,
        groups=(),
        links=[(1, 0)],
        waits=waits,
        make_group=lambda store, rank, size: link,
    )
    link.connected = True
    pending = transport.receive(torch.zeros(1), 1, 3)
    with ThreadPoolExecutor(1) as pool:
        waited = pool.submit(pending.wait)
        assert link.waiting.wait(60)
        transport.abort()
        with pytest.raises(TransportError, match="aborted"):
            waited.result(60)
    transport.dispose()


@pytest.mark.parametrize(
    ("device", "wanted", "gpus_for_all", "choice"),
    [
        ("cpu", "auto", False, "gloo"),
        ("cpu", "gloo", False, "gloo"),
        ("cuda:0", "auto", True, "nccl"),
        ("cuda:1", "auto", False, "staged"),
        ("cuda:0", "gloo", True, "staged"),
    ],
)
def test_the_choice(device, wanted, gpus_for_all, choice):
    assert choose(torch.device(device), wanted, gpus_for_all=gpus_for_all) == choice


def test_few_transports_are_left_at_a_time_however_fast_they_follow_each_other() -> None:
    server, waits = StoreServer("127.0.0.1"), Waits()
    rendezvous = RendezvousStore(server.endpoint, "often", own=server, waits=waits)
    left = []
    for _ in range(5):
        GlooTransport(rendezvous, 0, 1, (), "127.0.0.1", waits).dispose()
        left.append(sum(t.name == "dispose-transport" for t in threading.enumerate()))
    assert max(left) <= 3
