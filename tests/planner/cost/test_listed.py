"""What each worker has in memory where workers stand in several hops."""

from dataclasses import replace

from oobleck.core.ids import Generation
from oobleck.core.routes import Hold
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.recovery.reroute import reroute
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of


def test_what_a_worker_has_beside_its_layers_is_there_once() -> None:
    """One layer is computed at a time; who only holds has nothing beside."""
    plain = profile_of([1.0] * 4, state=1000, activation=10)
    layers = [replace(layer, sum_bytes=0, working_bytes=77) for layer in plain.layers]
    profile = replace(plain, layers=tuple(layers))
    before = plan_of_cuts(([2, 2], 2), ([2, 2], 2))
    lost = before.routes[1].hops[0].workers[0]
    other = Hold(first_layer=3, last_layer=3, workers=before.routes[0].hops[0].workers)
    idle = Hold(first_layer=2, last_layer=3, workers=(worker(9),))
    held = replace(before, holds=(*before.holds, other, idle))
    plan = with_listing(reroute(held, {lost}, generation=Generation(2)), profile)
    found = estimate_listed(plan, profile, tied=False)
    assert list(found.worker_bytes) == list(plan.workers)
    assert found.worker_bytes[worker(9)] == 2 * 1000
    assert found.peak_bytes == max(found.worker_bytes.values())
    for name, layers_held in plan.held.items():
        if name != worker(9):
            kept = found.worker_bytes[name] - 1000 * len(layers_held) - 77
            # Activations of one layer's micro-batches, in whole.
            assert kept > 0
            assert kept % 10 == 0
