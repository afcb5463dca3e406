"""Plans after a loss and after the return, on random models and clusters: none is worse than what a
first plan or staying would be."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.regret import Cluster
from oobleck.core.errors import PlanInfeasible
from oobleck.core.plan import Plan
from oobleck.planner.cost.estimate import estimate_step
from oobleck.planner.recovery.policies import unforced
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.worth import by_templates, splitting_weight
from oobleck.planner.search.choose import choose_schedule


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
    for cluster, first in clusters(3):
        change = cluster.change(first, first, cluster.left)
        named = replace(change, schedule_named=True)
        assert by_templates(named).found.plan.schedule in (first.schedule, "1f1b")


def test_nodes_that_return_make_no_step_longer_unless_more_can_be_lost() -> None:
    joined = stayed = 0
    for cluster, first in clusters(20):
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
    """Sixteen nodes make two pipelines of eight; the seventeenth fits into three slower ones."""
    cluster = Cluster(35)
    first = cluster.first(cluster.names, 1)
    left = by_templates(cluster.change(first, first, cluster.left)).found.plan
    assert (len(cluster.names), [len(p.nodes) for p in left.pipelines]) == (17, [8, 8])
    with pytest.raises(PlanInfeasible, match=r"in place of .*not worth a change"):
        unforced(cluster.change(left, left, cluster.names))
