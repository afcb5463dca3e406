"""Where a worker gets the layers that it lacks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.planner.errors import LayerLost, PlanInfeasible
from oobleck.planner.ids import Generation, NodeName, WorkerId
from oobleck.planner.plan import Pipeline, Plan, Stage
from oobleck.planner.transfer import Transfer, plan_transfers

LAYERS = 4


def replicas(*workers: WorkerId) -> Plan:
    """Every worker holds the whole model."""
    return Plan(
        generation=Generation(2),
        pipelines=tuple(
            Pipeline(
                nodes=(NodeName(f"{w.node}.{w.slot}"),),
                stages=(Stage(first_layer=0, last_layer=LAYERS - 1, workers=(w,)),),
                first_microbatch=number,
                microbatches=1,
            )
            for number, w in enumerate(workers)
        ),
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
