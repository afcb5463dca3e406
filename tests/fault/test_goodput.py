"""What counts as useful time, and what the rest of it is put down to."""

import pytest

from bench.support.client import Record
from bench.support.goodput import cost, usual_s

USUAL = {1: 1.0}


def step(seconds: float, generation: int = 1) -> Record:
    return {"step_seconds": seconds, "generation": generation}


def change(*, boundary: bool = False, **phases: float) -> Record:
    return {"event": "reconfigured", "boundary": boundary, "phases": phases}


def test_steps_that_follow_each_other_are_all_useful() -> None:
    whole = cost(10.0, [step(1.0)] * 10, USUAL, [])
    assert (whole.useful_s, whole.lost) == (10.0, 0.0)


def test_an_attempt_that_was_cut_off_is_lost_besides_what_the_change_took() -> None:
    # 0.7 s into a step a loss that is known 2 s later, and 0.5 s until the step is begun anew.
    events = [{"event": "node_lost"}, change(detect=2.0, plan=0.1, rendezvous=0.4, first_step=1.0)]
    whole = cost(10.2, [step(1.0)] * 7, USUAL, events)
    assert whole.lost == pytest.approx(3.2)
    assert whole.lost_s == pytest.approx({"detect": 2.0, "recover": 0.5, "rejoin": 0, "redo": 0.7})


def test_a_step_that_stands_still_is_not_useful_all_the_time() -> None:
    whole = cost(20.0, [step(1.0)] * 9 + [step(11.0)], USUAL, [])
    assert (whole.useful_s, whole.lost_s["redo"]) == (12.0, 8.0)


def test_training_that_goes_on_until_a_loss_is_known_has_not_lost_that_time() -> None:
    whole = cost(10.5, [step(1.0)] * 10, USUAL, [change(detect=4.0, rendezvous=0.3)])
    assert whole.lost_s == pytest.approx({"detect": 0.2, "recover": 0.3, "rejoin": 0, "redo": 0})


def test_of_a_join_only_the_meeting_is_lost() -> None:
    events = [change(boundary=True, detect=1.0, plan=0.2, abort=0.5, rendezvous=0.1, transfer=0.2)]
    whole = cost(10.3, [step(1.0)] * 10, USUAL, events)
    assert whole.lost_s == pytest.approx({"detect": 0, "recover": 0, "rejoin": 0.3, "redo": 0})


def test_the_usual_step_is_the_median_of_its_generation() -> None:
    steps = [step(1.0), step(9.0), step(2.0)] + [step(0.2, generation=2)] * 3
    assert usual_s(steps) == {1: 2.0, 2: 0.2}
    # Of one that hardly began nothing is known, so its steps may be as slow as any.
    assert usual_s([*steps, step(30.0, generation=3)])[3] == 2.0
    assert usual_s([step(3.0)]) == {1: 3.0}
    assert usual_s([]) == {}
