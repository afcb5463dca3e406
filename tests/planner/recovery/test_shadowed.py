"""Shadows behind a re-routed plan: in the room that its order leaves, or that it can do without."""

import random
from dataclasses import replace
from typing import Literal

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.planner.cost.listed import estimate_listed, with_listing
from oobleck.planner.recovery.answer import Answer, Change
from oobleck.planner.recovery.policies import answer, behind
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.reroute import reroute
from oobleck.planner.recovery.worth import shadowed, shadows_behind
from oobleck.planner.search.templates import generate_templates
from support.choices import chosen
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of
from support.random_rerouted import random_rerouted


def followed(change: Change, wanted: Literal["copies", "moved"]) -> Answer:
    return chosen(behind(change, wanted))


def change(base: Plan, plan: Plan, profile: Profile, fault_tolerance: int = 1) -> Change:
    """Behind `plan` nobody is lost."""
    return Change(
        plan=plan,
        base=base,
        live=plan.nodes,
        generation=Generation(plan.generation + 1),
        templates={},
        profile=profile,
        fault_tolerance=fault_tolerance,
        tied=False,
        shadows=True,
    )


def found(asked: Change) -> Answer | None:
    try:
        return shadowed(asked)
    except PlanInfeasible:
        return None


def test_memory_holds_and_a_step_takes_hardly_longer() -> None:
    kept = anew = 0
    for seed in range(60):
        rng = random.Random(seed)
        base, plan, profile = next(random_rerouted(rng, layers=8, stages=4))
        asked = change(base, plan, profile, rng.choice((1, 2)))
        if (shadow := found(asked)) is None:
            continue
        made = shadow.found.plan
        assert shadows_behind(plan, asked) == "shadow", "it is promised"
        assert can_lose(plan) < can_lose(made) <= asked.fault_tolerance
        assert (made.generation, made.routes) == (3, plan.routes)
        assert set(plan.holds) <= set(made.holds)
        estimate = estimate_listed(made, profile, tied=False)
        assert estimate.peak_bytes <= profile.gpu_memory_bytes
        assert estimate.step_s == shadow.step_s
        as_now = estimate_listed(replace(made, listing=plan.listing), profile, tied=False)
        assert shadow.step_s <= as_now.step_s * 1.03
        kept += made.listing == plan.listing
        anew += made.listing != plan.listing
        assert found(change(base, made, profile, can_lose(made))) is None, "that is all"
    assert kept >= 20
    assert anew >= 3


def halves(memory: int, first_s: float = 1.0) -> Change:
    """Two pipelines of two stages of a layer each, with 8 micro-batches each, have lost the last
    node: the first halves send all to the one that has the second layer."""
    base = plan_of_cuts(([1, 1], 8), ([1, 1], 8))
    profile = profile_of([first_s, 1.0], state=10, activation=10, memory=memory)
    plan = reroute(base, [worker(3)], generation=Generation(2))
    return change(base, with_listing(plan, profile), profile)


def step_s(plan: Plan, asked: Change) -> float:
    return estimate_listed(plan, asked.profile, tied=False).step_s


def test_an_order_that_fills_the_memory_makes_do_with_less() -> None:
    asked = halves(memory=60)
    before = estimate_listed(asked.plan, asked.profile, tied=False)
    assert set(before.worker_bytes.values()) == {60}, "nobody has room as it is"
    made = shadowed(asked).found.plan
    assert (can_lose(asked.plan), can_lose(made)) == (0, 1)
    assert step_s(made, asked) == pytest.approx(before.step_s, rel=1e-3)
    # With room for all, nothing of the order changes.
    roomy = halves(memory=100)
    assert shadowed(roomy).found.plan.listing == roomy.plan.listing


def test_no_shadow_takes_memory_without_which_a_step_takes_longer() -> None:
    asked = halves(memory=30, first_s=2.0)
    assert shadows_behind(asked.plan, asked) == "shadow", "only orders can tell"
    with pytest.raises(PlanInfeasible, match="a step would take longer"):
        shadowed(asked)
    none = halves(memory=20)
    assert shadows_behind(none.plan, none) is None, "that needs no order"
    assert shadows_behind(asked.plan, replace(asked, shadows=False)) is None


def test_shadows_come_behind_a_stage_that_moves_or_where_none_does() -> None:
    """Of three pipelines of two stages two lose the same one."""
    base = plan_of_cuts(([1, 1], 4), ([1, 1], 4), ([1, 1], 4))
    profile = profile_of([1.0, 1.0], state=10**9, activation=1, memory=10**10)
    lost = replace(
        change(base, base, profile, fault_tolerance=2),
        live=tuple(node for node in base.nodes if node not in ("n1", "n3")),
        templates=generate_templates(profile, range(2, 3)),
    )
    first = answer(lost, "reroute")
    assert first.then == "normalise"
    moved = followed(change(base, first.found.plan, profile, 2), "moved")
    assert (moved.policy, moved.then) == ("normalise", "shadow")
    copied = followed(change(base, moved.found.plan, profile, 2), "copies")
    assert (copied.policy, can_lose(copied.found.plan)) == ("shadow", 2)
    # With all that a copy takes, no move is worth it: shadows take its place.
    slow = replace(profile, links=replace(profile.links, inter_node_bytes_per_s=1e5))
    instead = followed(change(base, first.found.plan, slow, 2), "moved")
    assert (instead.policy, can_lose(instead.found.plan)) == ("shadow", 2)
    with pytest.raises(PlanInfeasible, match="not worth a change"):
        followed(replace(change(base, first.found.plan, slow, 0), shadows=False), "moved")
