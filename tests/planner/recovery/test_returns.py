"""Plans after a loss and after the return, on random models and clusters: none is worse than what a
first plan or staying would be."""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import pytest

from bench.regret import Cluster, examine
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Plan
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.recovery import policies
from oobleck.planner.recovery.answer import Answer, Change, splitting_weight
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.recovery.worth import by_templates
from oobleck.planner.search.catalogue import Catalogue
from oobleck.planner.search.choose import choose_schedule
from oobleck.planner.search.firstplan import make_first_plan, node_specification
from support.choices import for_joins as unforced
from support.profiles import profile_of


def clusters(count: int) -> Iterator[tuple[Cluster, Plan]]:
    """Yield clusters with their first plans, those left out whose nodes are too few."""
    seed = 0
    while count:
        seed += 1
        try:
            cluster = Cluster(seed)
            first = cluster.first(cluster.names, 1)
            cluster.first(cluster.left, 2)
        except PlanInfeasible:
            continue
        count -= 1
        yield cluster, first


def seconds(plan: Plan, cluster: Cluster) -> float:
    return estimate_step(plan, cluster.profile, tied=True).step_s * splitting_weight(plan)


def test_the_schedule_after_a_loss_is_the_best_whichever_ran_before() -> None:
    found = set[tuple[str, str]]()
    for cluster, first in clusters(8):
        for before in ("1f1b", "zb-h1", "gpipe"):
            running = replace(first, schedule=before)
            after = by_templates(cluster.change(running, running, cluster.left)).found.plan
            best = choose_schedule(after, cluster.profile, tied=True).schedule
            assert after.schedule == best
            found.add((before, best))
    assert any(before != best for before, best in found)
    assert {before for before, best in found if best == "zb-h1"} == {"1f1b", "zb-h1", "gpipe"}


def test_a_schedule_that_the_job_names_is_kept_where_it_fits() -> None:
    for cluster, first in clusters(4):
        running = replace(first, schedule="zb-h1")
        roomy = replace(cluster.profile, gpu_memory_bytes=1 << 50)
        with_room = copy(cluster)
        with_room.profile, with_room.catalogue = roomy, Catalogue(tied=True)
        change = with_room.change(running, running, cluster.left, "zb-h1")
        assert by_templates(change).found.plan.schedule == "zb-h1"


def test_a_schedule_that_fits_no_longer_gives_way_to_1f1b() -> None:
    """Of seven nodes four and three keep all micro-batches, as GPipe does; of six no two do."""
    profile = profile_of([1.0] * 8, state=400, activation=20, memory=2000)
    names = [NodeName(f"n{number}") for number in range(7)]
    sizes = node_specification(profile, nodes=7, fault_tolerance=1)
    catalogue = Catalogue(tied=False)
    first = make_first_plan(
        catalogue,
        sizes,
        names,
        profile=profile,
        microbatches=32,
        min_pipelines=2,
        generation=Generation(1),
        wanted="gpipe",
    ).plan
    assert first.schedule == "gpipe"
    terms = Terms(
        profile=profile, sizes=sizes, fault_tolerance=1, tied=False, schedule="gpipe", shadows=False
    )
    change = terms.change(
        catalogue, plan=first, base=first, live=names[1:], generation=Generation(2)
    )
    after = by_templates(change).found.plan
    assert (after.schedule, len(after.nodes)) == ("1f1b", 6)


def test_a_first_plan_behind_a_loss_is_one_for_the_nodes_that_are_left() -> None:
    for cluster, running in clusters(4):
        for left in (cluster.names[1:], cluster.names[:-1]):
            change = cluster.change(running, running, left)
            assert change.first is not None
            assert change.first(left[::-1], Generation(2), change.tolerated) == cluster.first(
                left, 2
            )


def refuse(change: Change) -> Answer:
    raise PlanInfeasible("not here")


def test_the_longer_a_switch_stands_still_the_less_it_is_worth() -> None:
    cluster, first = next(clusters(1))
    left = by_templates(cluster.change(first, first, cluster.left)).found.plan
    change = cluster.change(left, left, cluster.names)
    found = by_templates(change)
    taken, why = [], ""
    for late_s in (0.0, 10.0, 100.0, 300.0, 590.0, 5000.0):
        with pytest.MonkeyPatch.context() as patch:
            late = replace(found, late_s=late_s)
            patch.setattr(policies, "by_templates", lambda _, late=late: late)
            patch.setattr(policies, "anew", refuse)
            try:
                unforced(change)
                taken.append(True)
            except PlanInfeasible as infeasible:
                taken.append(False)
                why = str(infeasible)
    assert "5e+03 s of standstill" in why
    assert taken == sorted(taken, reverse=True)
    assert (taken[0], taken[-1]) == (True, False)


@pytest.mark.parametrize("cases", [8, pytest.param(20, marks=pytest.mark.soak)])
def test_nodes_that_return_make_no_step_longer_unless_more_can_be_lost(cases: int) -> None:
    joined = stayed = 0
    for cluster, first in clusters(cases):
        left = by_templates(cluster.change(first, first, cluster.left)).found.plan
        try:
            back = unforced(cluster.change(left, left, cluster.names)).found.plan
        except PlanInfeasible:
            stayed += 1
            assert can_lose(left) >= min(cluster.f, can_lose(first))
            continue
        joined += 1
        if min(can_lose(back), cluster.f) <= min(can_lose(left), cluster.f):
            assert seconds(back, cluster) <= 1.01 * seconds(left, cluster)
        assert seconds(back, cluster) <= 1.02 * seconds(first, cluster)
    assert joined > stayed


def test_a_node_that_would_slow_the_others_down_stays_idle() -> None:
    """With a twenty-second node in the pipeline a step would take longer."""
    cluster = Cluster(196)
    first = cluster.first(cluster.names, 1)
    left = by_templates(cluster.change(first, first, cluster.left)).found.plan
    assert (len(cluster.names), [len(p.nodes) for p in left.pipelines]) == (22, [21])
    with pytest.raises(PlanInfeasible, match=r"in place of .*not worth a change"):
        unforced(cluster.change(left, left, cluster.names))


@pytest.mark.parametrize("seed", [100, 40_108])
def test_auto_commits_as_many_steps_as_the_best_candidate(seed: int) -> None:
    """100: a first plan's shape is as fast as templates, and leaves no layer on one node alone.
    40108: a stage that moves behind a re-route shortens a step by a quarter."""
    assert examine(seed).loss <= 0.02
