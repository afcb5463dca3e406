"""What pages show, from given messages and records: no master, no processes."""

import math
from itertools import pairwise
from typing import Any

import pytest

from oobleck.cli.dashboard.pages import bars, held, of_incident
from oobleck.cli.view.series import MOST_BUCKETS, MOST_RECENT, Point, Series
from oobleck.cli.view.state import cluster, open_incident, plan_rows, progress
from oobleck.proto import control_pb2 as pb


def stage(node: str, first: int, last: int, *slots: int) -> pb.Stage:
    workers = [pb.WorkerId(node=node, slot=slot) for slot in slots or (0,)]
    return pb.Stage(first_layer=first, last_layer=last, workers=workers)


PLAN = pb.Plan(
    generation=3,
    pipelines=[
        pb.Pipeline(
            nodes=["n1", "n2"],
            stages=[stage("n1", 0, 2, 0, 1), stage("n2", 3, 3)],
            microbatches=5,
        ),
        pb.Pipeline(nodes=["n10"], stages=[stage("n10", 0, 3)], microbatches=1),
    ],
)


def job(**changes: Any) -> pb.JobStatus:
    fields = {
        "job_id": "demo-1",
        "state": "running",
        "committed_step": 57,
        "steps": 200,
        "loss": 2.34567,
        "tokens_per_s": 12345.6,
        "eta_s": 75.2,
        "plan": PLAN,
        "can_lose": 1,
    }
    return pb.JobStatus(**{**fields, **changes})


def node(name: str, state: str = "live", rate: float = 1.0, **changes: Any) -> pb.NodeInfo:
    worker = pb.WorkerStatus(slot=0, card="127.0.0.1:1", rate=rate)
    return pb.NodeInfo(node=name, state=state, worker_slots=2, workers=[worker], **changes)


def test_what_stands_out_comes_first_and_names_are_in_the_order_of_their_numbers() -> None:
    nodes = [
        *(node(name) for name in ("n10", "n2", "n1")),
        node("n3", "lost", reason="its stream closed"),
        node("n4", rate=0.5),
        node("n5", "drained", reason="maintenance"),
        node("n6", last_heard_s=7.0),
    ]
    found = cluster(nodes, [job(), job(job_id="old-1", state="succeeded")])
    assert [row.name for row in found.nodes] == ["n3", "n4", "n5", "n1", "n2", "n6", "n10"]
    assert [row.tone for row in found.nodes[:4]] == ["bad", "warn", "warn", "good"]
    assert [row.name for row in found.nodes if row.is_out] == ["n5"]
    assert {row.name: row.silent for row in found.nodes if row.silent} == {"n6": "7.0 s ago"}
    assert found.states == {"live": 5, "lost": 1, "drained": 1}
    assert (found.workers, found.ready, found.spare) == (12, 6, 2)
    assert [row.id for row in found.jobs] == ["demo-1", "old-1"]
    assert (found.jobs[0].nodes, found.jobs[0].pipelines) == (3, 2)


@pytest.mark.parametrize(
    ("changes", "told", "tone"),
    [
        ({}, "can lose 1 more node, whichever, without losing a layer", "good"),
        (
            {"can_lose": 0, "checkpoint": "/c/50", "checkpoint_step": 50},
            "may lose a layer with the next node; then the checkpoint of step 50 takes over; "
            "7 steps would be done again",
            "warn",
        ),
        ({"can_lose": 0}, "may lose a layer with the next node, and has no checkpoint", "bad"),
    ],
)
def test_what_can_still_be_lost(changes: dict[str, Any], told: str, tone: str) -> None:
    (found,) = cluster([], [job(**changes)]).losses
    assert (found.job_id, found.text, found.tone) == ("demo-1", told, tone)


def test_the_map_has_a_place_for_each_stage_and_the_state_of_its_node() -> None:
    nodes = [node("n1"), node("n2", "disconnected"), node("n10", rate=0.25)]
    first, second = plan_rows(PLAN, nodes)
    assert (first.name, first.share) == ("pipeline 0", "5 micro-batches")
    assert (second.name, second.share) == ("pipeline 1", "1 micro-batch")
    assert [place.workers for place in first.places] == ["n1/0,1", "n2"]
    assert [place.layers for place in first.places] == ["layers 0 to 2", "layer 3"]
    assert [place.share for place in first.places] == [0.75, 0.25]
    assert [p.tone for row in (first, second) for p in row.places] == ["good", "warn", "warn"]
    assert second.places[0].rate == 0.25


def test_the_map_of_a_plan_of_routes_has_its_routes_and_what_is_held_and_not_run() -> None:
    plan = pb.Plan(
        pipelines=PLAN.pipelines,
        routes=[pb.Route(hops=[stage("n1", 0, 1), stage("n2", 2, 3)], microbatches=2)],
        shadows=[stage("n10", 0, 1)],
    )
    found = plan_rows(plan, [])
    assert [row.name for row in found] == ["route 0", "shadows"]
    assert found[0].places[0].tone == "quiet"  # nothing is known of the node
    assert found[1].places[0].share == 0.5
    assert [row.is_through for row in found] == [True, False]


def test_progress_says_what_is_known_alone() -> None:
    shown = progress(job())
    assert (shown.percent, shown.loss) == ("28%", "2.3457")
    assert shown.eta == "about 1 min 15 s to go"
    assert shown.can_lose == "1 more node, whichever, without losing a layer"
    ended = progress(pb.JobStatus(state="failed", eta_s=3.0, steps=5))
    assert (ended.loss, ended.eta, ended.can_lose, ended.checkpoint) == ("", "", "", "")
    assert (ended.tone, ended.over) == ("bad", True)
    assert progress(job(tokens_per_s=0, last_step_age_s=75.0)).speed == "last step 1 min 15 s ago"
    assert progress(job(mfu=0.417)).speed == "12,346 tokens/s, MFU 42%"
    assert progress(job(checkpoint_path="/c")).checkpoint == "none yet"


def test_an_incident_is_open_until_it_has_an_end() -> None:
    told = "node n1 was lost\nmore"
    assert open_incident(job(last_incident=told)) == "node n1 was lost"
    assert open_incident(job(last_incident=told, last_incident_at=5.0)) == ""


def record(step: int, loss: float | None = 1.0) -> dict[str, Any]:
    at = 100.0 + 2 * step
    return {
        "step": step,
        "loss": loss,
        "tokens": 10,
        "step_seconds": 1.0,
        "time": at,
        "generation": 1,
    }


def test_a_series_is_bounded_and_forgets_no_step() -> None:
    series, steps = Series(), 5 * MOST_BUCKETS + 3
    for step in range(1, steps + 1):
        series.add(record(step, float(step)))
        series.add(record(step, -1.0))  # told again, as after the master was away
        assert len(series.whole()) <= MOST_BUCKETS
    found = series.whole()
    assert len(found) > MOST_BUCKETS // 4
    assert found[0].first == 1
    assert found[-1].last == steps
    assert all(before.last + 1 == after.first for before, after in pairwise(found))
    weighted = sum((p.last - p.first + 1) * (p.loss or math.nan) for p in found)
    assert weighted == pytest.approx(steps * (steps + 1) / 2)
    assert all((p.low, p.high) == (p.first, p.last) for p in found)
    assert {p.tokens_per_s for p in found[1:]} == {5.0}  # of 2 s a step, one of them a pause
    recent = series.recent()
    assert [p.first for p in recent] == list(range(steps - MOST_RECENT + 1, steps + 1))


def test_a_loss_that_was_not_finite_is_no_point_of_the_line() -> None:
    series = Series()
    for step in range(1, 2 * MOST_BUCKETS):
        series.add(record(step, None if step < 4 else 2.0))
    first, second = series.whole()[:2]
    assert (first.last, first.loss, first.low) == (1, None, None)
    assert (second.last, second.loss) == (3, None)
    assert series.whole()[2] == Point(
        first=4,
        last=5,
        loss=2.0,
        low=2.0,
        high=2.0,
        tokens_per_s=5.0,
        time=110.0,
        generation=1,
    )


def test_goodput_is_the_share_of_the_time_since_the_first_step() -> None:
    series = Series()
    assert series.goodput(200.0) is None
    for step in range(1, 11):
        series.add(record(step))
    assert series.goodput(120.0) == pytest.approx(10 / 19)
    assert series.goodput(105.0) == 1.0  # another host's calendar


INCIDENT: dict[str, Any] = {
    "total_s": 4.0,
    "phases": {"detect": 1.0, "plan": 0.0, "transfer": 3.0},
    "attempts": [
        {"generation": 2, "phases": {"detect": 1.0}, "total_s": 1.0},
        {"generation": 3, "phases": {"transfer": 3.0}, "total_s": 3.0},
    ],
}


def test_phases_are_parts_of_a_bar() -> None:
    whole, *each = bars(INCIDENT)
    assert [(p.name, p.begin, p.share) for p in whole.phases] == [
        ("detect", 0.0, 0.25),
        ("transfer", 0.25, 0.75),
    ]
    assert [(bar.name, bar.total_s) for bar in each] == [
        ("generation 2", 1.0),
        ("generation 3", 3.0),
    ]
    alone = INCIDENT | {"attempts": INCIDENT["attempts"][:1]}
    assert len(bars(alone)) == 1
    assert bars({"total_s": 0.0, "phases": {"detect": 0.0}, "attempts": []}) == ()


def test_what_was_expected_is_held_against_what_was_measured() -> None:
    changes = [
        {"to_generation": 2, "stall_s": 0.5, "expected": {"step_s": 0.1, "stall_s": 0.25}},
        {"to_generation": 3, "stall_s": None},
        {"to_generation": 4, "stall_s": 9.0},
    ]
    answered = of_incident(INCIDENT, changes)
    assert answered == changes[:2]
    told = [(h.what, h.expected, h.measured) for h in held(answered, {2: 0.125})]
    assert told == [
        ("generation 2: a step", "0.100 s", "0.125 s"),
        ("generation 2: standstill", "0.250 s", "0.500 s"),
        ("generation 3: a step", "unknown", "unknown"),
        ("generation 3: standstill", "unknown", "unknown"),
    ]
