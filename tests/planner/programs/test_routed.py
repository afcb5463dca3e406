"""Programs of plans with any routes: everything once, nobody waits for ever, memory holds."""

import random
from collections import Counter, defaultdict
from dataclasses import replace

import pytest

from oobleck.core.errors import ProgramDeadlock
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Message,
    Program,
    ReceiveActivation,
    ReceiveGradient,
    SyncGradient,
    Visit,
    Vote,
)
from oobleck.core.plan import Plan
from oobleck.planner.programs.compiler.compile import (
    Work,
    compile_evaluation,
    compile_programs,
    spread,
)
from oobleck.planner.programs.compiler.proof import dry_run, prove
from oobleck.planner.programs.listing.schedule import listed_routes, planned
from support.plans import plan_of_cuts
from support.program_text import format_programs, parse_programs
from support.routes import listed_workers, random_listed, random_routes, ticks_by_hop


def routed(seed: int) -> Plan:
    return random_listed(random.Random(seed), spare_bytes=seed % 4)


def layers_of(program: Program, *kinds: type) -> Counter[tuple[int, int]]:
    return Counter(
        (step.microbatch, layer)
        for step in program
        if isinstance(step, kinds)
        for layer in step.layers
    )


def computed(programs: dict[WorkerId, Program], plan: Plan, *kinds: type) -> Counter:
    """How many of a hop's workers compute each layer of each micro-batch; 1: all of them."""
    found: Counter[tuple[int, int]] = Counter()
    for worker, program in programs.items():
        for (microbatch, layer), times in layers_of(program, *kinds).items():
            found[microbatch, layer] += times / len(plan.hold_of(worker, layer).workers)
    return found


@pytest.mark.parametrize("seed", range(80))
def test_everything_is_computed_and_summed_once_and_nobody_waits_for_ever(seed: int) -> None:
    plan = routed(seed)
    tied = bool(seed % 2)
    programs = compile_programs(plan, tied=tied)
    assert parse_programs(format_programs(programs)) == programs
    prove(plan)
    dry_run(programs, plan)
    everything = {
        (m, layer): 1 for m in range(plan.microbatches) for layer in range(plan.layer_count)
    }
    assert computed(programs, plan, Forward) == everything
    assert computed(programs, plan, Backward, BackwardInput) == everything
    assert computed(programs, plan, Backward, BackwardWeight) == everything
    check_links(programs)
    check_memory(plan, programs, full=seed % 4 == 0)
    norm = Counter(
        (part.part, part.layer if part.part == "own" else 0, part.share)
        for program in programs.values()
        for step in program
        if isinstance(step, Vote)
        for part in step.norm_parts
    )
    assert set(norm.values()) == {1}
    for worker, program in programs.items():
        synced = [
            part.layer
            for step in program
            if isinstance(step, SyncGradient)
            for part in step.parts
            if part.part == "own"
        ]
        assert set(synced) == set(plan.held[worker])


def check_memory(plan: Plan, programs: dict[WorkerId, Program], *, full: bool) -> None:
    """What each worker keeps of micro-batches fits beside what it holds; `full`: for one of them
    there is no byte more than that."""
    assert plan.listing is not None
    ticks, room = (
        ticks_by_hop(plan, plan.listing),
        dict(zip(plan.workers, plan.listing.room, strict=True)),
    )
    kept = {
        (m, hop.first_layer): ticks[hop].kept_bytes
        for route, share in zip(plan.routes, plan.shares, strict=True)
        for m in share
        for hop in route.hops
    }
    spare = [room[w] - most_kept(programs[w], kept) for w in listed_workers(plan)]
    assert min(spare, default=0) >= 0
    assert not full or min(spare, default=0) == 0


def most_kept(program: Program, kept: dict[Visit, int]) -> int:
    now, most = 0, 0
    for step in program:
        if isinstance(step, Forward):
            now += kept[step.visit]
            most = max(most, now)
        elif isinstance(step, Backward | BackwardWeight):
            now -= kept[step.visit]
    assert now == 0
    return most


def check_links(programs: dict[WorkerId, Program]) -> None:
    """What one worker sends another one is received in the order of the sends."""
    sent, received = defaultdict(list), defaultdict(list)
    for worker, program in programs.items():
        for step in program:
            if isinstance(step, ReceiveActivation | ReceiveGradient):
                received[step.peer, worker].append(step.content)
            elif isinstance(step, Message):
                sent[worker, step.peer].append(step.content)
    assert sent == received


@pytest.mark.parametrize("seed", range(40))
def test_what_is_left_of_a_step_is_in_an_order_in_which_nobody_waits_for_ever(seed: int) -> None:
    plan, draw = routed(seed), random.Random(seed)
    left = sorted(draw.sample(range(plan.microbatches), draw.randint(0, plan.microbatches)))
    lowest = {m: draw.randint(0, plan.layer_count) for m in left if draw.random() < 0.7}
    work = Work(microbatches=spread(left, plan), lowest=lowest)
    programs = compile_programs(plan, tied=False, work=work)
    dry_run(programs, plan)
    check_links(programs)
    assert computed(programs, plan, Forward) == {
        (m, layer): 1 for m in left for layer in range(plan.layer_count)
    }
    back = computed(programs, plan, Backward, BackwardWeight)
    assert set(back.values()) <= {1}
    for m in left:
        for layer in range(lowest.get(m, 0), plan.layer_count):
            assert (m, layer) in back


@pytest.mark.parametrize("seed", range(20))
def test_an_evaluation_goes_every_route(seed: int) -> None:
    plan = routed(seed)
    count = random.Random(seed).randint(1, 40)
    rounds = compile_evaluation(plan, count)
    whole = {worker: tuple(s for one in own for s in one) for worker, own in rounds.items()}
    dry_run(whole, plan)
    assert computed(whole, plan, Forward) == {
        (m, layer): 1 for m in range(count) for layer in range(plan.layer_count)
    }


def test_routes_that_share_nobody_keep_their_closed_forms() -> None:
    plan = plan_of_cuts(([2, 2], 4), ([1, 3], 3))
    assert listed_routes(plan) == ()
    assert planned(plan) is None


def test_a_plan_is_list_scheduled_once() -> None:
    """Whoever estimates, proves or compiles it has the same schedule."""
    plan = routed(1)
    other = replace(plan, generation=Generation(7), schedule="zb-h1")
    assert plan.schedule != other.schedule
    assert planned(plan) is planned(other) is not None


def test_a_plan_that_needs_a_listing_and_lacks_it_is_refused() -> None:
    plan = random_routes(
        random.Random(3), layers=4, names=["a", "b", "c"], microbatches=9, shared=False
    )
    assert listed_routes(plan)
    with pytest.raises(ValueError, match="the plan lacks their costs"):
        compile_programs(plan, tied=False)


def test_a_message_that_is_missing_is_found() -> None:
    plan = routed(1)
    programs = dict(compile_programs(plan, tied=False))
    worker = next(w for w, p in programs.items() if any(isinstance(s, Message) for s in p))
    first = next(step for step in programs[worker] if isinstance(step, Message))
    programs[worker] = tuple(step for step in programs[worker] if step is not first)
    with pytest.raises(ProgramDeadlock):
        dry_run(programs, plan)
