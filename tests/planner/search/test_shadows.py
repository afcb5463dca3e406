"""Which nodes hold further layers: memory is kept to, and as many nodes can be lost as can be."""

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.core.routes import Hold, Shard
from oobleck.planner.cost.estimate import (
    estimate_step,
    peak_bytes,
    shadow_bytes,
    worker_peak_bytes,
)
from oobleck.planner.cost.listed import estimate_listed, listed_bytes
from oobleck.planner.programs.listing.schedule import planned
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.choose import settled
from oobleck.planner.search.firstplan import make_first_plan, node_specification
from oobleck.planner.search.shadows import with_shadows
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of
from support.random_rerouted import random_rerouted


def summed(profile: Profile, sum_bytes: int) -> Profile:
    layers = tuple(replace(layer, sum_bytes=sum_bytes) for layer in profile.layers)
    return replace(profile, layers=layers)


def added(before: Plan, after: Plan) -> tuple[Hold, ...]:
    assert after.holds[: len(before.holds)] == before.holds
    return after.holds[len(before.holds) :]


def text(holds: tuple[Hold, ...]) -> list[str]:
    return [f"{hold.workers[0]}: {hold.first_layer}-{hold.last_layer}" for hold in holds]


def test_equal_stages_are_held_by_the_neighbour_each_as_one() -> None:
    plan = plan_of_cuts(([2, 2, 2], 4))
    found = with_shadows(plan, profile_of([1.0] * 6), fault_tolerance=1)
    assert text(added(plan, found)) == ["n0/0: 4-5", "n1/0: 0-1", "n2/0: 2-3"]
    assert (can_lose(plan), can_lose(found)) == (0, 1)
    assert found.routes == plan.routes
    assert found.shadows == {worker(0): (4, 5), worker(1): (0, 1), worker(2): (2, 3)}


def test_uneven_stages_are_spread_evenly() -> None:
    plan = plan_of_cuts(([2, 6, 4], 4))
    found = with_shadows(plan, profile_of([1.0] * 12), fault_tolerance=1)
    assert {len(layers) for layers in found.shadows.values()} == {4}


def test_layers_are_spread_over_the_workers_of_a_node() -> None:
    plan = plan_of_cuts(([(4, 2), (4, 2)], 4))
    found = with_shadows(plan, profile_of([1.0] * 8, gpus=(1, 2)), fault_tolerance=1)
    assert {len(layers) for layers in found.shadows.values()} == {2}
    assert len(found.shadows) == 4


def test_two_copies_are_on_two_further_nodes() -> None:
    plan = plan_of_cuts(([2, 2, 2], 4))
    found = with_shadows(plan, profile_of([1.0] * 6), fault_tolerance=2)
    assert can_lose(found) == 2
    assert can_lose(with_shadows(plan, profile_of([1.0] * 6), fault_tolerance=7)) == 2


def test_nothing_to_do_is_the_same_object() -> None:
    profile = profile_of([1.0] * 4)
    safe = plan_of_cuts(([2, 2], 4), ([2, 2], 4))
    assert with_shadows(safe, profile, fault_tolerance=1) is safe
    alone = plan_of_cuts(([4], 4))
    assert with_shadows(alone, profile, fault_tolerance=1) is alone
    # Nobody has room for the last layer: the others are not held in vain.
    full = profile_of([1.0] * 4, state=[10, 10, 10, 1000], memory=1015 + 10)
    short = plan_of_cuts(([3, 1], 1))
    assert with_shadows(short, full, fault_tolerance=1) is short
    done = with_shadows(short, profile, fault_tolerance=1)
    assert with_shadows(done, profile, fault_tolerance=1) is done


def test_a_thousand_nodes_take_no_time() -> None:
    """Processor time, tenfold what it takes."""
    profile = profile_of([1.0] * 1000)
    for plan in (plan_of_cuts(*[([250] * 4, 4)] * 250), plan_of_cuts(([1] * 1000, 4))):
        begun = time.process_time()
        found = with_shadows(plan, profile, fault_tolerance=1)
        assert time.process_time() - begun < 2.0
        assert can_lose(found) >= 1


def test_what_is_held_stays_and_nothing_else_without_moving() -> None:
    profile = profile_of([1.0] * 6)
    plan = plan_of_cuts(([2, 2, 2], 4))
    held = {
        worker(0): frozenset({Shard(2), Shard(0)}),
        worker(2): frozenset({Shard(0), Shard(1, 0, 2)}),  # of layer 1 only half
    }
    found = with_shadows(plan, profile, fault_tolerance=1, held=held)
    assert can_lose(found) == 1
    assert 2 in found.shadows[worker(0)]
    assert 0 in found.shadows[worker(2)]
    only = with_shadows(plan, profile, fault_tolerance=1, held=held, moving=False)
    assert only.shadows == {worker(0): (2,), worker(2): (0,)}
    assert with_shadows(plan, profile, fault_tolerance=1, moving=False) is plan
    # Behind it, the rest comes to what is there.
    rest = with_shadows(only, profile, fault_tolerance=1, held=only.shards)
    assert rest.shards == found.shards


# ---- against brute force


def reachable(plan: Plan, profile: Profile, peaks: Mapping[WorkerId, int], target: int) -> bool:
    """Whether some way to give whole layers to workers beside these bytes lets so many nodes be
    lost."""
    room = {w: profile.gpu_memory_bytes - peak for w, peak in peaks.items()}
    if min(room.values()) < 0:
        return False
    sizes = [la.state_bytes + la.sum_bytes for la in profile.layers]
    ways = []
    for nodes in plan.layer_nodes():
        others = [w for w in plan.workers if w.node not in nodes]
        ways.append(
            [
                chosen
                for chosen in combinations(others, max(0, target + 1 - len(nodes)))
                if len({w.node for w in chosen}) == len(chosen)
            ]
        )
    for way in product(*ways):
        load: Counter[WorkerId] = Counter()
        for layer, chosen in enumerate(way):
            for each in chosen:
                load[each] += sizes[layer]
        if all(load[w] <= room[w] for w in load):
            return True
    return False


def most_lost(plan: Plan, profile: Profile, peaks: Mapping[WorkerId, int], wanted: int) -> int:
    now = can_lose(plan)
    targets = range(now + 1, wanted + 1)
    return max((t for t in targets if reachable(plan, profile, peaks, t)), default=now)


def random_case(rng: random.Random) -> tuple[Plan, Profile]:
    layers = rng.randint(2, 5)
    pipelines = []
    for _ in range(rng.choice((1, 1, 2))):
        borders = sorted(rng.sample(range(1, layers), rng.randint(0, min(2, layers - 1))))
        ends = [0, *borders, layers]
        cuts = [(b - a, rng.choice((1, 1, 2))) for a, b in pairwise(ends)]
        pipelines.append((cuts, rng.randint(1, 3)))
    plan = plan_of_cuts(*pipelines, schedule=rng.choice(("1f1b", "gpipe")))
    profile = summed(
        profile_of(
            [1.0] * layers,
            gpus=(1, 2),
            gpus_per_node=2,
            state=[rng.randint(1, 6) for _ in range(layers)],
            activation=rng.randint(0, 2),
        ),
        rng.randint(0, 2),
    )
    peak = max(worker_peak_bytes(plan, profile, least_replicas=2).values())
    return plan, replace(profile, gpu_memory_bytes=peak + rng.randint(0, 12))


@pytest.mark.parametrize("seed", range(150))
def test_as_many_nodes_can_be_lost_as_some_assignment_allows(seed: int) -> None:
    rng = random.Random(seed)
    plan, profile = random_case(rng)
    wanted = rng.choice((1, 1, 2))
    held = {
        w: frozenset(Shard(la) for la in range(plan.layer_count) if rng.random() < 0.3)
        for w in plan.workers
    }
    for table in (None, held):
        found = with_shadows(plan, profile, fault_tolerance=wanted, held=table)
        assert found == with_shadows(plan, profile, fault_tolerance=wanted, held=table)
        peaks = worker_peak_bytes(plan, profile, least_replicas=2)
        best = most_lost(plan, profile, peaks, wanted)
        assert can_lose(found) == best
        if best == can_lose(plan):
            assert found is plan
        for number, hold in enumerate(found.holds[len(plan.holds) :], len(plan.holds)):
            for layer in hold.layers:
                others = (h for k, h in enumerate(found.holds) if k != number)
                nodes = {h.workers[0].node for h in others if layer in h.layers}
                assert hold.workers[0].node not in nodes
        assert peak_bytes(found, profile) <= profile.gpu_memory_bytes
        assert peak_bytes(settled(found, profile), profile) <= profile.gpu_memory_bytes


@pytest.mark.parametrize("seed", range(60))
def test_beside_a_list_scheduled_order_as_many_as_fit_and_it_stays(seed: int) -> None:
    rng = random.Random(seed)
    _, plan, profile = next(random_rerouted(rng, layers=5, stages=3))
    wanted = rng.choice((1, 2))
    found = with_shadows(plan, profile, fault_tolerance=wanted, held=plan.shards)
    peaks = listed_bytes(plan, profile, least_replicas=2)
    assert can_lose(found) == most_lost(plan, profile, peaks, wanted)
    assert (found is plan) == (can_lose(found) == can_lose(plan))
    assert (found.routes, found.listing) == (plan.routes, plan.listing)
    assert planned(found) == planned(plan)
    needed = estimate_listed(found, profile, tied=False)
    assert needed.peak_bytes <= profile.gpu_memory_bytes
    given = shadow_bytes(found, profile)
    for w, had in shadow_bytes(plan, profile).items():
        assert given[w] >= had, "nothing is taken away"
    # With less for micro-batches there is room for as many at least.
    most = with_shadows(plan, profile, fault_tolerance=wanted, held=plan.shards, kept=0.25)
    assert can_lose(most) >= can_lose(found)


# ---- what plans with shadows take, and first plans


def test_shadows_count_in_memory_and_in_the_sums_of_a_step() -> None:
    profile = summed(profile_of([1.0] * 4, state=400, activation=10), 7)
    plan = plan_of_cuts(([2, 2], 4))
    found = with_shadows(plan, profile, fault_tolerance=1)
    assert shadow_bytes(found, profile) == {worker(0): 814, worker(1): 814}
    before, after = estimate_step(plan, profile), estimate_step(found, profile)
    assert before.kinds[0].peak_bytes == (800 + 2 * 20, 800 + 20)
    assert after.kinds[0].peak_bytes == (2 * 814 + 2 * 20, 2 * 814 + 20)
    assert worker_peak_bytes(found, profile) == {worker(0): 1668, worker(1): 1648}
    # Both workers hold all: one sum of 400 bytes.
    assert after.step_s - before.step_s == pytest.approx(2 * (1e-5 + 200 / 1e9))


def first_plan(nodes: int, profile: Profile, fault_tolerance: int) -> Plan:
    return make_first_plan(
        Catalogue(tied=False),
        node_specification(profile, nodes=nodes, fault_tolerance=fault_tolerance, shadows=True),
        [NodeName(f"n{number}") for number in range(nodes)],
        profile=profile,
        microbatches=8,
        min_pipelines=fault_tolerance + 1,
        generation=Generation(1),
        shadows=True,
    ).plan


def test_a_job_begins_on_fewer_nodes_where_shadows_make_up_for_pipelines() -> None:
    """n0 is 2: 1.5 of what a node holds, with its activations."""
    profile = profile_of([1.0] * 6, state=100, activation=10, memory=100 * 4 + 120)
    plan = first_plan(3, profile, 1)
    assert (len(plan.pipelines), can_lose(plan)) == (1, 1)
    assert peak_bytes(plan, profile) <= profile.gpu_memory_bytes
    assert first_plan(4, profile, 1).shadows == {}
    with pytest.raises(PlanInfeasible, match="as shadows; add 2 nodes or lower fault_tolerance"):
        first_plan(2, profile, 1)
