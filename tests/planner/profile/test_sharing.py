"""Layers on several workers of a node: which numbers are offered, and what they need."""

import random
from dataclasses import replace

import pytest

from oobleck.planner.cost.estimate import worker_peak_bytes
from oobleck.planner.cost.stagecost import stage_cost
from oobleck.planner.cost.stagetable import StageTable
from oobleck.planner.profile.profile import Links, Profile
from oobleck.planner.profile.sharing import exchange_bytes, sharing_sizes, with_exchanges
from oobleck.planner.search.choose import with_residents
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of, random_profile

LINKS = Links(intra_node_bytes_per_s=1000.0, inter_node_bytes_per_s=1.0, latency_s=0.5)


def sharing(rng: random.Random, layers: int) -> Profile:
    profile = random_profile(rng, layers=layers, gpus_per_node=3, tight=True)
    changed = (
        replace(
            layer,
            exchange_bytes=rng.randint(0, 3),
            working_bytes=rng.randint(0, 2),
            mapped_bytes=rng.randint(0, 2),
        )
        for layer in profile.layers
    )
    return replace(profile, layers=tuple(changed))


def test_no_worker_gets_more_rows_than_its_share() -> None:
    assert sharing_sizes(6, 4) == (1, 2, 3)
    assert sharing_sizes(1, 8) == (1,)
    assert sharing_sizes(8, 1) == (1,)


def test_a_step_gathers_weights_and_sums_gradients_once() -> None:
    layer = profile_of([1.0], gpus=(1, 2, 4), state=4000).layers[0]
    timed = replace(layer, update_s={1: 4.0, 2: 2.0, 4: 1.0})
    shared = with_exchanges(timed, LINKS, 1000)
    # 1000 bytes of parameters: d - 1 pieces of a d-th, each with its latency, two times.
    assert shared.update_s == {1: 4.0, 2: 2.0 + 2 * (0.5 + 0.5), 4: 1.0 + 2 * 3 * (0.5 + 0.25)}
    assert shared.exchange_bytes == 3000
    assert (shared.forward_s, shared.backward_s) == (layer.forward_s, layer.backward_s)
    alone = profile_of([1.0]).layers[0]
    assert with_exchanges(alone, LINKS, 1000) == alone
    # Weights that are computed with in half the bytes; gradients are summed as they are trained.
    narrow = with_exchanges(timed, LINKS, 500)
    assert narrow.update_s == {1: 4.0, 2: 2.0 + 0.75 + 1.0, 4: 1.0 + 3 * (0.625 + 0.75)}
    assert narrow.exchange_bytes == 2500
    assert exchange_bytes([narrow, narrow], 2, resident=False) == 2500
    assert exchange_bytes([narrow, narrow], 2, resident=True) == 2 * 1500 + 1000


@pytest.mark.parametrize("seed", range(5))
def test_the_table_of_stages_has_the_room_that_the_costs_allow(seed: int) -> None:
    profile = sharing(random.Random(seed), 7)
    table = StageTable(profile)
    for k, gpus in enumerate(table.choices):
        for first in range(7):
            for stop in range(first + 1, 8):
                room = int(table.room[k, first, stop])
                for kept in (1, 2, 5):
                    allowed = all(gpus in la.forward_s for la in profile.layers[first:stop])
                    if allowed:
                        cost = stage_cost(profile, first, stop - 1, gpus)
                        needed = cost.worker_bytes(kept, replicas=2)
                        allowed = needed <= profile.gpu_memory_bytes
                    assert allowed == (room >= kept), (first, stop, gpus, kept, room)


def test_gathered_layers_are_kept_where_there_is_room() -> None:
    base = profile_of([1.0] * 3, gpus=(1, 2), gpus_per_node=2, state=4000, activation=100)
    layers = tuple(replace(layer, exchange_bytes=3000) for layer in base.layers)
    plan = plan_of_cuts(([(1, 2), (2, 2)], 4), ([(3, 1)], 2))
    # 2 micro-batches in flight: (4000 + 200) / 2 + 2 * 1000 + 1000; one: (8000 + 200) / 2 + 5000.
    for memory, expected in (
        (9100, [True, True, False]),
        (9099, [True, False, False]),
        (5100, [True, False, False]),
        (5099, [False, False, False]),
    ):
        profile = replace(base, layers=layers, gpu_memory_bytes=memory)
        settled = with_residents(plan, profile)
        found = [stage.resident for pipeline in settled.pipelines for stage in pipeline.stages]
        assert found == expected
        peaks = worker_peak_bytes(settled, profile)
        assert peaks[worker(0, 1)] == 5100
        assert peaks[worker(1)] == (9100 if expected[1] else 7100)
        assert peaks[worker(2)] == 12_000 + 300
        assert with_residents(settled, replace(profile, gpu_memory_bytes=1)) == plan
