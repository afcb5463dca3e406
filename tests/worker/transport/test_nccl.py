"""What the transport over NCCL must do on devices that promise nothing.

The ranks are threads of this process, with real links between them and groups of support.fake_nccl
in NCCL's place. Programs run to their end where all work of a device waits for all kernels on it,
receives that wait for their peers among them; groups come up without waiting for each other; and
nobody waits for what never ends.
"""

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch._C._distributed_c10d import AllreduceOptions

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Instruction,
    Message,
    ReceiveActivation,
    ReceiveGradient,
    SyncGradient,
)
from oobleck.core.plan import Plan
from oobleck.planner.profile.memory import GROUP_CTAS, LINK_CTAS
from oobleck.planner.programs.communicators import Name, wiring_of
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.worker.runtime.errors import HelperLost, NodeError, TransportError, Unmapped
from oobleck.worker.step.mailbox import AHEAD
from oobleck.worker.transport.linked import LinkTransport
from oobleck.worker.transport.nccl import communicator
from oobleck.worker.transport.nccl import transport as nccl_transport
from oobleck.worker.transport.nccl.communicator import Line
from oobleck.worker.transport.nccl.connect import LIMIT_S, Communicators, is_kept, stamps_of
from oobleck.worker.transport.nccl.group import ABORT_LIMIT_S, Aborts, Identifiers, peers_may_fail
from oobleck.worker.transport.nccl.transport import NcclTransport
from oobleck.worker.transport.transport import Pending
from support.fake_nccl import (
    CUDA_FAILED,
    WORKERS,
    Device,
    Fabric,
    FakeWork,
    RankOfFabric,
    nccl_error,
    raising,
)
from support.meeting import Party
from support.plans import plan_of_cuts
from support.routes import random_listed
from support.waiting import PATIENCE_S, until

CPU = torch.device("cpu")
ROWS = 6
COMPUTE = Forward | Backward | BackwardInput | BackwardWeight
PAIR = ((0, 1), (1, 0))
#: For what must not happen: so long it is looked for.
SOON_S = 0.2


class Cluster:
    """Ranks with a device each, and the transports between them."""

    def __init__(
        self,
        party: Party,
        size: int,
        *,
        room: int = 4,
        together: int = 0,
        streams: int = 32,
        network: bool = False,
        environment: Mapping[str, str] = WORKERS,
    ) -> None:
        self.party = party
        fabric = Fabric(together, network=network)
        devices = [Device(room, streams) for _ in range(size)]
        self.ranks = [RankOfFabric(fabric, device, environment) for device in devices]
        self.aborts: list[Aborts] = []
        self.communicators: list[Communicators] = []
        self.end_within(10)
        self.transports: list[NcclTransport] = []

    def end_within(self, seconds: float) -> None:
        """So long an abort may take."""
        self.aborts = [Aborts(CPU, limit_s=seconds) for _ in self.ranks]
        pairs = zip(self.aborts, self.ranks, strict=True)
        self.communicators = [Communicators(CPU, aborts, rank) for aborts, rank in pairs]

    def connect(
        self,
        groups: Sequence[tuple[int, ...]] = (),
        ways: Sequence[tuple[int, int]] = (),
        limit_s: float = 20,
    ) -> list[NcclTransport]:
        names = [*(("owners", group) for group in groups), *(("link", way) for way in ways)]
        return self.connect_by([names] * len(self.ranks), limit_s)

    def connect_by(
        self, names: Sequence[Sequence[Name]], limit_s: float = 20
    ) -> list[NcclTransport]:
        """`names`: of each rank."""
        self.party.meet()
        self.transports = self.party.everywhere(
            lambda links: self.join(links, names[links.rank], limit_s)
        )
        return self.transports

    def join(
        self,
        links: LinkTransport,
        names: Sequence[Name],
        limit_s: float = 20,
        *,
        at_once: bool = True,
        late: bool = False,
        moves_state: bool = False,
    ) -> NcclTransport:
        """One rank's transport in the present meeting."""
        own = self.communicators[self.party.links.index(links.links)]
        told = [stamps_of(each) for each in links.gather(own.stamps())]
        return NcclTransport(
            links,
            links,
            own,
            names,
            told,
            at_once=at_once,
            late=late,
            moves_state=moves_state,
            limit_s=limit_s,
        )

    def join_alone(self, links: LinkTransport, names: Sequence[Name]) -> NcclTransport:
        """The same where others may not come as far, and nobody has any of before."""
        own = self.communicators[self.party.links.index(links.links)]
        return NcclTransport(links, links, own, names, [frozenset()] * links.size)

    def settle(self) -> None:
        """All communicators are ended."""
        for communicators in self.communicators:
            communicators.end_all()
            communicators.aborts.settle(lambda: None)

    def close(self) -> None:
        for links in self.party.transports:
            links.abort()  # whoever still connects
        for rank in self.ranks:
            rank.device.close()
        for transport in self.transports:
            transport.abort()
        self.settle()


@pytest.fixture
def cluster() -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []
    parties: list[Party] = []

    def make(size: int, **options: Any) -> Cluster:
        parties.append(Party(size, sealed=False))
        made.append(Cluster(parties[-1], size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert [rank.device.misused for rank in each.ranks] == [[]] * len(each.ranks)
    for party in parties:
        party.__exit__()


def tag_of(step: Message) -> int:
    gradient, microbatch, boundary, share = step.content
    return ((microbatch * 100 + boundary) * 2 + gradient) * 1000 + share.start * 10 + share.of


class Interpreter:
    """Runs one worker's program as the executor does: receives posted ahead in the order of the
    program, sums waited for in the end; all work waits for the whole device."""

    def __init__(
        self,
        transport: NcclTransport,
        device: Device,
        plan: Plan,
        program: Sequence[Instruction],
        *,
        waits: bool = True,
    ) -> None:
        """`waits`: the host waits for each computation; else it only queues them."""
        self._transport = transport
        self._device = device
        self._waits = waits
        self._program = program
        self._rank = {worker: rank for rank, worker in enumerate(plan.workers)}
        self._due: dict[WorkerId, deque[Message]] = {}
        self._posted: dict[tuple[WorkerId, int], tuple[torch.Tensor, Pending]] = {}

    def run(self) -> None:
        messages = [s for s in self._program if isinstance(s, Message) and s.share.of_rows(ROWS)]
        for step in messages:
            if isinstance(step, ReceiveActivation | ReceiveGradient):
                self._due.setdefault(step.peer, deque()).append(step)
        for due in self._due.values():
            for _ in range(AHEAD):
                self._post(due)
        sums = []
        for step in self._program:
            if isinstance(step, COMPUTE):
                if self._waits:
                    self._device.synchronize()
                else:
                    self._device.compute(self._device.synchronize)
            elif isinstance(step, SyncGradient):
                tensor = torch.ones(3)
                group = tuple(sorted(self._rank[owner] for owner in step.owners))
                sums.append((tensor, group, self._transport.all_reduce(tensor, group)))
            elif isinstance(step, Message) and step in messages:
                self._talk(step)
        for tensor, group, pending in sums:
            pending.wait()
            assert tensor.tolist() == [len(group)] * 3
        self._transport.complete()

    def _talk(self, step: Message) -> None:
        if not isinstance(step, ReceiveActivation | ReceiveGradient):
            tensor = torch.full((2,), float(tag_of(step)))
            self._transport.send(tensor, self._rank[step.peer], tag_of(step))
            return
        tensor, pending = self._posted.pop((step.peer, tag_of(step)))
        pending.wait()
        assert tensor.tolist() == [tag_of(step)] * 2
        self._post(self._due[step.peer])

    def _post(self, due: deque[Message]) -> None:
        if due:
            step, tensor = due.popleft(), torch.zeros(2)
            peer = self._rank[step.peer]
            pending = self._transport.receive(tensor, peer, tag_of(step))
            self._posted[step.peer, tag_of(step)] = tensor, pending


def run_program(cluster: Cluster, plan: Plan, *, waits: bool = True) -> None:
    by_rank = list(compile_programs(plan, tied=False).values())
    wirings = [wiring_of(plan, worker, tied=False, ordered=True) for worker in plan.workers]
    cluster.connect_by([wiring.names for wiring in wirings])

    def run(links: LinkTransport) -> None:
        rank = links.rank
        device, transport = cluster.ranks[rank].device, cluster.transports[rank]
        Interpreter(transport, device, plan, by_rank[rank], waits=waits).run()

    cluster.party.everywhere(run)


@pytest.mark.parametrize("waits", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_schedule_runs_where_all_work_waits_for_all_kernels(cluster, schedule, waits):
    plan = plan_of_cuts(([1, 1, 1], 4), ([2, 1], 3), schedule=schedule)
    run_program(cluster(len(plan.workers)), plan, waits=waits)


@pytest.mark.parametrize("seed", range(6))
def test_any_routes_run_where_all_work_waits_for_all_kernels(cluster, seed):
    """Re-routed after losses, or in no order at all, with stages of several workers."""
    plan = random_listed(random.Random(seed))
    run_program(cluster(len(plan.workers)), plan, waits=seed % 2 == 0)


@pytest.mark.parametrize("seed", range(4))
def test_programs_run_while_communicators_connect(cluster, seed):
    """Some are there, others connect, and all work waits for all kernels of the device, those of
    first uses among them."""
    plan = random_listed(random.Random(seed))
    here = cluster(len(plan.workers))
    names = [wiring_of(plan, worker, tied=False, ordered=True).names for worker in plan.workers]
    every = sorted({name for each in names for name in each})
    before = set(random.Random(seed).sample(every, len(every) // 2))
    here.connect_by([[name for name in each if name in before] for each in names])
    for transport in here.transports:
        transport.dispose()
    here.party.meet()
    here.transports = here.party.everywhere(
        lambda links: here.join(links, names[links.rank], at_once=False)
    )
    programs = list(compile_programs(plan, tied=False).values())

    def run(links: LinkTransport) -> int:
        rank, turns = links.rank, 0
        transport, device = here.transports[rank], here.ranks[rank].device
        while True:
            Interpreter(transport, device, plan, programs[rank]).run()
            turns += 1
            if set(links.gather(b"%d" % transport.connected)) == {b"1"}:
                break
        transport.use_connected()
        Interpreter(transport, device, plan, programs[rank]).run()
        return turns

    assert len(set(here.party.everywhere(run))) == 1
    used = [each for rank in here.ranks for each in rank.groups if not each.is_aborted]
    assert len(used) == sum(map(len, names))


class Hanging:
    """A call that hangs, as a fault of a rank."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._may_return = threading.Event()

    def __call__(self) -> None:
        self.has_begun.set()
        self._may_return.wait(PATIENCE_S)

    def let_return(self) -> None:
        self._may_return.set()


def test_who_is_lost_while_others_connect_ends_it(cluster):
    """Whether the call that hangs is its own or not."""
    here, hanging = cluster(3), Hanging()
    here.ranks[2].faults["connect"] = hanging
    here.party.meet()
    names: list[Name] = [("owners", (0, 1, 2)), ("owners", (0, 1))]
    here.transports = here.party.everywhere(lambda links: here.join(links, names, at_once=False))
    until(hanging.has_begun.is_set, "the call that hangs")
    assert not any(transport.connected for transport in here.transports)
    here.party.everywhere(lambda links: step_of(here.transports[links.rank], links.size))
    here.transports[2].abort()
    for transport in here.transports[:2]:
        until(partial(is_over, transport), "its end")
        transport.abort()
    hanging.let_return()
    here.settle()
    assert all(group.is_aborted for rank in here.ranks for group in rank.groups)


@pytest.mark.parametrize("call", ["connect", "allreduce"])
def test_who_leaves_in_order_while_others_connect_ends_nothing(cluster, call):
    """As at a step boundary, where the others may not have heard yet what the vote said: they wait
    for its identifier, or for its part of the first use."""
    here, hanging = cluster(3), Hanging()
    here.ranks[0].faults[call] = hanging
    here.party.meet()
    names: list[Name] = [("owners", (0, 1, 2)), ("owners", (1, 2))]
    here.transports = here.party.everywhere(lambda links: here.join(links, names, at_once=False))
    gone, *rest = here.transports
    until(hanging.has_begun.is_set, "the call that hangs")
    gone.dispose()
    until(lambda: len(connecting()) == 1, "the others' ends")
    hanging.let_return()
    until(lambda: not connecting(), "its end")
    assert not any(transport.connected or is_over(transport) for transport in rest)
    rest[0].send(torch.full((1,), 5.0), 2, 1)
    came = torch.zeros(1)
    rest[1].receive(came, 1, 1).wait()
    assert came.item() == 5.0


def connecting() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "connect"]


def is_over(transport: NcclTransport) -> bool:
    try:
        transport.check()
        transport.links.check()
    except (TransportError, torch.AcceleratorError):
        return True
    return False


def test_an_exchange_takes_nothing_of_the_device_before_all_have_asked_for_it(cluster):
    """And one that was asked for first comes first, whatever a member waits for."""
    here, group = cluster(3, room=2), (0, 1, 2)
    transports = here.connect_by([[("stage", group), ("owners", group)]] * 3)
    pieces = [[exchanged_by(rank, 3) for _ in range(2)] for rank in range(3)]

    def ask(rank: int) -> list[Pending]:
        return [transports[rank].exchange(*pieces[rank][turn], group, turn) for turn in range(2)]

    pending = [ask(rank) for rank in (0, 1)]
    time.sleep(SOON_S)
    for rank in range(3):
        here.ranks[rank].device.synchronize()  # else it never returns
    pending.append(ask(2))

    def finish(links: LinkTransport) -> None:
        summed = torch.ones(1)
        added = transports[links.rank].all_reduce(summed, group)
        for each in reversed(pending[links.rank]):
            here.ranks[links.rank].device.synchronize()
            each.wait()
        added.wait()
        transports[links.rank].complete()
        assert summed.item() == 3

    here.party.everywhere(finish)
    for rank in range(3):
        for _, came in pieces[rank]:
            assert [each.tolist() for each in came] == [
                [float(other)] * (other != rank) for other in range(3)
            ]


@pytest.mark.parametrize("asked", [False, True], ids=["before it asks", "after it has asked"])
def test_who_is_lost_within_an_exchange_leaves_nothing_that_counts(cluster, asked):
    here, group = cluster(3), (0, 1, 2)
    transports = here.connect_by([[("stage", group)]] * 3)
    lost, *rest = transports
    if asked:
        # Said to be launched, and its kernel never runs.
        here.ranks[0].groups[0].alltoall = lambda outputs, inputs, options: FakeWork()
        lost.exchange(*exchanged_by(0, 3), group, 0)
    pieces = {transport.rank: exchanged_by(transport.rank, 3) for transport in rest}
    pending = [each.exchange(*pieces[each.rank], group, 0) for each in rest]
    released = threading.Semaphore(0)

    def wait(each: Pending) -> None:
        with pytest.raises(TransportError):
            each.wait()
        released.release()

    threads = [threading.Thread(target=wait, args=(each,)) for each in pending]
    for thread in threads:
        thread.start()
    assert not released.acquire(timeout=SOON_S)
    if asked:
        for transport in rest:
            transport.abort()
    lost.abort()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for transport in rest:
        transport.abort()
    here.settle()
    if asked:
        for _, came in pieces.values():
            assert torch.cat(came).isnan().all(), "the fake leaves garbage, as NCCL may"


@pytest.mark.parametrize(("order", "stays"), [((0, 1, 2), True), ((1, 0, 2), False)])
def test_a_stages_communicator_is_kept_where_its_parts_are_the_same(cluster, order, stays):
    """Pieces go by a member's number in it."""
    here = cluster(3)
    here.connect_by([[("stage", (0, 1, 2))]] * 3)
    for transport in here.transports:
        transport.dispose()
    transports = here.connect_by([[("stage", order)]] * 3)
    assert [transport.kept for transport in transports] == [int(stays)] * 3

    def talk(links: LinkTransport) -> list[float]:
        own = order.index(links.rank)
        sent, came = exchanged_by(own, 3)
        transports[links.rank].exchange(sent, came, order, 0).wait()
        return torch.cat(came).tolist()

    others = {own: [float(each) for each in range(3) if each != own] for own in range(3)}
    assert here.party.everywhere(talk) == [others[order.index(rank)] for rank in range(3)]


def test_a_message_takes_nothing_of_either_device_before_it_is_computed(cluster):
    """Though both have asked for it, and later ones go another way meanwhile."""
    here = cluster(2)
    sender, receiver = here.connect(ways=PAIR)
    computed = threading.Event()
    tensors = [torch.zeros(2) for _ in range(3)]
    pending = [receiver.receive(each, 0, 1) for each in tensors[:2]]
    here.ranks[0].device.compute(partial(computed.wait, 30))
    sent = [sender.send(torch.full((2,), value), 1, 1) for value in (3.0, 4.0)]
    back = sender.receive(tensors[2], 1, 2)
    receiver.send(torch.full((2,), 5.0), 0, 2)
    back.wait()
    time.sleep(SOON_S)
    assert [rank.device.running for rank in here.ranks] == [0, 0]
    assert [tensor.tolist() for tensor in tensors[:2]] == [[0.0] * 2] * 2, "they are launched"
    computed.set()
    for each in (*pending, *sent):
        each.wait()
    assert [tensor.tolist() for tensor in tensors] == [[value] * 2 for value in (3.0, 4.0, 5.0)]


def test_a_links_operation_takes_few_multiprocessors(cluster):
    """A receive is there for most of a micro-batch."""
    here = cluster(2)
    here.connect([(0, 1)], PAIR)
    assert sorted(here.ranks[0].most_ctas) == [LINK_CTAS, LINK_CTAS, GROUP_CTAS]
    assert LINK_CTAS <= 2 < GROUP_CTAS


@pytest.mark.parametrize(
    ("size", "groups", "ways"),
    [
        # Four pipelines of three stages, in which each worker has groups that overlap others'.
        (12, [tuple(range(s, 12, 3)) for s in range(3)], [(p * 3, p * 3 + 1) for p in range(4)]),
        # Two stages of four workers: all talk to all.
        (8, [(0, 4), (1, 5), (2, 6), (3, 7)], [(a, b) for a in range(4) for b in range(4, 8)]),
        (6, [(0, 1, 2, 3, 4, 5)], [(a, (a + 1) % 6) for a in range(6)]),
    ],
)
def test_no_group_waits_for_another_one_to_be_connected(cluster, size, groups, ways):
    """Here none is connected before the members of all have come."""
    here = cluster(size, together=len(groups) + len(ways))
    transports = here.connect(groups, ways)
    assert [transport.rank for transport in transports] == list(range(size))


def test_all_groups_end_where_each_abort_waits_for_the_kernels_of_the_others(cluster):
    here = cluster(2)
    first, _ = here.connect([(0, 1)], PAIR)
    to_second, owners = first.communicator("link", (0, 1)), first.communicator("owners", (0, 1))
    to_second.launch("send", [torch.ones(1)])
    until(lambda: here.ranks[0].device.running == 1, "a kernel")
    owners.launch("sum", [torch.ones(1)])
    until(lambda: here.ranks[0].device.running == 2, "two kernels")
    alone = threading.Thread(target=to_second.group.abort, daemon=True)
    to_second.failed = True  # so nobody asks about it meanwhile
    alone.start()
    alone.join(SOON_S)
    assert alone.is_alive(), "one abort waits for the kernels of the others"
    first.abort()
    here.communicators[0].end_all()
    here.aborts[0].settle(lambda: None)
    alone.join(10)
    assert not alone.is_alive()


class Stuck:
    """A group whose abort never returns."""

    def __init__(self) -> None:
        self.may_end = threading.Event()

    def abort(self) -> None:
        self.may_end.wait(60)


@pytest.mark.parametrize("replaced", [False, True])
def test_an_abort_that_never_ends_costs_the_process_and_then_the_node(replaced):
    aborts, stuck = Aborts(CPU, limit_s=0.05, replaced=replaced), Stuck()
    aborts.begin([stuck])
    told = r"1 of NCCL's communicators did not end within 0\.05 s"
    with pytest.raises(NodeError if replaced else HelperLost, match=told):
        aborts.settle(lambda: None)
    stuck.may_end.set()


def test_what_an_abort_leaves_behind_is_no_message(cluster):
    here = cluster(2)
    sender, receiver = here.connect(ways=PAIR)
    fault = threading.Event()
    tensor = torch.zeros(1)
    pending = receiver.receive(tensor, 0, 3)
    # Said to be sent, and never sent.
    here.ranks[0].groups[0].send = lambda tensors, peer, tag: FakeWork()
    sender.send(torch.ones(1), 1, 3)

    def wait() -> None:
        with pytest.raises(TransportError, match="aborted"):
            pending.wait()
        fault.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not fault.wait(SOON_S)
    receiver.abort()
    waiting.join(30)
    assert fault.is_set()
    here.communicators[1].await_idle()
    here.aborts[1].settle(lambda: None)
    assert torch.isnan(tensor).all(), "the fake leaves garbage, as NCCL may"


SYSTEM = "ncclSystemError", "unhandled system error (run with NCCL_DEBUG=INFO)"
REMOTE = nccl_error(
    "ncclRemoteError", "remote process exited or there was a network error", "Connection closed"
)
SICK = nccl_error(*CUDA_FAILED, "Cuda failure 719 'unspecified launch failure'")


@pytest.mark.parametrize(
    ("error", "becomes", "told"),
    [
        (REMOTE, TransportError, r"^NCCL: ncclRemoteError \(Connection closed\)$"),
        (RuntimeError("[a/b.cc:7] aborted. This is typically caused by"), TransportError, "^abor"),
        (nccl_error("ncclInternalError", "internal error", "proxy"), TransportError, "proxy"),
        (SICK, torch.AcceleratorError, "Error \\(Cuda failure 719 'unspecified launch failure'"),
        (RuntimeError("NCCL error: unhandled cuda error"), torch.AcceleratorError, "^NCCL error"),
        (torch.AcceleratorError("CUDA error: ECC"), torch.AcceleratorError, "^CUDA error: ECC$"),
        (nccl_error(*CUDA_FAILED, "Cuda failure 2 'out of memory'"), torch.OutOfMemoryError, "2"),
        (nccl_error(*CUDA_FAILED, "Failed to CUDA calloc 8 bytes"), torch.OutOfMemoryError, "8"),
        (
            nccl_error(*CUDA_FAILED, "Cuda failure 400 'invalid resource handle'"),
            Unmapped,
            "400",
        ),
        (nccl_error(*SYSTEM, "Call to connect failed"), TransportError, "Call to connect"),
        (nccl_error(*SYSTEM, "shm: No space left on device (28)"), NodeError, "/dev/shm"),
    ],
)
def test_whose_fault_it_is(error, becomes, told):
    with pytest.raises(becomes, match=told), peers_may_fail():
        raise error


@pytest.mark.parametrize(
    ("error", "becomes"), [(REMOTE, TransportError), (SICK, torch.AcceleratorError)]
)
def test_an_error_of_nccls_own_ends_the_wait(cluster, error, becomes):
    here = cluster(2)
    first, second = here.connect([(0, 1)])
    here.ranks[0].faults["end"] = raising(error)
    first.all_reduce(torch.ones(1), (0, 1))
    second.all_reduce(torch.ones(1), (0, 1))
    with pytest.raises(becomes, match=r"ncclRemote|ncclUnhandledCuda"):
        first.complete()


#: What goes wrong, and what the rank that it happens to says of it.
STRIKES: dict[str, tuple[Callable[[], None], type[Exception] | None]] = {
    "sick": (raising(SICK), torch.AcceleratorError),
    "remote": (raising(REMOTE), TransportError),
    "no memory": (raising(torch.OutOfMemoryError("CUDA out of memory")), torch.OutOfMemoryError),
    "slow": (partial(time.sleep, 0.05), None),
}
CALLS = ["make", "connect", "send", "recv", "allreduce", "alltoall", "end", "synchronize", "abort"]


@pytest.mark.parametrize("strike", STRIKES)
@pytest.mark.parametrize("call", CALLS)
def test_whatever_fails_in_any_call_ends_in_one_error(cluster, call, strike):
    """Of the rank that it happens to; the other one is released, or is done."""
    here, (act, told) = cluster(2), STRIKES[strike]
    faults = here.ranks[0].faults

    def train(links: LinkTransport) -> Exception | None:
        transport: NcclTransport | None = None
        try:
            if links.rank == 0 and call in ("make", "connect"):
                faults[call] = act
            transport = here.join(links, names)
            if links.rank == 0 and call not in ("make", "connect"):
                faults[call] = act
            links.gather(b"")
            step_of(transport)
            links.gather(b"")
        except Exception as error:  # noqa: BLE001  # looked at below
            (transport or links).abort()
            return error
        transport.dispose()
        return None

    names: list[Name] = [(purpose, (0, 1)) for purpose in ("owners", "stage")]
    names += [("link", way) for way in PAIR]
    here.party.meet()
    first, second = here.party.everywhere(train)
    here.settle()
    assert call not in faults, "it has struck"
    if told is None or call == "abort":
        assert (first, second) == (None, None)
    else:
        assert type(first) is told, first
        assert second is None or type(second) is TransportError, second


def step_of(transport: NcclTransport, size: int = 2) -> None:
    """A message to the next one, an exchange of all, and a sum of all."""
    following, other = (transport.rank + 1) % size, (transport.rank - 1) % size
    arriving = torch.zeros(1)
    pending = transport.receive(arriving, other, 1)
    transport.send(torch.full((1,), float(transport.rank)), following, 1)
    pending.wait()
    assert arriving.item() == other
    sent, came = exchanged_by(transport.rank, size)
    transport.exchange(sent, came, tuple(range(size)), 2).wait()
    assert [each.tolist() for each in came] == [
        [float(rank)] * (rank != transport.rank) for rank in range(size)
    ]
    summed = torch.ones(1)
    transport.all_reduce(summed, tuple(range(size))).wait()
    transport.complete()
    assert summed.item() == size


def exchanged_by(rank: int, size: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What that one sends to each, which is its rank, and where what it gets is to come."""
    lengths = [int(each != rank) for each in range(size)]
    sent = [torch.full((length,), float(rank)) for length in lengths]
    return sent, [torch.full((length,), -1.0) for length in lengths]


@pytest.mark.parametrize("call", ["make", "connect"])
def test_a_sick_gpu_is_no_lost_peer_while_groups_connect(cluster, call):
    here = cluster(2)
    here.ranks[0].faults[call] = raising(SICK)
    with pytest.raises(torch.AcceleratorError, match="unspecified launch failure"):
        here.connect([(0, 1)], limit_s=2.0)


def test_a_sick_gpu_is_no_lost_peer_while_groups_connect_and_others_train(cluster):
    here = cluster(2)
    here.ranks[0].faults["connect"] = raising(SICK)
    here.party.meet()
    names: list[Name] = [("owners", (0, 1))]
    here.transports = here.party.everywhere(lambda links: here.join(links, names, at_once=False))
    until(partial(is_over, here.transports[0]), "its end")
    assert isinstance(here.transports[0].failure, torch.AcceleratorError)
    assert here.transports[1].failure is None or isinstance(
        here.transports[1].failure, TransportError
    )


def test_nobody_asks_about_a_group_while_it_is_aborted(cluster):
    """In torch that would hold Python's lock, and so all threads, until the abort is over. The fake
    ends a thread that does."""
    here = cluster(2)
    first, _ = here.connect([(0, 1)], PAIR)
    group = here.ranks[0].groups[0]
    asked = group.allreduce([torch.ones(0)], AllreduceOptions())
    group.aborting.set()
    with pytest.raises(AssertionError, match="asked during an abort"):
        asked.is_completed()
    group.aborting.clear()
    first.receive(torch.zeros(1), 1, 0)
    pending = first.all_reduce(torch.ones(1), (0, 1))
    # In vain, and an abort waits for it.
    first.communicator("owners", (0, 1)).launch("sum", [torch.ones(1)])
    ends = threading.Event()
    here.ranks[0].faults["abort"] = partial(ends.wait, 30)
    first.abort()
    with pytest.raises(TransportError, match="aborted"):
        pending.wait()
    here.communicators[0].await_idle()
    ends.set()
    here.aborts[0].settle(lambda: None)


#: Environments of torch: one of its own, and those of workers without one of the two variables, of
#: which each is enough.
WATCHED = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
UNWATCHED = {**WORKERS, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "15000"}
BARELY_WATCHED = {**WORKERS, "TORCH_NCCL_BLOCKING_WAIT": "0"}


def test_the_fakes_watchdog_sleeps_for_what_has_failed():
    rank = RankOfFabric(Fabric(), environment=WATCHED)
    group = rank.make(Identifiers(), 0, 1, 1)
    group.eager_connect_single_device(CPU)
    rank.faults["end"] = raising(REMOTE)
    work = group.allreduce([torch.ones(1)], AllreduceOptions())
    until(work.is_completed, "its error")
    ending = threading.Thread(target=group.abort)
    ending.start()
    ending.join(SOON_S)
    assert ending.is_alive()
    ending.join(30)


@pytest.mark.parametrize("environment", [UNWATCHED, BARELY_WATCHED], ids=["none", "barely"])
def test_no_watchdog_holds_up_the_end_of_what_has_failed(cluster, environment):
    here = cluster(2, environment=environment)
    here.end_within(5)
    transports = here.connect([(0, 1)], PAIR)
    for transport in transports:
        here.ranks[transport.rank].faults["end"] = raising(REMOTE)
        transport.all_reduce(torch.ones(1), (0, 1))
    for transport in transports:
        with pytest.raises(TransportError, match="ncclRemoteError"):
            transport.complete()
        transport.abort()
    here.settle()


def test_who_waits_gives_pythons_lock_away_after_each_look(cluster, monkeypatch):
    """The thread that launches what it waits for needs it."""
    here = cluster(2)
    waiting, _ = here.connect(ways=PAIR)
    looks, done = list[str](), iter((False, False, True))
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: looks.append("slept"))
    with monkeypatch.context() as patch:
        patch.setattr(nccl_transport, "time", clock)
        patch.setattr(waiting, "check", lambda: looks.append("looked"))
        waiting.wait_until(lambda: next(done))
    assert looks == ["looked", "slept", "looked", "slept", "looked", "looked"]


def test_who_waits_for_a_sum_hears_that_a_member_leaves(cluster):
    """And is not held up by torch."""
    here = cluster(2)
    first, second = here.connect([(0, 1)])
    # Said to be launched, and its kernel never runs.
    here.ranks[0].groups[0].allreduce = lambda tensors, options: FakeWork()
    pending = first.all_reduce(torch.ones(1), (0, 1))
    second.all_reduce(torch.ones(1), (0, 1))
    heard = threading.Event()

    def wait() -> None:
        with pytest.raises(TransportError):
            pending.wait()
        heard.set()

    threading.Thread(target=wait, daemon=True).start()
    second.dispose()
    assert heard.wait(10)


@pytest.mark.parametrize("network", [False, True], ids=["within a node", "over a network"])
def test_a_lost_peer_is_an_error_of_nccls_or_none(cluster, network):
    """A receive's memory is not given away while its kernel runs."""
    here = cluster(2, network=network)
    sender, receiver = here.connect(ways=PAIR)
    pending = receiver.receive(torch.zeros(1), 0, 1)
    came = weakref.ref(pending._operation._tensors[0])
    # Said to be launched, and its kernel never runs.
    here.ranks[0].groups[0].send = lambda tensors, peer, tag: FakeWork()
    sender.send(torch.ones(1), 1, 1)
    until(lambda: here.ranks[1].device.running == 1, "the kernel")
    here.ranks[0].groups[0].abort()
    if network:
        with pytest.raises(TransportError, match="ncclRemoteError"):
            pending.wait()
    else:
        assert not pending._operation.has_ended()
    assert here.ranks[1].device.running == 1
    assert came() is not None
    sender.abort()
    with pytest.raises(TransportError):
        pending.wait()


def ask(asked: threading.Event, has_ended: Callable[[], bool]) -> bool:
    asked.set()
    return has_ended()


@pytest.mark.parametrize("end", ["goes on", "fails", "is aborted"])
def test_nobody_asks_about_a_communicator_that_another_thread_launches_on(
    cluster, end, monkeypatch
):
    """In NCCL that is not safe, and torch would take the answer for the state of the communicator:
    whoever waits for its operations would hear of no error."""
    here = cluster(2)
    sender, receiver = here.connect(ways=PAIR)
    faults, launching, asked = here.ranks[1].faults, Hanging(), threading.Event()
    may_end, told = threading.Event(), list[object]()
    tensors = [torch.zeros(1) for _ in range(2)]
    first, second = (receiver.receive(each, 0, 1) for each in tensors)
    operation = first._operation
    monkeypatch.setattr(operation, "has_ended", partial(ask, asked, operation.has_ended))
    faults["end"] = partial(may_end.wait, 30)

    def wait() -> None:
        for pending in (first, second):
            try:
                pending.wait()
                told.append(None)
            except TransportError as error:
                told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    sender.send(torch.full((1,), 5.0), 1, 1)
    until(lambda: "end" not in faults, "it has come")
    until(asked.is_set, "it to be asked about")
    faults["recv"] = launching
    sender.send(torch.full((1,), 6.0), 1, 1)
    until(launching.has_begun.is_set, "the launch")
    if end == "fails":
        faults["end"] = raising(REMOTE)
    may_end.set()
    time.sleep(SOON_S)
    assert (told, here.ranks[1].device.misused) == ([], [])
    if end == "is aborted":
        receiver.abort()
        waiting.join(30)
        assert told == ["the groups were aborted"] * 2
    launching.let_return()
    waiting.join(30)
    if end == "goes on":
        assert [tensor.item() for tensor in tensors] == [5.0, 6.0]
    if end == "fails":
        assert "ncclRemoteError" in told[1]


def test_a_first_use_waits_for_no_peer(cluster):
    """It keeps training from launching: here from the receive of a message whose send it would wait
    for, on both sides."""
    here = cluster(2)
    here.connect(ways=PAIR)
    for transport in here.transports:
        transport.dispose()
    making = [Hanging() for _ in here.ranks]
    for rank, hanging in zip(here.ranks, making, strict=True):
        rank.faults["make"] = hanging
    here.party.meet()
    names: list[Name] = [("owners", (0, 1)), *(("link", way) for way in PAIR)]
    here.transports = here.party.everywhere(lambda links: here.join(links, names, at_once=False))

    def launch(part: Literal["send", "receive"]) -> None:
        for transport in here.transports:
            own, other = transport.rank, 1 - transport.rank
            way = (own, other) if part == "send" else (other, own)
            launching = here.communicators[own].launching
            assert launching.acquire(timeout=10), "a first use waits"
            transport.communicator("link", way).launch(part, [torch.zeros(1)])
            launching.release()

    launch("send")
    for hanging in making:
        hanging.let_return()
    time.sleep(SOON_S)
    launch("receive")
    for transport in here.transports:
        until(lambda each=transport: each.connected, "it to connect")


def test_a_peer_that_counts_in_another_way_is_at_fault(cluster):
    here = cluster(2)
    here.party.meet()
    first, second = here.party.transports
    name = ("owners", (0, 1))
    heard = threading.Semaphore(0)
    line = Line(second, name, "sum", heard.release)
    for _ in range(2):  # the second one begins anew
        Line(first, name, "sum", lambda: None).want(lambda: None)
    assert second.links.wait(lambda: heard.acquire(blocking=False), time.monotonic() + 30)
    assert second.links.wait(lambda: heard.acquire(blocking=False), time.monotonic() + 30)
    with pytest.raises(TransportError, match="counts the operations of NCCL differently"):
        line.advance()


def test_notes_that_come_before_anybody_waits_for_them_count(cluster):
    here = cluster(2)
    here.party.meet()
    first, second = here.party.transports
    name = ("link", (0, 1))
    receiving = Line(second, name, "receive", lambda: None)
    for _ in range(3):
        receiving.want(lambda: None)
    there = time.monotonic() + 1
    first.links.wait(lambda: False, there)  # they come, and nobody has posted anything
    launched: list[int] = []
    sending = Line(first, name, "send", lambda: None)
    for number in range(3):
        sending.want(partial(launched.append, number))
    sending.advance()
    assert launched == [0, 1, 2]


def test_whoever_never_comes_is_not_waited_for(cluster):
    """One rank has its groups' identifiers and makes none; the loss of its links ends the wait."""
    here = cluster(3)
    here.party.meet()
    begun = threading.Barrier(3)

    def join(links: LinkTransport) -> str:
        rank = links.rank
        begun.wait(30)
        if rank == 2:
            links.abort()
            here.party.links[2].close()
            return "gone"

        with pytest.raises(TransportError):
            here.join_alone(links, [("owners", (0, 1, 2))])
        return "released"

    assert here.party.everywhere(join) == ["released", "released", "gone"]


@pytest.mark.parametrize("call", ["make", "connect"])
def test_a_call_that_never_returns_is_left_behind(cluster, call):
    """The meeting's end, of which another thread tells, is the end of waiting for it."""
    here = cluster(2)
    here.end_within(0.05)
    hanging = Hanging()
    here.ranks[0].faults[call] = hanging
    here.party.meet()
    first = here.party.transports[0]

    def end_meeting() -> None:
        until(hanging.has_begun.is_set, "the call that hangs")
        first.abort()

    ending = threading.Thread(target=end_meeting)
    ending.start()
    with pytest.raises(TransportError, match="given up"):
        here.join_alone(first, [("owners", (0, 1))])
    ending.join()
    with pytest.raises(HelperLost, match="did not end"):
        here.aborts[0].settle(lambda: None)
    hanging.let_return()
    groups = here.ranks[0].groups
    until(lambda: [group.is_aborted for group in groups] == [True], "no group is left")


def test_a_group_whose_abort_has_begun_is_not_connected(cluster, monkeypatch):
    """The thread that made it has waited for its turn to launch meanwhile."""
    monkeypatch.setattr(communicator, "_LOOK_S", PATIENCE_S)  # it looks only when it has its turn
    here = cluster(2)
    here.party.meet()
    names: list[Name] = [("owners", (0, 1))]
    with here.communicators[0].launching:
        here.transports = here.party.everywhere(
            lambda links: here.join(links, names, at_once=False)
        )
        first, groups = here.transports[0], here.ranks[0].groups
        until(lambda: first._connecting is not None and first._connecting.made, "the group")
        first.abort()
        until(lambda: groups[0].is_aborted, "its abort")
    until(lambda: not connecting(), "the ends")
    assert [group.stream for group in groups] == [-1]


def test_connecting_is_given_up_before_torch_gives_it_up_and_then_the_process():
    given_up_s = float(WORKERS["TORCH_NCCL_NONBLOCKING_TIMEOUT"])
    assert LIMIT_S < given_up_s < ABORT_LIMIT_S


def test_groups_that_never_connect_are_given_up(cluster):
    here = cluster(2, together=99)
    with pytest.raises(TransportError, match=r"did not connect in 0\.3 s"):
        here.connect([(0, 1)], limit_s=0.3)


def test_groups_that_never_connect_end_what_is_trained_meanwhile(cluster):
    here = cluster(2, together=99)
    here.party.meet()
    names: list[Name] = [("owners", (0, 1))]
    here.transports = here.party.everywhere(
        lambda links: here.join(links, names, limit_s=0.3, at_once=False)
    )
    here.party.everywhere(lambda links: step_of(here.transports[links.rank]))
    until(partial(is_over, here.transports[0]), "its end")
    with pytest.raises(TransportError):
        step_of(here.transports[0])


def test_groups_that_never_connect_again_leave_training_to_the_host(cluster):
    """Else one incident would follow the other, and steps between them, so that nobody ends it."""
    here = cluster(2, together=99)
    names: list[Name] = [("owners", (0, 1))]
    for late in (False, True):
        here.party.meet()
        join = partial(here.join, names=names, limit_s=0.1, at_once=False, late=late)
        here.transports = here.party.everywhere(join)
        if not late:
            until(lambda: any(each.late for each in here.communicators), "one to say so")
            for transport in here.transports:
                transport.abort()
    until(lambda: not connecting(), "the ends")
    here.party.everywhere(lambda links: step_of(here.transports[links.rank]))
    assert not any(transport.connected or is_over(transport) for transport in here.transports)
    assert all(each.late for each in here.communicators)
    assert all(group.is_aborted for rank in here.ranks for group in rank.groups)


def test_generation_after_generation_nothing_is_left_behind(cluster):
    here, threads = cluster(2), []
    for _ in range(4):
        here.connect([(0, 1)], PAIR)
        here.party.everywhere(lambda links: step_of(here.transports[links.rank]))
        for transport in here.transports:
            transport.dispose()
        for communicators in here.communicators:
            communicators.await_idle()
            communicators.aborts.settle(lambda: None)
        names = [thread.name for thread in threading.enumerate()]
        threads.append(sum(name in ("abort", "connect") for name in names))
    assert threads == [0] * 4
    assert [len(rank.groups) for rank in here.ranks] == [3, 3], "made once and kept"


def test_communicators_without_the_dead_are_kept(cluster):
    """Whatever rank their members have in the next generation; what the plan wants no more is
    ended."""
    here = cluster(4)
    here.connect([(0, 1, 2), (1, 2, 3), (1, 3), (0, 2)], [(1, 2), (2, 3), (0, 1), (3, 2)])
    before = [list(rank.groups) for rank in here.ranks]
    here.transports[0].abort()
    here.party.links[0].close()
    for transport in here.transports[1:]:
        until(lambda links=transport.links.links: len(links.peers) == 2, "the loss")
        transport.abort()
    here.party.meet(members=[here.party.links[old] for old in (3, 1, 2)])
    #: By the new ranks: 0 was 3.
    names: list[Name] = [
        *(("owners", group) for group in ((0, 1, 2), (1, 2))),
        *(("link", way) for way in ((1, 2), (2, 1), (2, 0))),
    ]
    new = here.party.everywhere(lambda links: here.join(links, names))
    assert [transport.kept for transport in new] == [2, 2, 3]
    assert sum(not group.is_aborted for group in before[2]) == 3
    here.transports = new

    def train(links: LinkTransport) -> float:
        transport = here.transports[links.rank]
        summed = torch.tensor([2.0**transport.rank])
        transport.all_reduce(summed, (0, 1, 2)).wait()
        if transport.rank == 1:
            transport.send(torch.full((1,), 5.0), 2, 1)
        if transport.rank == 2:
            came = torch.zeros(1)
            transport.receive(came, 1, 1).wait()
            summed += came
        transport.complete()
        return summed.item()

    assert here.party.everywhere(train) == [7.0, 7.0, 12.0]


def test_what_not_all_have_launched_is_made_anew(cluster):
    """A send that the receiver has not come to: in NCCL it may end all the same, by its buffers."""
    here = cluster(2)
    first, _ = here.connect([(0, 1)], PAIR)
    first.communicator("link", (0, 1)).launched += 1
    for transport in here.transports:
        transport.dispose()
    here.connect([(0, 1)], PAIR)
    assert [transport.kept for transport in here.transports] == [2, 2]
    first.communicator("owners", (0, 1)).launch("sum", [torch.ones(1)])  # it never ends
    for transport in here.transports:
        transport.dispose()
    here.connect([(0, 1)], PAIR)
    assert [transport.kept for transport in here.transports] == [2, 2]
    here.party.everywhere(lambda links: step_of(here.transports[links.rank]))


def test_what_all_have_launched_ends_though_the_generation_is_over(cluster):
    here = cluster(2)
    transports = here.connect([(0, 1)], PAIR)
    for rank, transport in zip(here.ranks, transports, strict=True):
        rank.faults["end"] = partial(time.sleep, 0.05)
        transport.all_reduce(torch.ones(1), (0, 1))
    sums = [transport.communicator("owners", (0, 1)) for transport in transports]
    until(lambda: all(each.launched == 2 for each in sums), "both to launch it")
    for transport in transports:
        transport.abort()
    here.connect([(0, 1)], PAIR)
    assert [transport.kept for transport in here.transports] == [3, 3]
    here.party.everywhere(lambda links: step_of(here.transports[links.rank]))


def test_who_has_sent_may_leave_before_it_has_come(cluster, monkeypatch):
    monkeypatch.setattr(f"{NcclTransport.__module__}.END_S", 30.0)
    here, comes = cluster(2), threading.Event()
    sender, receiver = here.connect(ways=PAIR)
    here.ranks[1].faults["end"] = partial(comes.wait, 30)
    came = torch.zeros(1)
    pending = receiver.receive(came, 0, 1)
    sender.send(torch.full((1,), 5.0), 1, 1).wait()
    sender.complete()
    sender.dispose()
    until(partial(receiver.links.links.has_left, sender.links.links.identity), "it to leave")
    threading.Timer(SOON_S / 4, comes.set).start()
    pending.wait()
    assert came.item() == 5.0


def test_what_one_has_made_alone_is_made_anew(cluster):
    """A meeting breaks off as one has ended the old communicators, and the other one has not."""
    here = cluster(2)
    here.connect([(0, 1)], PAIR)
    for transport in here.transports:
        transport.dispose()
    here.party.meet()

    def join(links: LinkTransport) -> None:
        if links.rank == 1:
            until(lambda: len(here.ranks[0].groups) == 5, "two more")
            links.abort()
            return
        with pytest.raises(TransportError):
            here.join_alone(links, [("owners", (0, 1)), ("link", (0, 1))])

    here.party.everywhere(join)
    here.connect([(0, 1)], PAIR)
    assert [transport.kept for transport in here.transports] == [0, 0]
    here.party.everywhere(lambda links: step_of(here.transports[links.rank]))


def test_no_two_communicators_are_in_one_stream(cluster):
    """The pool's streams are handed out in turns, also those that kept ones are in."""
    here = cluster(2, streams=4)
    for turn in range(6):
        here.connect([(0, 1)], PAIR if turn % 2 else PAIR[:1])
        for rank in here.ranks:
            live = [group.stream for group in rank.groups if not group.is_aborted]
            assert len(live) == len(set(live)) == 2 + turn % 2
        for transport in here.transports:
            transport.dispose()


@pytest.mark.parametrize("seed", range(3))
def test_all_members_keep_the_same(seed):
    """By whatever stamps they may have told."""
    chance = random.Random(seed)
    groups = [("a", (0, 1, 2)), ("b", (0, 1)), ("c", (1, 2, 3))]
    kept = 0
    for _ in range(300):
        #: By rank and group: which one it has, if any.
        has = [
            {g: chance.choice((b"x", b"x", b"x", b"y", None)) for g, _ in groups} for _ in "0123"
        ]
        told = [{g.encode() + s for g, s in each.items() if s is not None} for each in has]
        for group, members in groups:
            stamps = [has[member][group] for member in members]
            said = {
                stamp is not None and is_kept(group.encode() + stamp, members, told)
                for stamp in stamps
            }
            assert said == {len(set(stamps)) == 1 and None not in stamps}, has
            kept += said == {True}
    assert kept > 50


def test_groups_of_state_are_gone_before_anything_else_is_launched(cluster):
    """Also where some other rank sees the end of what moved later, and an abort takes its time."""
    here = cluster(2)
    here.party.meet()
    names: list[Name] = [("state", (0, 1)), ("owners", (0, 1)), *(("link", way) for way in PAIR)]
    here.ranks[0].faults["abort"] = partial(time.sleep, 0.3)
    come = threading.Event()

    def move(links: LinkTransport) -> list[bool]:
        transport = here.join(links, names, moves_state=True)
        moved = torch.full((3,), float(links.rank))
        if links.rank == 0:
            transport.send(moved, 1, 7).wait()
            transport.complete()
            come.set()
        else:
            transport.receive(moved, 0, 7).wait()
            come.wait(30)
            time.sleep(0.1)
            assert not here.ranks[0].groups[0].is_aborted, "it waits for the others"
            transport.complete()
        assert moved.tolist() == [0.0] * 3
        transport.end_moving()
        ended = [group.is_aborted for group in here.ranks[links.rank].groups]
        assert not any(each.name == "abort" for each in threading.enumerate() if links.rank == 0)
        step_of(transport)
        transport.dispose()
        return ended

    for ended in here.party.everywhere(move):
        assert ended.count(True) == 1
    here.settle()
