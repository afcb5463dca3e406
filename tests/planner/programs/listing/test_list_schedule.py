"""List scheduling: known figures, and properties of random routes against a naive replay."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.instructions import Backward, BackwardInput, BackwardWeight, Compute, Forward
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, HopTicks, Route
from oobleck.planner.programs.listing.passes import Bank, Visits, visits_of
from oobleck.planner.programs.listing.schedule import (
    ListSchedule,
    least_makespan,
    list_schedule,
    listed_routes,
)
from oobleck.planner.recovery.reroute import reroute
from support.routes import (
    equal_pipelines,
    least_room,
    random_plan,
    random_ticks,
)

#: The stages of the papers: forward and both parts of the backward take a slot each.
SLOT = HopTicks(
    forward=1, backward_input=1, backward_weight=1, message=0, kept_bytes=1, deferred_bytes=1
)


def slots(hop: Hop) -> HopTicks:
    return SLOT


def lost_one(pipelines: int, stages: int, microbatches: int, stage: int) -> Plan:
    """The last pipeline has lost the worker of that stage."""
    plan = equal_pipelines(pipelines, stages, microbatches)
    gone = plan.pipelines[-1].stages[stage].workers
    return reroute(plan, gone, generation=Generation(2))


def slots_of(plan: Plan, kept: int, *, split: bool = True) -> int:
    room = dict.fromkeys(plan.workers, kept)
    return list_schedule(plan, slots, room, split=split).makespan


def all_visits(
    plan: Plan, ticks: Callable[[Hop], HopTicks], room: Mapping[WorkerId, int], split: bool
) -> Visits:
    return visits_of(plan, ticks, room, split=split, routes=tuple(range(len(plan.routes))))


# ---- known figures


@pytest.mark.parametrize(("stage", "least"), [(0, 30), (1, 29), (2, 29), (3, 30)])
def test_the_example_of_recycle_takes_what_an_exact_solver_found(stage: int, least: int) -> None:
    """3 pipelines of 4 stages, 6 micro-batches each; every worker has the memory that 1F1B needs
    on the first stage. No loss takes 27 under 1F1B."""
    plan = lost_one(3, 4, 6, stage)
    assert slots_of(plan, 4) == least
    assert least_makespan(all_visits(plan, slots, dict.fromkeys(plan.workers, 4), True)) == least


@pytest.mark.parametrize(
    ("pipelines", "stages", "microbatches", "slots"),
    [
        (3, 4, 4, 19),
        (3, 4, 6, 28),
        (3, 4, 8, 37),
        (3, 4, 32, 145),
        (2, 4, 8, 49),
        (8, 4, 4, 16),
        (16, 8, 16, 56),
    ],
)
def test_with_twice_that_memory_little_but_work_is_left(
    pipelines: int, stages: int, microbatches: int, slots: int
) -> None:
    assert slots_of(lost_one(pipelines, stages, microbatches, 1), 2 * stages) == slots


def test_whole_backwards_take_longer() -> None:
    assert slots_of(lost_one(3, 4, 6, 0), 4, split=False) == 36


def test_a_pipeline_alone_is_as_fast_as_its_closed_forms() -> None:
    one = equal_pipelines(1, 4, 8)
    assert slots_of(one, 4, split=False) == 33  # (M + S - 1) * 3 of 1F1B
    assert slots_of(one, 4) <= 27  # ZB-H1


# ---- properties


def order_checked(plan: Plan, schedule: ListSchedule, split: bool) -> None:
    """Each (layer, micro-batch) once, in the right kinds, in step on the workers of a hop."""
    wanted: dict[WorkerId, Counter[Compute]] = defaultdict(Counter)
    for route, share in zip(plan.routes, plan.shares, strict=True):
        for microbatch in share:
            for number, hop in enumerate(route.hops):
                two = split and number > 0
                for kind in (
                    (Forward, BackwardInput, BackwardWeight) if two else (Forward, Backward)
                ):
                    compute = kind(
                        microbatch=microbatch,
                        first_layer=hop.first_layer,
                        last_layer=hop.last_layer,
                    )
                    for worker in hop.workers:
                        wanted[worker][compute] += 1
    found = {worker: Counter(order) for worker, order in schedule.orders.items()}
    assert found == wanted


def replayed(
    plan: Plan, schedule: ListSchedule, ticks: Callable[[Hop], HopTicks]
) -> dict[Compute, tuple[int, int]]:
    """When all begins and ends if workers keep the order and wait for nothing but messages and
    the others of the hop: the dumb way, over and over until nothing changes."""
    route_of = {m: r for r, share in zip(plan.routes, plan.shares, strict=True) for m in share}
    times: dict[Compute, tuple[int, int]] = {}
    changed = True
    while changed:
        changed = False
        for order in schedule.orders.values():
            free = 0
            for step in order:
                route = route_of[step.microbatch]
                begin = max(free, arrived(step, route, times, ticks))
                begin = max(begin, times.get(step, (0, 0))[0])
                end = begin + taken(step, route, ticks)
                changed |= times.get(step) != (begin, end)
                times[step] = begin, end
                free = end
    return times


def hop_at(route: Route, step: Compute) -> int:
    return next(n for n, hop in enumerate(route.hops) if hop.first_layer == step.first_layer)


def taken(step: Compute, route: Route, ticks: Callable[[Hop], HopTicks]) -> int:
    own = ticks(route.hops[hop_at(route, step)])
    return {
        Forward: own.forward,
        Backward: own.backward_input + own.backward_weight,
        BackwardInput: own.backward_input,
        BackwardWeight: own.backward_weight,
    }[type(step)]


def arrived(
    step: Compute,
    route: Route,
    times: Mapping[Compute, tuple[int, int]],
    ticks: Callable[[Hop], HopTicks],
) -> int:
    """When what it needs is there, as far as that is known."""
    number = hop_at(route, step)

    def end(kind: type[Compute], other: int) -> int:
        hop = route.hops[other]
        key = kind(
            microbatch=step.microbatch, first_layer=hop.first_layer, last_layer=hop.last_layer
        )
        return times.get(key, (0, 0))[1]

    if isinstance(step, Forward):
        return end(Forward, number - 1) + ticks(route.hops[number - 1]).message if number else 0
    if isinstance(step, BackwardWeight):
        return end(BackwardInput, number)
    if number == len(route.hops) - 1:
        return end(Forward, number)
    message = ticks(route.hops[number]).message
    return max(end(kind, number + 1) for kind in (Backward, BackwardInput)) + message


def peaks(
    plan: Plan, schedule: ListSchedule, ticks: Callable[[Hop], HopTicks]
) -> dict[WorkerId, int]:
    """The most bytes by the order of compute alone."""
    route_of = {m: r for r, share in zip(plan.routes, plan.shares, strict=True) for m in share}
    found = {}
    for worker, order in schedule.orders.items():
        kept = most = 0
        for step in order:
            route = route_of[step.microbatch]
            own = ticks(route.hops[hop_at(route, step)])
            kept += {
                Forward: own.kept_bytes,
                Backward: -own.kept_bytes,
                BackwardInput: own.deferred_bytes - own.kept_bytes,
                BackwardWeight: -own.deferred_bytes,
            }[type(step)]
            most = max(most, kept)
        assert kept == 0
        found[worker] = most
    return found


@pytest.mark.parametrize("seed", range(120))
def test_random_routes(seed: int) -> None:
    rng = random.Random(seed)
    plan, ticks, split = random_plan(rng), random_ticks(rng), rng.random() < 0.7
    tight = rng.random() < 0.5
    room = {
        worker: least if tight else least + rng.randint(0, 30)
        for worker, least in least_room(plan, ticks).items()
    }
    visits = all_visits(plan, ticks, room, split)
    schedule = list_schedule(plan, ticks, room, split=split, budget_visits=300)
    assert schedule.makespan >= least_makespan(visits)
    order_checked(plan, schedule, split)
    times = replayed(plan, schedule, ticks)
    for worker, order in schedule.orders.items():
        begins, ends = schedule.begins[worker], schedule.ends[worker]
        for step, begin, end in zip(order, begins, ends, strict=True):
            # Where routes follow no order, a forward may also have waited for others' memory.
            early, done = times[step]
            assert early == begin or (early < begin and not visits.ordered)
            assert end - begin == done - early
        assert all(end <= begin for end, begin in zip(ends, begins[1:], strict=False))
    last = max(end for ends in schedule.ends.values() for end in ends)
    assert schedule.makespan == last
    assert schedule.peak_bytes == peaks(plan, schedule, ticks)
    assert all(most <= room[worker] for worker, most in schedule.peak_bytes.items())
    assert list_schedule(plan, ticks, room, split=split, budget_visits=300) == schedule


def w(number: int) -> WorkerId:
    return WorkerId(NodeName(f"n{number}"), 0)


def walk(*workers: int, microbatches: int) -> Route:
    hops = tuple(
        Hop(first_layer=layer, last_layer=layer, workers=(w(number),))
        for layer, number in enumerate(workers)
    )
    return Route(hops=hops, microbatches=microbatches)


def plan_of_walks(*routes: Route) -> Plan:
    workers = sorted({hop.workers for route in routes for hop in route.hops})
    last = len(routes[0].hops) - 1
    holds = tuple(Hold(first_layer=0, last_layer=last, workers=own) for own in workers)
    return Plan(generation=Generation(1), holds=holds, routes=routes)


def test_routes_in_opposite_directions_do_not_hold_each_other_up() -> None:
    """If both began where they fit, each worker would keep what the other's micro-batch needs."""
    plan = plan_of_walks(walk(0, 1, microbatches=3), walk(1, 0, microbatches=3))
    assert slots_of(plan, 1) <= 6 * 6  # as if one went after the other


def test_circles_of_routes_use_all_the_memory_that_is_safe() -> None:
    plan = plan_of_walks(
        walk(0, 1, 2, microbatches=4), walk(1, 2, 0, microbatches=4), walk(2, 0, 1, microbatches=4)
    )
    assert slots_of(plan, 4) < slots_of(plan, 2) < slots_of(plan, 1)


def test_what_is_safe_is_not_asked_for_each_micro_batch_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four times as many micro-batches in little room: some four times as many questions."""
    asked = 0
    allows = Bank._allows

    def counted(bank: Bank, hop: int, free: list[int]) -> bool:
        nonlocal asked
        asked += 1
        return allows(bank, hop, free)

    monkeypatch.setattr(Bank, "_allows", counted)
    questions = []
    for microbatches in (25, 100):
        asked = 0
        plan = plan_of_walks(walk(0, 1, 2, 1, 3, 4, 5, 6, microbatches=microbatches))
        list_schedule(plan, slots, dict.fromkeys(plan.workers, 4), split=True, budget_visits=1)
        questions.append(asked)
    assert questions[0] < questions[1] < 5 * questions[0]


def test_a_micro_batch_that_visits_a_worker_twice_needs_room_for_both() -> None:
    plan = plan_of_walks(walk(0, 1, 0, microbatches=2))
    assert slots_of(plan, 2) > 0
    with pytest.raises(PlanInfeasible, match=r"n0/0 has room for 1 bytes .* needs 2: take smaller"):
        slots_of(plan, 1)


def test_only_routes_that_share_workers_are_listed() -> None:
    assert listed_routes(equal_pipelines(4, 3, 5)) == ()
    assert listed_routes(plan_of_walks(walk(0, 1, 0, microbatches=2))) == (0,)
    pairs = walk(0, 1, microbatches=1), walk(2, 3, microbatches=1), walk(4, 1, microbatches=1)
    assert listed_routes(plan_of_walks(*pairs)) == (0, 2)


def test_routes_that_are_not_asked_for_stay_out() -> None:
    plan = equal_pipelines(2, 2, 3)
    room = dict.fromkeys(plan.workers, 2)
    found = list_schedule(plan, slots, room, split=True, routes=(1,))
    assert set(found.orders) == {worker for hop in plan.routes[1].hops for worker in hop.workers}
    assert {step.microbatch for order in found.orders.values() for step in order} == {3, 4, 5}


def test_no_routes_take_no_time() -> None:
    found = list_schedule(equal_pipelines(2, 2, 3), slots, {}, split=True, routes=())
    assert (found.orders, found.makespan) == ({}, 0)


def test_a_greater_budget_is_never_worse() -> None:
    plan = lost_one(3, 4, 6, 2)
    room = dict.fromkeys(plan.workers, 4)
    spans = [
        list_schedule(plan, slots, room, split=True, budget_visits=budget).makespan
        for budget in (0, 100, 1000, 16_384)
    ]
    assert spans == sorted(spans, reverse=True)
    assert spans[0] == 30
    assert spans[-1] == 29
