"""What `oobleck plan` prints."""

import json

import pytest

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.report import draw_plan, plan_report
from support.profiles import profile_of

PROFILE = profile_of([0.1] * 8, memory=5000)


def test_the_report_has_the_documented_keys() -> None:
    report = plan_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16)
    assert json.loads(json.dumps(report)) == report
    assert set(report) == {"templates", "plan"}
    assert [template["nodes"] for template in report["templates"]] == [2, 3]
    assert set(report["templates"][0]) == {"nodes", "stages", "iteration_s"}
    assert report["templates"][0]["stages"][1] == {
        "first_layer": 4,
        "last_layer": 7,
        "node": 1,
        "gpus": 1,
        "forward_s": pytest.approx(0.4),
        "backward_s": pytest.approx(0.8),
    }
    assert report["plan"]["pipelines"] == [
        {"template_nodes": 3, "microbatches": 9},
        {"template_nodes": 2, "microbatches": 7},
    ]
    assert report["plan"]["step_s"] == pytest.approx(9.6, rel=1e-3)


def test_losses_are_followed_until_nothing_fits() -> None:
    report = plan_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16, lost=4)
    after = report["after_losses"]
    assert [(change["lost"], change["rule"]) for change in after] == [
        ("n3", "reinstantiate"),
        ("n2", "merge"),
        ("n5", "reinstantiate"),
        ("n4", None),
    ]
    assert after[1]["plan"]["pipelines"] == [{"template_nodes": 3, "microbatches": 16}]
    assert after[3]["reason"] == "needs at least 2 nodes to hold the model; 1 is live"
    assert after[3]["plan"] is None


def test_several_gpus_per_node_are_planned_too() -> None:
    profile = profile_of([0.1] * 8, gpus=(1, 2, 4), gpus_per_node=4)
    report = plan_report(profile, nodes=3, fault_tolerance=1, global_batch=8, lost=1)
    assert sum(stage["gpus"] for stage in report["templates"][0]["stages"]) == 4
    assert report["plan"]["step_s"] > 0
    assert report["after_losses"][0]["plan"]["step_s"] > report["plan"]["step_s"]


def test_wrong_arguments_are_named() -> None:
    two = profile_of([0.1] * 8)
    with pytest.raises(ValueError, match="global_batch is 0; it must be a multiple of microbatch"):
        plan_report(two, nodes=2, fault_tolerance=1, global_batch=0)
    with pytest.raises(ValueError, match=r"lost is 2; .* less than nodes \(2\)"):
        plan_report(two, nodes=2, fault_tolerance=1, global_batch=4, lost=2)
    with pytest.raises(PlanInfeasible, match="needs 4 nodes: fault_tolerance 3"):
        plan_report(two, nodes=2, fault_tolerance=3, global_batch=4)
    with pytest.raises(PlanInfeasible, match="2 pipelines need as many micro-batches"):
        plan_report(two, nodes=2, fault_tolerance=1, global_batch=1)


def test_the_drawing_shows_layers_and_workers() -> None:
    assert draw_plan(PROFILE, nodes=5, fault_tolerance=1, global_batch=16) == (
        "pipeline 0: 3 nodes, micro-batches 0-8\n"
        "  | layers 0-2 | layers 3-5 | layers 6-7 |\n"
        "  | n1/0       | n2/0       | n3/0       |\n"
        "pipeline 1: 2 nodes, micro-batches 9-15\n"
        "  | layers 0-3 | layers 4-7 |\n"
        "  | n4/0       | n5/0       |\n"
        "estimated step: 9.6 s\n"
    )
