"""What `oobleck plan` prints."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from oobleck.core.errors import PlanInfeasible, ProgramDeadlock
from oobleck.core.ids import WorkerId
from oobleck.core.plan import Plan
from oobleck.core.schedules import Schedule
from oobleck.planner.programs.compiler import proof
from oobleck.planner.programs.compiler.schedule import Work, compute_order
from oobleck.planner.report.report import Outcome, draw, make_report
from oobleck.planner.search.choose import choose_schedule
from support.plans import plan_of_cuts
from support.profiles import profile_of

PROFILE = profile_of([0.1] * 8, memory=5000)


def newest_first(schedule: Schedule, **places: int) -> Iterator[Work]:
    """On all stages but the first."""
    last = places["microbatches"] - 1
    for kind, microbatch in compute_order(schedule, **places):
        yield kind, last - microbatch if places["stage"] else microbatch


def test_a_plan_that_is_shown_was_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    proof.forget()
    monkeypatch.setattr(proof, "compute_order", newest_first)
    with pytest.raises(ProgramDeadlock, match="programs wait for each other"):
        make_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16)
    proof.forget()


def test_the_report_has_the_documented_keys() -> None:
    report = make_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16).data()
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
    plan = report["plan"]
    # 1F1B: 9 micro-batches of 0.9 s and twice that for the two stages that are ahead.
    assert plan["schedules"]["1f1b"]["step_s"] == pytest.approx(9.6, rel=1e-3)
    assert plan["schedule"] == "zb-h1"
    assert plan["step_s"] == plan["schedules"]["zb-h1"]["step_s"] < 9.0
    assert plan["bubble"] == plan["schedules"]["zb-h1"]["bubble"]
    assert plan["peak_bytes"] == 4 * 1000 + 4 * 2 * 10 <= plan["gpu_memory_bytes"] == 5000
    assert [kind["pipelines"] for kind in plan["kinds"]] == [[0], [1]]
    assert plan["kinds"][0]["stages"][2] == {
        "first_layer": 6,
        "last_layer": 7,
        "gpus": 1,
        "busy_s": pytest.approx(9 * 0.6),
        "peak_bytes": 2 * 1000 + 2 * 3 * 10,
    }


def test_losses_are_followed_until_nothing_fits() -> None:
    report = make_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16, lost=4).data()
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
    report = make_report(profile, nodes=3, fault_tolerance=1, global_batch=8, lost=1).data()
    assert sum(stage["gpus"] for stage in report["templates"][0]["stages"]) == 4
    assert report["plan"]["step_s"] > 0
    assert report["after_losses"][0]["plan"]["step_s"] > report["plan"]["step_s"]


def test_idle_nodes_are_named_and_step_in() -> None:
    found = make_report(profile_of([0.1] * 3), nodes=9, fault_tolerance=0, global_batch=1, lost=2)
    report = found.data()
    assert report["plan"]["pipelines"] == [{"template_nodes": 3, "microbatches": 1}]
    assert report["plan"]["idle"] == ["n4", "n5", "n6", "n7", "n8", "n9"]
    assert "idle: 6 nodes (n4, n5, n6, n7, ... n9): no pipelines of these" in found.drawing()
    # The losses are made good by nodes that were idle.
    for loss, idle in zip(report["after_losses"], (5, 4), strict=True):
        assert loss["plan"]["pipelines"] == report["plan"]["pipelines"]
        assert len(loss["plan"]["idle"]) == idle
    all_used = make_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16)
    assert all_used.data()["plan"]["idle"] == []
    assert "idle:" not in all_used.drawing()


def test_wrong_arguments_are_named() -> None:
    two = profile_of([0.1] * 8)
    with pytest.raises(ValueError, match="global_batch is 0; it must be a multiple of microbatch"):
        make_report(two, nodes=2, fault_tolerance=1, global_batch=0)
    with pytest.raises(ValueError, match=r"lost is 2; .* less than nodes \(2\)"):
        make_report(two, nodes=2, fault_tolerance=1, global_batch=4, lost=2)
    with pytest.raises(ValueError, match="nodes is 1000000; it must be at most 65536"):
        make_report(two, nodes=1000000, fault_tolerance=1, global_batch=4)
    with pytest.raises(ValueError, match="global_batch is 131073; it must be at most 131072"):
        make_report(two, nodes=2, fault_tolerance=1, global_batch=131073)
    with pytest.raises(PlanInfeasible, match="needs 4 nodes: fault_tolerance 3"):
        make_report(two, nodes=2, fault_tolerance=3, global_batch=4)
    with pytest.raises(PlanInfeasible, match="2 pipelines need as many micro-batches"):
        make_report(two, nodes=2, fault_tolerance=1, global_batch=1)


def test_the_drawing_shows_stages_memory_and_the_timeline() -> None:
    assert make_report(PROFILE, nodes=5, fault_tolerance=1, global_batch=16).drawing() == (
        "pipeline 0: 3 nodes, micro-batches 0-8\n"
        "  | n1          | n2          | n3          |\n"
        "  | layers 0-2  | layers 3-5  | layers 6-7  |\n"
        "  | 3.0 KiB 62% | 3.0 KiB 62% | 2.0 KiB 41% |\n"
        "pipeline 1: 2 nodes, micro-batches 9-15\n"
        "  | n4          | n5          |\n"
        "  | layers 0-3  | layers 4-7  |\n"
        "  | 4.0 KiB 82% | 4.0 KiB 82% |\n"
        "\n"
        "pipeline 0 up to its gradient sums (8.604 s):\n"
        "  0-9 forward, a-z backward, + weight gradients, . idle\n"
        "stage 0  0011122....aaaaa333bbbbb44ccccc555dddd666eeeee77fffff888ggggghhhhhiiiii\n"
        "stage 1  ..00011.aaa222bbb++33ccc++444dd+++55eee++66fff++777ggg++88hhh++iii++++.\n"
        "stage 2  .....00a11bb..2cc++..33dd+...4ee++..55ff+..66gg+...77h++..88ii++++.....\n"
        "\n"
        "schedule: zb-h1: 7.2% faster than 1f1b, 7.2% faster than gpipe\n"
        "estimated step: 8.905 s, of which workers idle 13.8%\n"
        "peak memory: 4.0 KiB of 4.9 KiB per worker\n"
        "NCCL on GPUs: 6 communicators, 538.5 MiB beside the peak; 840.5 MiB are kept\n"
        "can lose: 1 node at a time, whichever it is\n"
    )


def test_more_communicators_than_work_are_told() -> None:
    """A stage of one worker before one of 17: links to and from each."""
    plan = plan_of_cuts(([1, (1, 17)], 17))
    profile = profile_of([1.0] * 2, gpus=(1, 17))
    outcome = Outcome(plan=plan, choice=choose_schedule(plan, profile))
    assert "on GPUs: one would be in 34 communicators, and 31 work" in draw(outcome, profile)
    assert outcome.needs.communicators == 34


def test_gpus_of_a_node_stand_together_and_equal_pipelines_are_drawn_once() -> None:
    plan = plan_of_cuts(*[([(2, 2), (3, 1), (3, 3)], 40)] * 7, ([8], 40))
    shared = []
    for pipeline in plan.pipelines:
        # The first two stages of each on one node.
        stages = list(pipeline.stages)
        if len(stages) == 3:
            node = stages[0].workers[0].node
            stages[1] = structs.replace(stages[1], workers=(WorkerId(node, 2),))
            pipeline = replace(
                pipeline,
                stages=tuple(stages),
                nodes=(node, pipeline.nodes[2]),
            )
        shared.append(pipeline)
    plan = Plan.of_pipelines(shared, generation=plan.generation)
    profile = profile_of([0.1] * 8, gpus=(1, 2, 3), gpus_per_node=3, memory=10000)
    outcome = Outcome(plan=plan, choice=choose_schedule(plan, profile))
    text = draw(outcome, profile).splitlines()
    assert text[:8] == [
        "7 x pipeline: 2 nodes, 40 micro-batches each",
        "  | n0/0-1      | n0/2        || n2/0-2     |",
        "  | layers 0-1  | layers 2-4  || layers 5-7 |",
        "  | 1.0 KiB 10% | 3.0 KiB 31% || 1010 B 10% |",
        "  the same: pipeline 1 (n3, n5), 2 (n6, n8), 3 (n9, n11) and 3 more",
        "pipeline 7: 1 node, micro-batches 280-319",
        "  | n21         |",
        "  | layers 0-7  |",
    ]
    assert not any(line.startswith("stage 0") for line in text), "too many for a timeline"


def test_long_pipelines_are_drawn_in_several_rows() -> None:
    plan = plan_of_cuts(([1] * 30, 200))
    profile = profile_of([0.1] * 30)
    outcome = Outcome(plan=plan, choice=choose_schedule(plan, profile))
    text = draw(outcome, profile)
    assert all(len(line) <= 80 for line in text.splitlines())
    for layer in range(30):
        assert f"| layer {layer} " in text


@pytest.mark.parametrize("width", [80, 132])
def test_boxes_and_strips_are_as_wide_as_they_may_be(width: int) -> None:
    plan = plan_of_cuts(([1] * 16, 20))
    profile = profile_of([0.1] * 16)
    outcome = Outcome(plan=plan, choice=choose_schedule(plan, profile))
    lines = draw(outcome, profile, width).splitlines()
    assert {len(line) for line in lines if line.startswith("stage 1")} == {width}
    boxes = {len(line) for line in lines if line.startswith("  | ")}
    assert width - 20 < max(boxes) <= width


@pytest.mark.parametrize("nodes", [512, 4096])
def test_many_pipelines_make_a_short_text(nodes: int) -> None:
    plan = plan_of_cuts(*[([4, 4], 3000)] * (nodes // 2))
    profile = profile_of([0.1] * 8)
    outcome = Outcome(plan=plan, choice=choose_schedule(plan, profile))
    assert len(draw(outcome, profile)) < 1000


def test_shadows_are_shown_with_what_they_let_be_lost() -> None:
    profile = profile_of([0.1] * 8, memory=6400)
    with pytest.raises(PlanInfeasible, match="needs 4 nodes: fault_tolerance 1"):
        make_report(profile, nodes=3, fault_tolerance=1, global_batch=16)
    report = make_report(
        profile, nodes=3, fault_tolerance=1, global_batch=16, lost=1, shadows=True, policy="reroute"
    )
    plan, loss = report.data()["plan"], report.data()["after_losses"][0]
    assert plan["can_lose"] == 1
    assert plan["peak_bytes"] <= plan["gpu_memory_bytes"]
    held = [la for s in plan["shadows"] for la in range(s["first_layer"], s["last_layer"] + 1)]
    assert sorted(held) == list(range(8))
    assert "shadows: 8 layers also on 3 nodes (n1/0: " in report.drawing()
    assert "can lose: 1 node at a time, whichever it is\n" in report.drawing()
    assert (loss["policy"], loss["policies"]["reroute"]["moved_bytes"]) == ("reroute", 0)
