"""Which node takes which place: the fewest bytes move, by trying every order."""

import itertools
import random

import pytest

from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan, place
from oobleck.planner.recovery.placement import Seats, Slot, keep_fitting, put_in_place, seat
from oobleck.planner.search.templates import generate_templates
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
