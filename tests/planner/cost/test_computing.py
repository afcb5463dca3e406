"""How long each worker computes in a step."""

from dataclasses import replace

import pytest

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.routes import Hold, Hop, Route
from oobleck.planner.cost.estimate import computing_by_layer_s
from support.profiles import profile_of


def test_a_worker_computes_all_hops_of_all_its_microbatches() -> None:
    a, b, c, d = (WorkerId(NodeName(name), 0) for name in "abcd")
    b1 = WorkerId(NodeName("b"), 1)
    profile = replace(profile_of([1.0, 2.0, 4.0], gpus=(1, 2), gpus_per_node=2), microbatch=2)
    plan = Plan(
        generation=Generation(1),
        holds=(
            Hold(first_layer=0, last_layer=2, workers=(a,)),
            Hold(first_layer=0, last_layer=1, workers=(b, b1)),
            Hold(first_layer=2, last_layer=2, workers=(c,)),
            Hold(first_layer=0, last_layer=0, workers=(d,)),
        ),
        routes=(
            Route(hops=(Hop(first_layer=0, last_layer=2, workers=(a,)),), microbatches=3),
            Route(
                hops=(
                    Hop(first_layer=0, last_layer=1, workers=(b, b1)),
                    Hop(first_layer=2, last_layer=2, workers=(a,)),
                ),
                microbatches=2,
            ),
            Route(
                hops=(
                    Hop(first_layer=0, last_layer=1, workers=(b, b1)),
                    Hop(first_layer=2, last_layer=2, workers=(c,)),
                ),
                microbatches=5,
            ),
        ),
    )

    def taken_s(gpus: int, *layers: int) -> float:
        return sum(
            profile.layers[i].forward_s[gpus] + profile.layers[i].backward_s[gpus] for i in layers
        )

    found = computing_by_layer_s(plan, profile)
    assert {worker: sum(layers.values()) for worker, layers in found.items()} == pytest.approx(
        {
            a: 3 * taken_s(1, 0, 1, 2) + 2 * taken_s(1, 2),
            b: 7 * taken_s(2, 0, 1),
            b1: 7 * taken_s(2, 0, 1),
            c: 5 * taken_s(1, 2),
            d: 0.0,
        }
    )
    assert list(found) == sorted([a, b, b1, c, d])


def test_what_a_worker_computes_by_layer_follows_its_rows() -> None:
    """Of a micro-batch of three rows, the second of two workers has two."""
    a, b = (WorkerId(NodeName("a"), slot) for slot in (0, 1))
    profile = replace(profile_of([1.0, 2.0], gpus=(1, 2), gpus_per_node=2), microbatch=3)
    plan = Plan(
        generation=Generation(1),
        holds=(Hold(first_layer=0, last_layer=1, workers=(a, b)),),
        routes=(Route(hops=(Hop(first_layer=0, last_layer=1, workers=(a, b)),), microbatches=4),),
    )
    found = computing_by_layer_s(plan, profile)
    whole = 4 * sum(layer.forward_s[2] + layer.backward_s[2] for layer in profile.layers)
    assert sum(found[a].values()) == pytest.approx(whole * 2 / 3)
    assert sum(found[b].values()) == pytest.approx(whole * 4 / 3)
    assert found[a][1] == pytest.approx(2 * found[a][0])


def test_a_worker_without_a_row_computes_nothing() -> None:
    a, b = (WorkerId(NodeName("a"), slot) for slot in (0, 1))
    profile = profile_of([1.0], gpus=(1, 2), gpus_per_node=2)
    plan = Plan(
        generation=Generation(1),
        holds=(Hold(first_layer=0, last_layer=0, workers=(a, b)),),
        routes=(Route(hops=(Hop(first_layer=0, last_layer=0, workers=(a, b)),), microbatches=4),),
    )
    assert computing_by_layer_s(plan, profile)[a] == {}
