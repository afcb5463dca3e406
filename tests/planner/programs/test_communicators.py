"""The communicators of a plan: those that its programs use, in few rounds and of known size."""

import random
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import chain

import pytest

from oobleck.core.ids import WorkerId
from oobleck.core.instructions import Message, SendActivation, SendGradient, SyncGradient
from oobleck.core.plan import Plan
from oobleck.planner.profile.memory import (
    GPU_CONTEXT_BYTES,
    GROUP_CTAS,
    LINK_CTAS,
    allocator_share,
    gpu_reserve_bytes,
    link_bytes,
    stage_bytes,
    strangers_bytes,
    sum_bytes,
)
from oobleck.planner.programs.communicators import (
    MOST_COMMUNICATORS,
    Communicator,
    communicators,
    for_state,
    in_rounds,
    most_links,
    needed,
    too_many,
)
from oobleck.planner.programs.compiler.compile import compile_programs
from oobleck.planner.programs.transfer import Transfer
from support.plans import plan_of_cuts, worker
from support.routes import random_listed, random_pipelines

#: Pipelines, stages, workers of a stage.
SHAPES = {
    "4x8x1": plan_of_cuts(*[([1] * 8, 4)] * 4),
    "(8,7,6,5)x1": plan_of_cuts(
        ([1] * 8, 4), ([1] * 6 + [2], 4), ([1] * 4 + [2] * 2, 4), ([1] * 2 + [2] * 3, 4)
    ),
    "4x8x2": plan_of_cuts(*[([(1, 2)] * 8, 4)] * 4),
    "2x4x8": plan_of_cuts(*[([(1, 8)] * 4, 4)] * 2),
}


def of_programs(plan: Plan, *, tied: bool) -> set[Communicator]:
    """What the instructions of all workers, and the stages that share layers, need."""
    found = set()
    for own, program in compile_programs(plan, tied=tied).items():
        for step in program:
            if isinstance(step, SyncGradient) and len(step.owners) > 1:
                found.add(Communicator("owners", step.owners))
            elif isinstance(step, SendActivation | SendGradient):
                found.add(Communicator("link", (own, step.peer)))
            elif isinstance(step, Message):
                found.add(Communicator("link", (step.peer, own)))
    shared = {hold.workers for hold in plan.holds if len(hold.workers) > 1}
    return found | {Communicator("stage", workers) for workers in shared}


@pytest.mark.parametrize("seed", range(20))
def test_they_are_what_the_programs_use(seed: int) -> None:
    rng = random.Random(seed)
    for plan in (random_pipelines(rng), random_listed(rng)):
        tied = rng.random() < 0.5
        whole = communicators(plan, tied=tied)
        assert set(whole) == of_programs(plan, tied=tied)
        assert list(whole) == sorted(set(whole))
        for one in plan.workers:
            own = tuple(each for each in whole if one in each.members)
            assert communicators(plan, tied=tied, worker=one) == own


@pytest.mark.parametrize("plan", SHAPES.values(), ids=SHAPES)
def test_in_a_round_nobody_is_in_two(plan: Plan) -> None:
    found = communicators(plan, tied=False)
    rounds = in_rounds(reversed(found))
    assert sorted(chain(*rounds)) == list(found)
    assert rounds == in_rounds(found), "all workers come to the same"
    for one in rounds:
        members = list(chain(*(each.members for each in one)))
        assert len(members) == len(set(members))


@pytest.mark.parametrize(
    ("shape", "most", "rounds"),
    [("4x8x1", 5, 6), ("(8,7,6,5)x1", 6, 9), ("4x8x2", 6, 7), ("2x4x8", 6, 7)],
)
def test_how_many_a_worker_is_in_and_how_long_the_first_uses_take(
    shape: str, most: int, rounds: int
) -> None:
    """Not more rounds than a few beyond those that one worker alone has."""
    found = needed(SHAPES[shape], tied=False)
    assert found.communicators == most <= MOST_COMMUNICATORS
    assert most <= found.rounds <= rounds


def test_the_bytes_of_a_worker_are_those_of_its_sums_stages_and_links() -> None:
    """Of two shared stages: what a receiver has within its node, and both ends have beyond it."""
    plan = plan_of_cuts(([(1, 2), (1, 2)], 1), ([(1, 2), (1, 2)], 1))
    size = sum_bytes() + stage_bytes(2) + 2 * link_bytes(receives=True, same_node=False)
    assert needed(plan, tied=False).device_bytes == size
    own = communicators(plan, tied=False, worker=worker(0, 1))
    assert sum(one.bytes_on(worker(0, 1)) for one in own) == size
    assert link_bytes(receives=False, same_node=True) < link_bytes(receives=True, same_node=True)
    assert stage_bytes(2) < stage_bytes(8)


def test_links_and_stages_hold_rings_that_they_do_not_use() -> None:
    """NCCL connects them at once. A ring of two has a buffer at each end within a node, as the
    messages of a receiver have, and two over a network."""
    sender, receiver = (link_bytes(receives=one, same_node=True) for one in (False, True))
    tables = 2 * sender - receiver
    buffers = receiver - sender
    assert sender == tables + buffers
    assert link_bytes(receives=False, same_node=False) == tables + 3 * buffers
    assert stage_bytes(8) == tables + (7 + 2) * buffers * GROUP_CTAS // LINK_CTAS


def test_a_stage_of_one_between_two_of_eight_is_in_too_many() -> None:
    crowded = plan_of_cuts(([(1, 8), (1, 1), (1, 8)], 4))
    assert most_links([8, 1, 8]) == 32
    assert needed(crowded, tied=False).communicators == 32
    assert too_many(crowded, tied=False)


@pytest.mark.parametrize("seed", range(20))
def test_plans_with_too_many_communicators_are_known(seed: int) -> None:
    """By the links of a row of stages, which are as many as its communicators have."""
    rng = random.Random(seed)
    sizes = [rng.randint(1, 8) for _ in range(rng.randint(1, 5))]
    plan = plan_of_cuts(([(1, size) for size in sizes], 4))
    count = Counter(
        member
        for one in communicators(plan, tied=False)
        for member in one.members
        if one.purpose == "link"
    )
    assert most_links(sizes) == max(count.values(), default=0)
    assert too_many(plan, tied=False) == (
        needed(plan, tied=False).communicators > MOST_COMMUNICATORS
    )


def test_a_worker_alone_needs_none() -> None:
    plan = plan_of_cuts(([2], 1))
    assert communicators(plan, tied=True) == ()
    assert needed(plan, tied=True).communicators == needed(plan, tied=True).rounds == 0


@pytest.mark.parametrize(("shape", "gpus"), [("4x8x1", 1), ("4x8x2", 2), ("2x4x8", 8)])
def test_plans_of_equal_stages_need_no_more_than_agents_keep(shape: str, gpus: int) -> None:
    bytes_needed = needed(SHAPES[shape], tied=True).device_bytes
    assert bytes_needed <= gpu_reserve_bytes(gpus) - GPU_CONTEXT_BYTES


@pytest.mark.parametrize(
    ("total", "taken", "share"), [(80 << 30, 4 << 30, 0.95), (2 << 30, 2 << 30, 0.5)]
)
def test_torch_gets_what_is_left_of_a_gpu(total: int, taken: int, share: float) -> None:
    assert allocator_share(total, taken) == share


def test_what_nobody_accounts_for_is_others_memory_where_it_is_beyond_doubt() -> None:
    gib = 1 << 30
    own = 40 * gib + 3 * gib
    assert strangers_bytes(own, 40 * gib, 3 * gib) == 0
    assert strangers_bytes(own + gib // 2, 40 * gib, 3 * gib) == 0, "CUDA's part is an estimate"
    assert strangers_bytes(own + 7 * gib, 40 * gib, 3 * gib) == 7 * gib
    assert strangers_bytes(own - gib, 40 * gib, 3 * gib) == 0


def test_members_are_in_the_order_of_their_ranks() -> None:
    plan = SHAPES["2x4x8"]
    rank: dict[WorkerId, int] = {one: number for number, one in enumerate(plan.workers)}
    sums = [one for one in communicators(plan, tied=False) if one.purpose == "owners"]
    assert all(list(one.members) == sorted(one.members, key=rank.__getitem__) for one in sums)


def moved(source: int, destination: int, layer: int, stop: Fraction = Fraction(1)) -> Transfer:
    return Transfer(layer=layer, source=worker(source), destination=worker(destination), stop=stop)


def test_those_who_move_much_state_get_one_for_it_the_most_first() -> None:
    transfers = [
        moved(0, 1, 0),
        moved(0, 1, 1),
        moved(2, 1, 0, Fraction(1, 2)),
        moved(1, 2, 2),
        moved(2, 0, 0, Fraction(1, 4)),
    ]
    found = partial(for_state, transfers, [100, 40, 60])
    way = partial(Communicator, "state")
    ways = [way((worker(0), worker(1))), way((worker(1), worker(2))), way((worker(2), worker(1)))]
    assert found({}, least_bytes=50) == tuple(ways)
    assert found({}, least_bytes=60) == tuple(ways[:2])
    full = {worker(0): MOST_COMMUNICATORS}
    assert found(full, least_bytes=50) == tuple(ways[1:]), "nobody is in too many"
    almost = {worker(1): MOST_COMMUNICATORS - 2}
    assert found(almost, least_bytes=50) == tuple(ways[:2])
    assert found({}, least_bytes=141) == ()
