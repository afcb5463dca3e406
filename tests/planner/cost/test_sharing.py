"""Layers on several workers of a node: which numbers are offered, and what they need."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from oobleck.core.profile import Links, Profile
from oobleck.core.sharing import exchange_bytes, sharing_sizes, with_exchanges
from oobleck.planner.cost.estimate import worker_peak_bytes
from oobleck.planner.cost.stages import StageTable, stage_cost
from oobleck.planner.search.choose import with_residents
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of, random_profile

LINKS = Links(intra_node_bytes_per_s=1000.0, inter_node_bytes_per_s=1.0, latency_s=0.5)


def sharing(rng: random.Random, layers: int) -> Profile:
    profile = random_profile(rng, layers=layers, gpus_per_node=3, tight=True)
    changed = (
        replace(
            layer,
            exchange_bytes=rng.randint(0, 6),
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
    assert exchange_bytes([narrow], 2, resident=False) == 2500
    # One's weights and gradient, and the other's gradient with the others' shares of it.
    assert exchange_bytes([narrow, narrow], 2, resident=False) == 500 + 3 * 1000
    assert exchange_bytes([narrow] * 3, 2, resident=False) == 2 * 500 + 3 * 1000
    assert exchange_bytes([narrow, narrow], 2, resident=True) == 2 * 1500 + 1000


def peak_of_a_pass(sizes: list[tuple[int, int]]) -> int:
    """Of a micro-batch's forward and backward through layers of that many bytes of weights and of
    gradients, with what travels ahead and behind: event by event, as `worker/step/exchange.py` has
    it where the others' shares of a gradient are as large as the gradient."""
    there: Counter[tuple[str, int]] = Counter()
    peak = 0

    def take(what: str, layer: int, size: int) -> None:
        nonlocal peak
        there[what, layer] = size
        peak = max(peak, there.total())

    layers = range(len(sizes))
    for order in (layers, layers[::-1]):
        going: int | None = None
        for place, layer in enumerate(order):
            weights, gradient = sizes[layer]
            take("weights", layer, weights)
            for following in order[place + 1 : place + 2]:
                take("weights", following, sizes[following][0])
            if order is not layers:
                take("gradient", layer, gradient)
            del there["weights", layer]
            if order is not layers:
                if going is not None:
                    del there["gradient", going], there["shares", going]
                take("shares", layer, gradient)
                going = layer
    return peak


@pytest.mark.parametrize("seed", range(20))
def test_the_layers_beside_the_one_that_is_computed_count(seed: int) -> None:
    rng = random.Random(seed)
    base = profile_of([1.0] * rng.randint(1, 6), gpus=(1, 2)).layers
    sizes = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in base]
    layers = [
        replace(layer, parameter_bytes=gradient, exchange_bytes=weights + 2 * gradient)
        for layer, (weights, gradient) in zip(base, sizes, strict=True)
    ]
    least = max(layer.exchange_bytes for layer in layers)
    expected = max(least, peak_of_a_pass(sizes))
    assert exchange_bytes(layers, 2, resident=False) == expected
    assert exchange_bytes(layers, 1, resident=False) == 0


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
        assert peaks[worker(1)] == (9100 if expected[1] else 8100)
        assert peaks[worker(2)] == 12_000 + 300
        assert with_residents(settled, replace(profile, gpu_memory_bytes=1)) == plan
