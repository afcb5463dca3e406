"""Where a worker gets the layers that it lacks."""

import random
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold, LayerLost, Shard, ShardTable, require_holders
from oobleck.planner.programs.transfer import Transfer, plan_transfers

LAYERS = 4


def replicas(*workers: WorkerId) -> Plan:
    """Every worker holds the whole model."""
    return Plan.of_pipelines(
        [
            Pipeline(
                nodes=(NodeName(f"{w.node}.{w.slot}"),),
                stages=(Hold(first_layer=0, last_layer=LAYERS - 1, workers=(w,)),),
                microbatches=1,
            )
            for w in workers
        ],
        generation=Generation(2),
    )


def worker(node: int, slot: int = 0) -> WorkerId:
    return WorkerId(NodeName(f"n{node}"), slot)


EVERYTHING = frozenset(range(LAYERS))


def test_nothing_moves_when_all_hold_what_they_need() -> None:
    held = {worker(0): EVERYTHING, worker(1): EVERYTHING}
    assert plan_transfers(held, replicas(worker(0), worker(1)), state_bytes=[1] * LAYERS) == ()


def test_the_load_is_spread_over_the_holders() -> None:
    held = {worker(0): EVERYTHING, worker(1): EVERYTHING, worker(2): frozenset[int]()}
    transfers = plan_transfers(
        held, replicas(worker(0), worker(1), worker(2)), state_bytes=[5, 3, 3, 5]
    )
    sent: Counter[WorkerId] = Counter()
    for transfer in transfers:
        sent[transfer.source] += [5, 3, 3, 5][transfer.layer]
    assert sent == {worker(0): 8, worker(1): 8}


def test_a_holder_on_the_same_node_is_preferred() -> None:
    held = {worker(0): EVERYTHING, worker(1, 1): EVERYTHING}
    transfers = plan_transfers(
        held, replicas(worker(0), worker(1, 0), worker(1, 1)), state_bytes=[1] * LAYERS
    )
    assert {transfer.source for transfer in transfers} == {worker(1, 1)}


def test_layers_without_a_holder_are_named() -> None:
    held = {worker(0): frozenset({0, 2})}
    with pytest.raises(LayerLost, match="layer 1, 3") as caught:
        plan_transfers(held, replicas(worker(0)), state_bytes=[1] * LAYERS)
    assert caught.value.layers == (1, 3)
    assert isinstance(caught.value, PlanInfeasible)


@given(
    tables=st.lists(st.frozensets(st.sampled_from(sorted(EVERYTHING))), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 100), min_size=LAYERS, max_size=LAYERS),
)
def test_afterwards_everyone_holds_its_layers(
    tables: list[frozenset[int]], sizes: list[int]
) -> None:
    held = {worker(number): table for number, table in enumerate(tables)}
    plan = replicas(*held)
    if frozenset().union(*tables) != EVERYTHING:
        with pytest.raises(LayerLost):
            plan_transfers(held, plan, state_bytes=sizes)
        return
    transfers = plan_transfers(held, plan, state_bytes=sizes)
    assert transfers == plan_transfers(dict(reversed(held.items())), plan, state_bytes=sizes), (
        "the order of the table must not matter"
    )
    for transfer in transfers:
        assert transfer.layer in held[transfer.source]
        assert transfer.layer not in held[transfer.destination]
    got = Counter((t.destination, t.layer) for t in transfers)
    assert all(count == 1 for count in got.values())
    for w, layers in held.items():
        assert layers | {layer for d, layer in got if d == w} == EVERYTHING


def test_transfers_sort_by_layer() -> None:
    first = Transfer(layer=0, source=worker(5), destination=worker(1))
    assert first < Transfer(layer=1, source=worker(0), destination=worker(0))


# ---- stages of several workers


def cut(first_node: int, *stages: tuple[int, int]) -> Pipeline:
    """A pipeline with a node per stage; each stage has so many layers on so many workers."""
    made, layer = [], 0
    for number, (layers, gpus) in enumerate(stages):
        node = NodeName(f"n{first_node + number}")
        made.append(
            Hold(
                first_layer=layer,
                last_layer=layer + layers - 1,
                workers=tuple(WorkerId(node, slot) for slot in range(gpus)),
            )
        )
        layer += layers
    return Pipeline(
        nodes=tuple(NodeName(f"n{first_node + n}") for n in range(len(stages))),
        stages=tuple(made),
        microbatches=1,
    )


def plan_of(pipeline: Pipeline) -> Plan:
    return Plan.of_pipelines([pipeline], generation=Generation(1))


def span(held: ShardTable, of: WorkerId, layer: int) -> set[Fraction]:
    """The 120ths of the layer that the worker holds, by their beginnings."""
    return {
        Fraction(n, 120)
        for n in range(120)
        for shard in held.get(of, ())
        if shard.layer == layer and shard.start <= Fraction(n, 120) < shard.stop
    }


def check_pieces(held: ShardTable, plan: Plan, transfers: tuple[Transfer, ...]) -> None:
    """Every piece comes from one who holds it, and afterwards everyone has what it needs."""
    got = {
        (w, layer): span(held, w, layer) for w in plan.workers for layer in range(plan.layer_count)
    }
    for transfer in transfers:
        piece = {
            Fraction(n, 120)
            for n in range(120)
            if transfer.start <= Fraction(n, 120) < transfer.stop
        }
        assert piece <= span(held, transfer.source, transfer.layer)
        have = got[transfer.destination, transfer.layer]
        assert not piece & have, "nothing is sent twice, or to one who has it"
        have |= piece
    for w, shards in plan.shards.items():
        for shard in shards:
            assert span({w: frozenset({shard})}, w, shard.layer) <= got[w, shard.layer]


@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 3), (3, 2), (4, 3), (5, 4), (2, 2)])
def test_pieces_travel_when_a_stage_is_grouped_anew(before: int, now: int) -> None:
    """Workers of one node: n0's stage of `before` workers becomes one of `now`."""
    held = plan_of(cut(0, (LAYERS, before))).shards
    plan = plan_of(cut(0, (LAYERS, now)))
    transfers = plan_transfers(held, plan, state_bytes=[600] * LAYERS)
    check_pieces(held, plan, transfers)
    moved = sum((t.stop - t.start for t in transfers), Fraction(0))
    kept = sum(len(span(held, w, 0) & span(plan.shards, w, 0)) for w in plan.workers) * Fraction(
        1, 120
    )
    assert moved == LAYERS * (1 - kept)


def test_two_workers_to_one_fetches_the_other_half() -> None:
    held = plan_of(cut(0, (LAYERS, 2))).shards
    transfers = plan_transfers(held, plan_of(cut(0, (LAYERS, 1))), state_bytes=[8] * LAYERS)
    assert transfers == tuple(
        Transfer(
            layer=layer,
            source=worker(0, 1),
            destination=worker(0, 0),
            start=Fraction(1, 2),
            stop=Fraction(1),
        )
        for layer in range(LAYERS)
    )


@pytest.mark.parametrize("seed", range(40))
def test_random_groupings_lose_no_source(seed: int) -> None:
    """Two replicas, cut differently; any one node is lost; the rest is grouped anew."""
    rng = random.Random(seed)

    def some(first_node: int) -> Pipeline:
        split = rng.randint(1, LAYERS - 1)
        return cut(first_node, (split, rng.randint(1, 5)), (LAYERS - split, rng.randint(1, 5)))

    held = {**plan_of(some(0)).shards, **plan_of(some(2)).shards}
    gone = NodeName(f"n{rng.randrange(4)}")
    held = {w: shards for w, shards in held.items() if w.node != gone}
    plan = plan_of(some(rng.choice([0, 1, 2])))
    require_holders(held, LAYERS)
    sizes = [rng.randint(0, 1000) for _ in range(LAYERS)]
    transfers = plan_transfers(held, plan, state_bytes=sizes)
    check_pieces(held, plan, transfers)
    assert transfers == plan_transfers(dict(reversed(held.items())), plan, state_bytes=sizes)


def test_half_a_layer_is_not_the_layer() -> None:
    held = {worker(0): frozenset({Shard(0), Shard(1, 1, 2), Shard(2, 0, 3), Shard(2, 1, 2)})}
    for check in (
        lambda: require_holders(held, 3),
        lambda: plan_transfers(held, plan_of(cut(5, (3, 1))), state_bytes=[1] * 3),
    ):
        with pytest.raises(LayerLost) as caught:
            check()
        assert caught.value.layers == (1, 2)
    both = {**held, worker(1): frozenset({Shard(1, 0, 2), Shard(2, 1, 3)})}
    require_holders(both, 3)
    check_pieces(
        both,
        plan_of(cut(5, (3, 1))),
        plan_transfers(both, plan_of(cut(5, (3, 1))), state_bytes=[6] * 3),
    )


@pytest.mark.parametrize(("part", "parts"), [(1, 1), (-1, 2)])
def test_parts_that_are_none_are_refused(part: int, parts: int) -> None:
    with pytest.raises(ValueError, match="parts count from 0"):
        Shard(0, part, parts)
    with pytest.raises(ValueError, match="is not one"):
        Transfer(
            layer=0,
            source=worker(0),
            destination=worker(1),
            start=Fraction(1, 2),
            stop=Fraction(1, 2),
        )
