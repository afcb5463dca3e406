"""State moves in chunks: all of it, once, over every transport, whoever dies meanwhile."""

import functools
import random
import threading
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.messages import FaultRule
from oobleck.planner.programs.communicators import communicators
from oobleck.planner.programs.transfer import Transfer
from oobleck.worker.recovery.rejoin import carry_out, chunks_of
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.transport.linked import LinkTransport
from support.director import Director, Transport, WarmWorkers, make_plan, worker_named
from support.folders import TEXT
from support.meeting import Party
from support.reference import train_reference

STEPS = 5
CPU = torch.device("cpu")
SIZE = 4
JOB = JobSpec(
    name="transfer",
    model=ModelSpec(layers=3, hidden=16, heads=2, sequence_length=8, tied=True),
    data=DataSpec(text=(TEXT,)),
    training=TrainingSpec(
        steps=STEPS,
        global_batch=8,
        microbatch=1,
        precision="fp64",
        optimizer=OptimizerSpec(lr=1e-2),
    ),
)
LAYERS = range(JOB.model.layer_count)


def worker(number: int) -> WorkerId:
    return WorkerId(NodeName(f"n{number}"), 0)


def transfer(layer: int, source: int, destination: int, start: str = "0", stop: str = "1"):
    return Transfer(
        layer=layer,
        source=worker(source),
        destination=worker(destination),
        start=Fraction(start),
        stop=Fraction(stop),
    )


def holding() -> ModelState:
    """All layers whole, with numbers that tell where they are from."""
    state = ModelState(JOB, CPU)
    for layer in LAYERS:
        storage = state.initialise(layer).storage
        numbers = torch.arange(storage.numel(), dtype=storage.dtype)
        storage.copy_((numbers + 1e6 * layer).view_as(storage))
    return state


@pytest.mark.parametrize("most_bytes", [1, 24, 1000, 24 * 500, 1 << 20])
def test_chunks_are_every_number_once_and_no_larger_than_asked(most_bytes: int) -> None:
    state = ModelState(JOB, CPU)
    moved = [transfer(0, 0, 1, "1/3", "1"), transfer(1, 0, 2), transfer(4, 2, 0, "0", "1/7")]
    most = max(1, most_bytes // state.bytes_per_number)
    found = list(chunks_of(moved, state, most_bytes))
    counts = {each: [one for one, _ in found].count(each) for each in moved}
    for each in moved:
        chunks = [numbers for one, numbers in found if one == each]
        assert all(0 < sum(map(len, numbers)) <= most for numbers in chunks)
        for kind, whole in enumerate(state.share(each.layer, each.start, each.stop)):
            assert [number for numbers in chunks for number in numbers[kind]] == list(whole)
    first = [one for one, _ in found[: len(moved)]]
    assert first == moved or most >= max(counts.values()), "of each the first, before a second"


def test_what_is_all_that_a_worker_holds_is_neither_copied_nor_cut_in_vain() -> None:
    state, other = holding(), ModelState(JOB, CPU)
    other.allocate(1, version=0)
    ((_, numbers),) = chunks_of([transfer(1, 0, 1)], state, 1 << 20)
    assert state.read(1, numbers) is state.layers[1].storage
    room = other.room(1, numbers)
    room.copy_(state.read(1, numbers))
    other.write(1, numbers, room)
    other.complete(1)
    assert room is other.layers[1].storage
    assert torch.equal(room, state.layers[1].storage)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_moves_between_whomever_arrives(seed: int) -> None:
    """Random pieces to and fro between threads, over real links, in chunks of a few numbers or
    many: all come to the end, and have what the sources had."""
    rng, truth = random.Random(seed), holding()
    chunk_bytes = rng.choice([240, 2400, 24000, 1 << 20])
    moved = []
    for layer in LAYERS:
        cuts = sorted({Fraction(0), Fraction(1), *(Fraction(rng.randrange(13), 12) for _ in "abc")})
        for destination in rng.sample(range(SIZE), rng.randrange(1, SIZE)):
            for start, stop in pairwise(cuts):
                source = rng.choice([each for each in range(SIZE) if each != destination])
                moved.append(transfer(layer, source, destination, str(start), str(stop)))
    coming = [{each.layer for each in moved if each.destination == worker(n)} for n in range(SIZE)]
    states = [holding() for _ in range(SIZE)]
    for state, layers in zip(states, coming, strict=True):
        for layer in layers:
            state.allocate(layer, version=0).storage.fill_(torch.nan)
    rank = {worker(number): number for number in range(SIZE)}

    def move(transport: LinkTransport) -> int:
        me, state = worker(transport.rank), states[transport.rank]
        own = [each for each in moved if me in (each.source, each.destination)]
        return carry_out(own, me, rank, state, transport, chunk_bytes, lambda *_, **__: None)

    with Party(SIZE) as party:
        party.meet()
        giving_up = threading.Timer(60, lambda: [each.abort() for each in party.transports])
        giving_up.start()
        received = party.everywhere(move)
        giving_up.cancel()
    width = truth.bytes_per_number
    shares = [truth.share(each.layer, each.start, each.stop) for each in moved]
    assert sum(received) == width * sum(len(some) for share in shares for some in share)
    for state, layers in zip(states, coming, strict=True):
        for layer in layers:
            state.complete(layer)
            assert torch.equal(state.layers[layer].storage, truth.layers[layer].storage)


FIVE = make_plan(1, [[("a", 2), ("b", 3)], [("c", 1), ("d", 2), ("e", 2)]], [4, 4])
WITHOUT_E = make_plan(2, [[("a", 2), ("b", 3)], [("c", 3), ("d", 2)]], [5, 3])
A_B_C = make_plan(3, [[("a", 1), ("b", 3), ("c", 1)]], [8])


@functools.cache
def undisturbed() -> list[float]:
    return [step.loss for step in train_reference(JOB).steps]


def fault(node: str, point: str, **where: object) -> FaultRule:
    return FaultRule(worker=worker_named(node), point=point, action="kill_worker", **where)  # type: ignore[arg-type]


@pytest.mark.parametrize("transport", ["links", "staged", "nccl"])
@pytest.mark.parametrize("chunk", [0, 3, 20])
def test_a_source_that_dies_between_chunks(
    warm: WarmWorkers, transport: Transport, chunk: int
) -> None:
    """Over NCCL the chunks are so many that those who move some connect for them."""
    faults = [
        fault("e", "after:Forward", step=3),
        fault("d", "sending", generation=Generation(2), microbatch=chunk),
    ]
    with Director(warm, JOB, faults, transport=transport, chunk_bytes=1 << 10) as cluster:
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: cluster.workers[worker_named("e")].gone, "the first kill")
        cluster.assign(WITHOUT_E)
        cluster.wait(lambda: cluster.workers[worker_named("d")].gone, "the second, in mid-copy")
        cluster.assign(A_B_C)
        cluster.wait_finished(A_B_C)
        cluster.stop()
        assert list(cluster.losses().values()) == pytest.approx(undisturbed(), rel=1e-12)


def test_much_state_goes_over_nccl_and_its_groups_end_before_the_first_step(
    warm: WarmWorkers,
) -> None:
    before = set(communicators(FIVE, tied=JOB.model.ties))
    # Training begins before all are connected, and what connects late would count as state's.
    held = FaultRule(worker=worker_named("e"), point="after:Forward", action="hold", step=3)
    with Director(warm, JOB, [held], transport="nccl", chunk_bytes=1 << 10) as cluster:
        switch = cluster.switch
        assert switch is not None
        cluster.start("a", "b", "c", "d", "e")
        cluster.assign(FIVE)
        cluster.wait(lambda: switch.made == sum(len(one.members) for one in before), "all groups")
        cluster.wait(lambda: 2 in cluster.records, "two steps")
        made = switch.made
        cluster.kill("e")
        cluster.wait(lambda: cluster.workers[worker_named("e")].gone, "the kill")
        cluster.assign(WITHOUT_E)
        cluster.wait_finished(WITHOUT_E)
        wanted = communicators(WITHOUT_E, tied=JOB.model.ties)
        new = set(wanted) - before
        # A group that not all had launched is made anew, too.
        others = switch.made - made - sum(len(one.members) for one in new)
        of_state = sorted(count for count in switch.ended if count > 16)
        assert of_state, "chunks went by them"
        assert of_state[::2] == of_state[1::2], "a sender and a receiver each"
        assert others >= len(of_state)
        assert switch.there == sum(len(one.members) for one in wanted)
        cluster.stop()
        assert list(cluster.losses().values()) == pytest.approx(undisturbed(), rel=1e-12)
