"""Which node takes which place: the fewest bytes move, by trying every order."""

import itertools
import random
from collections.abc import Mapping
from typing import Any

import pytest

from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan, place
from oobleck.planner.recovery.placement import (
    Seats,
    Slot,
    keep_fitting,
    put_in_place,
    seat,
    spread,
)
from oobleck.planner.search.racks import over_racks, renamed
from oobleck.planner.search.templates import generate_templates
from support.plans import plan_of_cuts
from support.profiles import profile_of


def names(count: int) -> tuple[NodeName, ...]:
    return tuple(NodeName(f"n{number}") for number in range(count))


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_fewest_bytes_move_of_all_orders(seed: int, gpus: int) -> None:
    """Bytes as the transfers see them: parts of layers, half where they stay on the node."""
    rng = random.Random(seed)
    layers = rng.randint(4 * gpus, 4 * gpus + 4)
    state = [rng.randint(1, 9) * 840 for _ in range(layers)]
    profile = profile_of(
        [float(rng.randint(1, 5)) for _ in range(layers)],
        gpus=range(1, gpus + 1),
        gpus_per_node=gpus,
        state=state,
    )
    templates = generate_templates(profile, range(1, 5))
    old, new = rng.randint(2, 4), rng.randint(2, 4)
    pipeline = place(templates[old], names(old), microbatches=4)
    plan = Plan.of_pipelines([pipeline], generation=Generation(1))
    alive = frozenset(names(max(old, new))) - {NodeName("n1")}
    slots = [Slot(size=min(new, len(alive)), kept=None, origin=None)]
    seats = seat(slots, plan, alive, templates=templates, state_bytes=state)

    held = plan.shards

    def moved(order: tuple[NodeName, ...]) -> float:
        pipeline = place(templates[slots[0].size], order, microbatches=4)
        total = 0.0
        plan = Plan.of_pipelines([pipeline], generation=Generation(2))
        for worker, shards in plan.shards.items():
            for shard in shards:
                unit = state[shard.layer] / 12
                for n in range(12):
                    if not shard.start * 12 <= n < shard.stop * 12:
                        continue
                    having = [
                        w
                        for w, others in held.items()
                        if any(
                            s.layer == shard.layer and s.start * 12 <= n < s.stop * 12
                            for s in others
                        )
                    ]
                    if worker not in having:
                        total += unit / 2 if worker.node in [w.node for w in having] else unit
        return total

    orders = itertools.permutations(sorted(alive), slots[0].size)
    assert moved(seats.nodes[0]) == pytest.approx(min(map(moved, orders)))
    assert seats.moved_bytes == pytest.approx(moved(seats.nodes[0]), abs=1)
    assert seats.busiest_bytes <= seats.moved_bytes


def test_whole_pipelines_stay_and_the_schedule_with_them() -> None:
    profile = profile_of([1.0] * 6)
    templates = generate_templates(profile, range(2, 4))
    first = place(templates[3], names(3), microbatches=4)
    second = place(templates[2], (NodeName("n3"), NodeName("n4")), microbatches=4)
    plan = Plan.of_pipelines([first, second], generation=Generation(1), schedule="zb-h1")
    alive = frozenset(plan.nodes) - {NodeName("n4")}
    slots = keep_fitting([3, 1], plan, alive)
    assert [(slot.size, slot.kept) for slot in slots] == [(3, first), (1, None)]
    seats = Seats(nodes=(first.nodes, (NodeName("n3"),)), moved_bytes=0, busiest_bytes=0)
    templates = {**templates, **generate_templates(profile, range(1, 2))}
    now = put_in_place(slots, seats, (6, 2), plan, templates=templates, generation=Generation(2))
    assert now.schedule == "zb-h1"
    assert now.pipelines[0].stages == first.stages
    assert now.shares == (range(6), range(6, 8))


# ---- Racks


def in_one_rack(plan: Plan, racks: Mapping[NodeName, str]) -> int:
    """Sets of two or more holders of a layer that are all in one rack."""
    sets = [own for own in set(map(frozenset, plan.layer_nodes())) if len(own) > 1]
    return sum(len({racks[name] or name for name in own}) == 1 for own in sets)


@pytest.mark.parametrize("seed", range(12))
def test_as_few_layers_as_in_the_best_order_of_all_have_their_holders_in_one_rack(
    seed: int,
) -> None:
    rng = random.Random(seed)
    layers = rng.randint(2, 4)
    pipelines = []
    for size in ((3, 2), (2, 2, 2), (1, 2, 3), (2, 3))[seed % 4]:
        ends = sorted(rng.sample(range(1, layers), min(size, layers) - 1))
        cuts = [stop - first for first, stop in zip([0, *ends], [*ends, layers], strict=True)]
        pipelines.append((cuts, 4))
    plan = plan_of_cuts(*pipelines)
    racks = {name: rng.choice(["a", "b", ""]) for name in plan.nodes}
    orders = itertools.permutations(plan.nodes)
    best = min(
        in_one_rack(renamed(plan, dict(zip(plan.nodes, order, strict=True))), racks)
        for order in orders
    )
    found = over_racks(plan, racks, [plan.nodes])
    assert sorted(found.nodes) == sorted(plan.nodes)
    assert in_one_rack(found, racks) == best <= in_one_rack(plan, racks)


class CountedRacks(dict[NodeName, str]):
    """Racks that count how often a label is asked for."""

    asked = 0

    def get(self, name: NodeName, default: Any = None) -> Any:
        self.asked += 1
        return super().get(name, default)


@pytest.mark.parametrize("count", [1, 4])
def test_a_spread_takes_no_long_time_where_there_is_nothing_to_swap(count: int) -> None:
    plan = plan_of_cuts(*[([1] * 4, 4)] * 30)
    racks = CountedRacks({name: f"r{n % count}" for n, name in enumerate(sorted(plan.nodes))})
    assert over_racks(plan, racks, [plan.nodes]) is plan
    pairs = len(plan.nodes) ** 2
    assert racks.asked <= 3 * pairs


def test_nodes_that_hold_state_keep_their_places_where_fresh_ones_spread_over_racks() -> None:
    before, wanted = plan_of_cuts(([1, 1], 4)), plan_of_cuts(([1, 1], 4), ([1, 1], 4))
    live = [*wanted.nodes, NodeName("n4")]  # idle
    racks = dict(zip(live, "abaab", strict=True))
    found = spread(wanted, before, racks, live=live)
    first, second = found.pipelines
    assert first.nodes == ("n0", "n1")
    assert second.nodes == ("n4", "n3")
    assert spread(wanted, before, {}, live=live) is wanted
