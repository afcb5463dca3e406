"""What bench.changes makes of a change's lines."""

import pytest

from bench.changes import change_of


def test_a_stall_is_held_against_the_steps_before_and_after() -> None:
    """Steps of 1 s; 1.5 s while state is sent ahead, from 10.2 s on; 2 s with the new plan, whose
    first one ends 4 s after the last one of before."""
    ends = [(float(t), 1, 1.0) for t in range(1, 11)]
    ends += [(11.0, 1, 1.0), (12.5, 1, 1.5), (14.0, 1, 1.5)]
    ends += [(18.0 + 2 * number, 2, 2.0) for number in range(12)]
    metrics = [{"time": t, "generation": g, "step_seconds": s} for t, g, s in ends]
    phases = {"abort": 0.0, "rendezvous": 0.02, "transfer": 1.0, "first_step": 2.0}
    event = {"to_generation": 2, "total_s": 7.8, "phases": phases, "received_bytes": 5}
    change = change_of("leaves", event, metrics)
    assert change.stall_s == pytest.approx(3.0)
    assert change.over_s == pytest.approx(2.0)
    assert change.slower_s == pytest.approx(0.5)
    assert (change.before_s, change.after_s) == (1.0, 2.0)
    assert (change.fed_bytes, change.moved_bytes) == (0, 5)
