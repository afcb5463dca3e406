"""What a change of plans moves, counted where most of it passes."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Links
from oobleck.core.routes import Hold, Hop, Route
from oobleck.planner.recovery.answer import Change, answer, moves, outrun_bytes
from oobleck.planner.recovery.rules import Reconfiguration
from support.plans import plan_of_cuts
from support.profiles import profile_of

LAYERS, BYTES = 4, 10


def plan_of(holders: Sequence[str]) -> Plan:
    """Each of these nodes is a pipeline of its own."""
    workers = [WorkerId(NodeName(node), 0) for node in holders]
    return Plan(
        generation=Generation(1),
        holds=tuple(
            Hold(first_layer=0, last_layer=LAYERS - 1, workers=(worker,)) for worker in workers
        ),
        routes=tuple(
            Route(
                hops=(Hop(first_layer=0, last_layer=LAYERS - 1, workers=(worker,)),), microbatches=1
            )
            for worker in workers
        ),
        schedule="1f1b",
    )


def moved(before: Sequence[str], live: Sequence[str]) -> tuple[int, int]:
    return moved_between(plan_of(before), plan_of(live), BYTES)


def moved_between(plan: Plan, then: Plan, state_bytes: int) -> tuple[int, int]:
    return moves(change_between(plan, then, state_bytes), then)


def change_between(plan: Plan, then: Plan, state_bytes: int, bytes_per_s: float = 1e9) -> Change:
    links = Links(intra_node_bytes_per_s=1e10, inter_node_bytes_per_s=bytes_per_s, latency_s=1e-5)
    return Change(
        plan=plan,
        base=plan,
        live=then.nodes,
        generation=Generation(2),
        templates={},
        profile=profile_of([1.0] * LAYERS, state=state_bytes, links=links),
        fault_tolerance=0,
        tied=False,
    )


def test_one_node_that_serves_many_is_the_busiest() -> None:
    assert moved(["n0"], ["n0", "n1", "n2", "n3"]) == (120, 120)


def test_several_that_serve_share_it() -> None:
    assert moved(["n0", "n1"], ["n0", "n1", "n2", "n3"]) == (80, 40)


def test_a_lost_node_sends_nothing() -> None:
    assert moved(["n0", "n1"], ["n1", "n2", "n3"]) == (80, 80)


def test_what_nobody_holds_is_received_all_the_same() -> None:
    assert moved(["n0"], ["n1", "n2"]) == (80, 40)


def test_a_layer_of_fewer_bytes_than_workers_share_it() -> None:
    one, two = (plan_of_cuts(*[([(LAYERS, 2)], 1)] * count) for count in (1, 2))
    assert moved_between(one, two, 1) == (2 * LAYERS, 2 * LAYERS)


def test_gradients_do_not_move() -> None:
    plan, then = plan_of(["n0"]), plan_of(["n0", "n1"])
    change = change_between(plan, then, BYTES)
    layers = tuple(replace(layer, moved_bytes=BYTES - 2) for layer in change.profile.layers)
    change = replace(change, profile=replace(change.profile, layers=layers))
    assert moves(change, then) == (LAYERS * (BYTES - 2),) * 2


def test_what_the_gradients_of_a_step_outrun_is_copied_at_the_switch() -> None:
    """A node joins two: it receives 4 layers of 40 bytes, and 4 x 10 bytes of gradients a step,
    half of each from either."""
    plan, then = plan_of(["n0", "n1"]), plan_of(["n0", "n1", "n2"])

    def outrun(bytes_per_s: float, step_s: float) -> int:
        return outrun_bytes(change_between(plan, then, 40, bytes_per_s), then, step_s)

    assert outrun(20.0, 2.0) == 0
    assert outrun(20.0, 1.0) == 80
    assert outrun(10.0, 1.0) == 120


def late_s(before: Sequence[str], live: Sequence[str], bytes_per_s: float) -> float:
    plan, then = plan_of(before), plan_of(live)
    change = change_between(plan, then, 40_000, bytes_per_s)
    found = Reconfiguration(plan=then, rule="join", reason="")
    # Of a step that long nothing is outrun.
    return answer("templates", found, 1000.0, change).late_s


def test_the_last_gradients_reach_a_copy_after_the_step() -> None:
    """Each layer's are 10 kB; a step takes 12 s, and none of its time is left for them."""
    assert late_s(["n0"], ["n0", "n1"], 20e3) == pytest.approx(2.0, rel=1e-2)
    # Each of two sends half of them, and it receives all.
    assert late_s(["n0", "n1"], ["n0", "n1", "n2"], 20e3) == pytest.approx(2.0, rel=1e-2)
    assert late_s(["n0"], ["n0", "n1", "n2"], 20e3) == pytest.approx(4.0, rel=1e-2)
    assert late_s(["n0"], ["n0", "n1"], 2e3) == pytest.approx(12.0, rel=1e-2)
    assert late_s(["n0", "n1"], ["n0", "n1"], 20e3) == 0
    assert late_s(["n0", "n1"], ["n1", "n2"], 20e3) == 0, "a loss does not wait for a step's end"


def test_a_worker_that_is_ready_early_has_sent_its_gradients_by_the_end() -> None:
    """Of two stages the second is ready 4 s before the first, which goes back last."""
    plan = plan_of_cuts(([(2, 1), (2, 1)], 1))

    def late_s(layer: int, bytes_per_s: float) -> float:
        spare = Hold(first_layer=layer, last_layer=layer, workers=(WorkerId(NodeName("x"), 0),))
        then = replace(plan, holds=(*plan.holds, spare))
        change = change_between(plan, then, 40_000, bytes_per_s)
        found = Reconfiguration(plan=then, rule="shadow", reason="")
        return answer("shadow", found, 1000.0, change).late_s

    assert late_s(0, 1e3) == pytest.approx(10.0, abs=0.2)
    assert late_s(2, 1e3) == pytest.approx(6.0, abs=0.2)
    assert late_s(2, 5e3) == 0


def test_a_running_plan_whose_step_is_not_known_is_changed_all_the_same() -> None:
    """Its workers have two GPUs a stage, and the nodes as now known have one."""
    plan, then = plan_of_cuts(([(4, 2)], 1), ([(4, 2)], 1)), plan_of(["n0"])
    leaving = frozenset({NodeName("n1")})
    change = replace(change_between(plan, then, 40_000, 20e3), leaving=leaving)
    made = Reconfiguration(plan=then, rule="reshape", reason="")
    assert answer("templates", made, 1000.0, change).late_s == 0
