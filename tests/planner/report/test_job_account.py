"""Account of a job's records, against sums by hand and an account of each instant on its own."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleck.planner.report.goodput import account

ORIGIN = 1_700_000_000.0
PHASES = ("detect", "plan", "waiting", "abort", "rendezvous", "transfer", "first_step")


def step(number: int, end: float, took: float, generation: int = 1) -> dict[str, Any]:
    return {
        "step": number,
        "time": ORIGIN + end,
        "step_seconds": took,
        "generation": generation,
        "tokens": 8,
    }


def event(at: float, name: str, **fields: object) -> dict[str, Any]:
    return {"event": name, "time": ORIGIN + at, **fields}


def nodes(number: int) -> list[list[dict[str, str]]]:
    return [[{"node": f"n{k}"}] for k in range(number)]


def started(at: float, number: int = 4) -> dict[str, Any]:
    return event(at, "started", generation=1, pipelines=nodes(number))


def change(at: float, to: int, policy: str = "templates", **phases: float) -> dict[str, Any]:
    return event(
        at,
        "reconfigured",
        to_generation=to,
        policy=policy,
        rule="reinstantiate",
        boundary=False,
        phases=phases,
        total_s=sum(phases.values()),
        received_bytes=100,
        pipelines_after=nodes(3),
    )


def told(events: list[Any], metrics: list[Any], until: float, **more: Any) -> dict[str, Any]:
    found = account([event(0, "submitted"), *events], metrics, until=ORIGIN + until, **more)
    spent = found["seconds"]
    assert sum(spent.values()) == found["wall_s"]
    for badput in (found["badput"], found["badput_types"]):
        assert spent["useful"] + sum(badput.values()) == found["wall_s"]
    return dict(found)


def test_a_step_that_a_loss_broke_is_redone_and_phases_are_standstill() -> None:
    phases = {"detect": 0.5, "plan": 0.25, "abort": 0.125, "rendezvous": 0.125, "transfer": 0.5}
    found = told(
        [started(1), event(5.5, "node_lost"), change(8.5, 2, **phases, first_step=1.5)],
        [step(1, 3, 1), step(2, 4, 1), step(3, 8.5, 1, generation=2)],
        9.25,
    )
    assert found["badput"] == {
        "queued": 1,
        "startup": 1,
        "redone_step": 1.5,
        "detect": 0.5,
        "plan": 0.25,
        "abort": 0.125,
        "meeting": 0.125,
        "transfer": 0.5,
        "first_step": 0.5,
    }
    # Three steps, and what is done of the fourth.
    assert found["seconds"]["useful"] == 3.75
    assert found["ettr"] == 3.75 / 9.25
    assert found["goodput"] == 3.75 / 8.25
    assert found["node_goodput"] == pytest.approx(found["goodput"] * (4 + 4 + 3) / 12)
    assert found["badput_types"]["WASTED_PROGRESS_FROM_DISRUPTION"] == 1.5
    assert found["badput_types"]["PROGRAM_STARTUP"] == 1.5
    assert found["counts"] == {"templates": {"first": 1, "reinstantiate": 1}}


def test_steps_since_the_checkpoint_are_redone() -> None:
    restored = event(5, "restored", lost_steps=2, generation=2)
    found = told(
        [
            started(0),
            event(2, "checkpoint_saved", step=2),
            restored,
            change(7, 2, "morph", plan=0.5, transfer=0.5, first_step=1),
        ],
        # Steps 3 and 4 are trained again from 6 to 8, and have their lines already.
        [step(k, k, 1) for k in range(1, 5)] + [step(5, 9, 1, generation=2)],
        9,
    )
    assert found["badput"] == {
        "redone_step": 1,
        "plan": 0.5,
        "load": 0.5,
        "redone_checkpoint": 2,
    }
    assert (found["returns"], found["steps"]) == (1, 5)


def test_a_join_at_a_step_boundary_costs_the_gap_between_two_steps() -> None:
    join = change(4, 2, detect=0, plan=1, abort=1, rendezvous=0.25, first_step=1)
    join["boundary"] = True
    found = told([started(0), join], [step(1, 1, 1), step(2, 2.75, 1.75), step(3, 4, 1, 2)], 4)
    assert found["badput"] == {"switch": 0.25}


def test_waits_evaluations_and_saves_have_their_own_causes() -> None:
    found = told(
        [
            event(1, "waiting"),
            started(3),
            event(6, "checkpoint_saved", step=1),
            event(11, "waiting"),
            event(12, "cancelled"),
        ],
        [step(1, 5, 1), step(2, 7, 1), step(3, 10, 1)],
        99,
        evaluations=[{"time": ORIGIN + 9, "seconds": 2}],
    )
    assert found["badput"] == {
        "queued": 1,
        "waiting": 3,
        "startup": 1,
        "save": 1,
        "evaluation": 2,
        "other": 1,
    }


def test_a_job_that_goes_on_after_a_loss_stands_still_until_there_is_a_plan() -> None:
    found = told([started(0), event(2.5, "worker_lost")], [step(1, 1, 1), step(2, 2, 1)], 4)
    assert found["badput"] == {"redone_step": 0.5, "plan": 1.5}


def test_steps_whose_lines_are_lost_are_useful() -> None:
    assert told([started(0)], [step(1, 1, 1), step(4, 4, 1)], 4)["seconds"]["useful"] == 4


def test_a_job_without_events_is_refused() -> None:
    with pytest.raises(ValueError, match="no events"):
        account([], [], until=ORIGIN)


times = st.integers(0, 400).map(lambda part: part / 8)


@settings(max_examples=150)
@given(st.data())
def test_useful_time_is_what_steps_cover_whatever_else_is_told(data: st.DataObject) -> None:
    ends = sorted(data.draw(st.sets(st.integers(1, 400), max_size=12)))
    metrics, covered, before = [], set[int](), 0
    for number, end in enumerate(ends, start=1):
        took = data.draw(st.integers(0, 60))
        metrics.append(step(number, end / 8, took / 8))
        covered |= set(range(max(before, end - took), end))
        before = end
    events: list[Any] = [started(data.draw(times))]
    for at in data.draw(st.lists(times, max_size=8)):
        match data.draw(
            st.sampled_from(["waiting", "put_back", "node_lost", "change", "restored"])
        ):
            case "change":
                phases = {name: data.draw(times) / 8 for name in PHASES}
                events.append(change(at, data.draw(st.integers(1, 3)), **phases))
            case "restored":
                events.append(event(at, "restored", lost_steps=1, generation=2))
            case name:
                events.append(event(at, name))
    events.sort(key=lambda one: one["time"])
    found = told([*events, event(51, "failed")], metrics, 51)
    assert found["seconds"]["useful"] == len(covered) / 8
    assert all(spent > 0 for spent in Counter(found["badput"]).values())
