"""The master's decisions, told as transcripts (tests/master/scenarios/*.txt)."""

import json
import math
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from oobleck.core.ids import JobId
from oobleck.master.events.jobs import JobStarted
from oobleck.master.state.job import Job
from oobleck.master.state.job_states import InvalidTransition
from oobleck.master.state.reducer.apply import apply
from support.scenario import TIMING, Player

SCENARIOS = sorted(Path(__file__).with_name("scenarios").glob("*.txt"))


@cache
def played(path: Path) -> tuple[Player, str]:
    """A scenario's end and its transcript, for all tests that only look at them."""
    player = Player()
    return player, player.play(path.read_text())


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_scenario(path: Path) -> None:
    _, told = played(path)
    assert told == path.read_text(), f"to accept: cd tests && python -m {Player.__module__} {path}"


def test_a_node_that_is_cut_off_is_not_in_the_next_plan_where_none_is_put_aside() -> None:
    player = Player(replace(TIMING, quarantine_s=0.0))
    before, _, _ = commands("cut_off_copy").partition("6.1 assigned")
    told = player.play(before)
    (plan,) = (line for line in told.splitlines() if "PlanMade generation 2" in line)
    assert "lost [n2] joined []" in plan


def commands(name: str) -> str:
    """A transcript's commands alone."""
    path = next(path for path in SCENARIOS if path.stem == name)
    return re.sub(r"^[>=#].*\n", "", path.read_text(), flags=re.MULTILINE)


def test_versions_that_differ_in_a_plan_are_told_once() -> None:
    player = Player()
    player.play(commands("versions"))
    told = {
        job_id: [line["versions"] for line in lines if line["event"] == "versions_differ"]
        for job_id, lines in player.event_lines.items()
    }
    known = {"2.13.0": ("n1",), "2.13.0+cpu": ("n3",), "2.13.1": ("n4",), "none": ("n5",)}
    assert told["demo-1"] == [{"torch": known}], "at the start, and not when n2 joins"
    assert told["large-2"] == []
    (mixed,) = told["mixed-3"]
    assert mixed["torch"]["2.14.0"] == ("n6", "n7", "n8", "n9")


def test_a_node_that_is_put_aside_is_not_said_to_be_drained_too() -> None:
    player = Player()
    player.play(commands("quarantine"))
    told = [line["event"] for lines in player.event_lines.values() for line in lines]
    assert "node_quarantined" in told
    assert "node_drained" not in told


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_reconfiguration_is_recorded_once_and_its_phases_add_up(path: Path) -> None:
    player, _ = played(path)
    for job_id, lines in player.event_lines.items():
        told = [r for r in lines if r["event"] == "reconfigured"]
        generations = [r["to_generation"] for r in told]
        assert generations == sorted(set(generations))
        job = player.state.jobs[job_id]
        under_way = (
            job.current.on_the_way and job.lineage.before is not None and job.finished_at == 0.0
        )
        pending = 1 if under_way else 0
        assert len(told) == job.lineage.reconfigurations - pending
        for line in told:
            assert line["from_generation"] < line["to_generation"]
            assert math.isclose(sum(line["phases"].values()), line["total_s"], abs_tol=1e-9)
            assert all(seconds >= 0 for seconds in line["phases"].values())
            json.dumps(line, default=list)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_every_incident_is_recorded_once_and_blames_nobody_for_a_closed_socket(path: Path) -> None:
    player, _ = played(path)
    for job_id, lines in player.event_lines.items():
        job = player.state.jobs[job_id]
        told = [r for r in lines if r["event"] == "incident"]
        open_ones = [one.number for one in (job.incident, job.slowdown) if one is not None]
        numbers = [*(r["incident"] for r in told), *open_ones]
        assert sorted(numbers) == list(range(1, job.incidents + 1))
        found = [r for r in told if r["root_cause"]["kind"] != "slow worker"]
        assert [r["incident"] for r in found] == sorted(r["incident"] for r in found)
        lost = [r for r in lines if r["event"] in ("worker_lost", "node_reset")]
        lost += [r for r in lines if r["event"] == "node_lost" and r["in_plan"]]
        assert len(lost) == sum(_losses(r) for r in found) + _open_losses(job)
        for line in found:
            json.dumps(line, default=list)
            causes = [line["root_cause"], *line["also_lost"]]
            assert all(cause["summary"] for cause in causes)
            times = [seen["time"] for seen in line["witnesses"]]
            assert times == sorted(times)
            assert line["closed_at"] >= line["opened_at"]
            spans = line["phases"].values()
            assert math.isclose(sum(spans), line["total_s"], abs_tol=1e-6)
            assert all(seconds >= 0 for seconds in spans)
            if line["outcome"] == "recovered":
                assert line["attempts"][-1]["generation"] == line["to_generation"]
                assert line["attempts"][-1]["phases"] is not None


LOSSES = ("worker died", "node lost", "agent restarted", "hang", "network cut")


def _losses(line: dict) -> int:
    return sum(c["kind"] in LOSSES for c in [line["root_cause"], *line["also_lost"]])


def _open_losses(job: Job) -> int:
    return sum(s.kind in LOSSES for s in job.incident.setbacks) if job.incident else 0


def test_an_overtaken_generation_is_recorded_with_its_successor() -> None:
    player = Player()
    player.play(commands("overtaken"))
    told = [r for r in player.event_lines[JobId("demo-1")] if r["event"] == "reconfigured"]
    assert [(r["to_generation"], r.get("superseded_by")) for r in told] == [
        (2, 3),
        (3, None),
        (4, 5),
        (5, None),
    ]
    assert told[0]["nodes_lost"] == ("n6",)
    assert told[1]["nodes_lost"] == ("n1",)
    first = told[1]["pipelines_after"][0][0]
    assert first == {"node": "n5", "first_layer": 0, "last_layer": 3, "workers": 1}


def reconfigured(scenario: str) -> list[dict[str, Any]]:
    player = Player()
    player.play(commands(scenario))
    lines = player.event_lines[JobId("demo-1")]
    return [line for line in lines if line["event"] == "reconfigured"]


def test_a_return_to_a_checkpoint_is_recorded_with_its_standstill() -> None:
    returns = [line for line in reconfigured("checkpoint") if line["policy"] == "morph"]
    assert [line["to_generation"] for line in returns] == [2, 4, 5]
    # Steps that are done again have no record of their own, whose time it could be.
    assert returns[1]["stall_s"] == pytest.approx(5.9)


def test_the_best_answer_that_was_not_taken_is_recorded() -> None:
    loss, *_ = reconfigured("overtaken")
    assert (loss["policy"], loss["rule"], loss["runner_up"]["policy"]) == (
        "normalise",
        "normalise",
        "reroute",
    )
    assert 0 < loss["runner_up"]["value"] < loss["expected"]["value"]
    join = reconfigured("newcomers")[0]
    assert (join["rule"], join["runner_up"]["rule"]) == ("join", "stay")
    assert 0 < join["runner_up"]["value"] < join["expected"]["value"]
    assert join["expected"]["stall_s"] == 0, "the state is copied ahead"
    named = reconfigured("node_loss")[0]
    assert (named["runner_up"], named["expected"]["value"] > 0) == (None, True)


def test_who_does_not_answer_stands_in_the_record() -> None:
    player = Player()
    player.play(commands("no_progress"))
    told = [r for r in player.event_lines[JobId("demo-1")] if r["event"] == "reconfigured"]
    assert [(r["cause"], r.get("unanswered")) for r in told] == [
        ("no progress", ["n1/0"]),
        ("peers lost", ["n1/0"]),
        ("no progress", None),
        ("node joined", None),
        ("no progress", ["n1/0", "n2/0", "n3/0", "n4/0"]),
        ("no progress", None),
    ]


def test_a_network_that_stays_cut_fails_a_job_only_after_many_meetings_and_a_long_time() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2\n0.0 submit demo f=0\n0.5 ready n1 n2\n"
        "0.7 enter 1 n1 n2\n0.8 steps 1 5 1\n10.0 peer_lost n1/0 1\n"
    )
    job = player.state.jobs[JobId("demo-1")]
    made, now = [], 10.0
    while job.state != "failed":
        generation = job.current.generation
        while job.current.generation == generation and job.state != "failed":
            assert player.wake_at is not None
            now = player.wake_at
            assert now < 2000.0
            player.play(f"{now} look\n")
        made.append(now)
        if job.state != "failed":
            now += 5.0  # until the host is given up
            player.play(f"{now} peer_lost n1/0 {job.current.generation}\n")
    timing = player.timing
    pauses = [after - before - 5.0 for before, after in pairwise(made)]
    assert pauses[:4] == pytest.approx([3.0, 6.0, 12.0, 24.0])
    assert pauses[4:] == pytest.approx([timing.longest_regroup_s] * len(pauses[4:]))
    assert 0 <= made[-1] - made[0] - timing.fruitless_s <= 5.0 + timing.longest_regroup_s
    assert job.reason.startswith(f"the workers have met {len(made) - 1} times in ")
    assert job.reason.endswith("n1/0 lost a peer though nobody is missing: socket closed")


def test_the_end_says_how_many_records_it_lacks() -> None:
    player = Player()
    player.play(commands("lost_records"))
    *_, lost, last = player.event_lines[JobId("demo-1")]
    why = "nobody who is connected has them"
    assert lost == {"event": "records_lost", "first": 9, "last": 100, "why": why}
    assert last == {"event": "succeeded", "generation": 1}
    assert player.state.jobs[JobId("demo-1")].lost.steps == 92


def test_a_long_life_of_losses_and_returns_leaves_nothing_behind() -> None:
    player = Player()
    player.play(
        "0.0 register n1 n2 n3 n4\n0.0 submit demo\n0.5 ready n1 n2 n3 n4\n"
        "0.7 enter 1 n1 n2 n3 n4\n0.8 steps 1 1 1\n"
    )

    def sizes() -> dict[str, int]:
        seen = player.state.jobs[JobId("demo-1")].seen
        values = {name: getattr(seen, name) for name in seen.__slots__}
        return {name: len(value) for name, value in values.items() if hasattr(value, "__len__")}

    most: dict[str, int] = {}
    for cycle in range(2, 42):
        worker = f"n{cycle % 4 + 1}/0"
        player.play(
            f"{cycle}.0 exit {worker}\n{cycle}.1 replace {worker}\n"
            f"{cycle}.2 enter {cycle} n1 n2 n3 n4\n{cycle}.3 steps {cycle} {cycle} {cycle}\n"
        )
        if cycle <= 12:
            most = {name: max(size, most.get(name, 0)) for name, size in sizes().items()}
    assert player.state.job is not None
    assert player.state.job.current.generation == 41
    assert all(size <= most[name] for name, size in sizes().items())
    assert len(player.state.job.lineage.plans) == 1


def test_an_event_that_a_state_does_not_allow_is_an_error_with_the_history() -> None:
    player = Player()
    player.play("0.0 submit demo\n1.0 cancel demo-1\n")
    with pytest.raises(InvalidTransition, match="demo-1 is cancelled and got JobStarted"):
        apply(player.state, JobStarted(job_id=JobId("demo-1")), now=2.0, unix=2.0)


def test_what_two_nodes_raise_more_than_an_hour_apart_is_not_one_fault() -> None:
    """A job that trains for an hour would make a long transcript."""
    player = Player()
    before, second, _ = commands("accused").partition("21.0 fail")
    player.play(before)
    job = player.job
    ((node, (at, words)),) = job.seen.faults.accused.items()
    job.seen.faults.accused[node] = at - 3600.0, words
    told = player.play(f"{second} n1/0 user again\n24.0 rates\n")
    assert "NodeLeftOut n1: again" in told
    assert "JobFailed" not in told
