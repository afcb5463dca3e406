"""Costs that a simulation can be given back are those that it was made with."""

import pytest

from oobleck.planner.report.learned import learn_costs

PHASES = {
    "detect": 0.2,
    "plan": 0.1,
    "abort": 0.3,
    "rendezvous": 0.4,
    "transfer": 2.0,
    "first_step": 2.5,
}


def change(generation: int, **fields: object) -> dict[str, object]:
    return {
        "event": "reconfigured",
        "time": 100.0 * generation,
        "total_s": 5.5,
        "to_generation": generation,
        "cause": "node lost",
        "policy": "templates",
        "boundary": False,
        "nodes_joined": [],
        "expected": {"step_s": 1.6, "stall_s": 1.5},
        "redo_step": 7,
        "salvaged_microbatches": 2,
        "received_bytes": 0,
        "phases": PHASES,
        **fields,
    }


def switch(generation: int, pause_s: float, **fields: object) -> dict[str, object]:
    phases = {"abort": 6.0, "rendezvous": pause_s - 0.1, "transfer": 0.1}
    return change(
        generation, boundary=True, phases=phases, expected={"step_s": 1.6, "stall_s": 0}, **fields
    )


def steps(generation: int, *lengths: float) -> list[dict[str, object]]:
    return [
        {
            "step": 10 * generation + number,
            "generation": generation,
            "time": 100.0 * generation + 2.0 * number,
            "step_seconds": length,
        }
        for number, length in enumerate(lengths)
    ]


def test_each_cost_is_what_its_records_tell() -> None:
    events = [
        change(2),
        change(3, superseded_by=4, phases={}),  # tells nothing
        switch(5, 0.7),
        change(6, policy="morph", expected=None, redo_step=None),
        change(7, cause="worker lost", phases={}),  # waits for a process, too
        {"event": "checkpoint_saved", "step": 81, "time": 10.0, "request": 0},
        {"event": "checkpoint_saved", "step": 82, "time": 12.0, "request": 3},
        {"event": "checkpoint_saved", "step": 91, "time": 40.0, "request": 0},
    ]
    # The first step of a generation is told by its change. The steps after a save begin later.
    metrics = [*steps(2, 2.5, 2.0, 2.0), *steps(8, 2.0, 2.0, 1.5, 1.5, 2.0, 2.0)]
    assert learn_costs(events, metrics, link_bytes_per_s=1e9, microbatches=8) == pytest.approx(
        {
            "detect_s": 0.2,
            "plan_s": 0.1,
            "abort_s": 0.3,
            "meeting_s": 0.4,
            "bytes_per_s": 0.5e9,  # a second was expected, and it took two
            "salvage": 0.5,  # a quarter of whole steps, half of which was done on average
            "first_step_s": 1.0,  # beside the part of the step that was done again
            "step_ratio": 1.25,  # of steps whose plan expected some
            "switch_s": 0.7,
            "load_s": 2.0,  # without the meeting that its phases include
            "save_s": 0.5,
            "checkpoint_every_s": 30.0,
        }
    )


def test_what_no_record_tells_is_left_out() -> None:
    assert learn_costs([change(2)], []) == pytest.approx(
        {"detect_s": 0.2, "plan_s": 0.1, "abort_s": 0.3, "meeting_s": 0.4}
    )
    assert learn_costs([], []) == {}


def test_pauses_of_switches_add_up() -> None:
    """Most are none, so their median would say that the others cost nothing."""
    switches = [switch(number, pause_s) for number, pause_s in enumerate([0.1, 0.7, 0.1], 2)]
    assert learn_costs(switches, ())["switch_s"] == pytest.approx(0.3)


def test_a_pause_that_the_plan_expected_is_no_cost_of_switches() -> None:
    """Another simulation expects it as well."""
    switches = [
        switch(number, pause_s) | {"expected": {"step_s": 1.6, "stall_s": expected_s}}
        for number, (pause_s, expected_s) in enumerate([(0.3, 0.0), (2.3, 2.1)], 2)
    ]
    unseen = switch(4, 0.0, master_restarted=True)
    assert learn_costs([*switches, unseen], ())["switch_s"] == pytest.approx(0.25)


def test_what_a_new_node_takes_is_told_by_joins_that_nothing_delayed() -> None:
    def joined(at: float, *nodes: str) -> list[dict[str, object]]:
        return [{"event": "node_joined", "time": at, "node": node} for node in nodes]

    events = [
        *joined(100.0, "n1"),
        switch(2, 0.1, time=110.0, nodes_joined=["n1"]),
        *joined(120.0, "n2"),
        change(3, time=130.0),
        switch(4, 0.1, time=150.0, nodes_joined=["n2"]),
    ]
    # The plan was there after 4.5 s; the first second was a wait for further nodes.
    assert learn_costs(events, ())["join_s"] == pytest.approx(3.5)


def test_the_speed_of_links_is_free_of_what_the_master_has_learned_of_it() -> None:
    """Transfers take twice as long as the links are said to. After the first one the master expects
    more than a second for as many bytes."""
    expected = [1.0, 2.0**0.5, 2.0**0.75]
    events = [
        change(number, expected={"step_s": 1.6, "stall_s": 0.5 + move_s})
        for number, move_s in enumerate(expected, 2)
    ]
    costs = learn_costs(events, (), link_bytes_per_s=1e9, microbatches=8)
    assert costs["bytes_per_s"] == pytest.approx(0.5e9)


def test_the_speed_of_links_is_told_by_what_was_received() -> None:
    """The second change finds half of the state in place, the third one all of it."""
    events = [
        change(
            number,
            expected={
                "step_s": 1.6,
                "stall_s": 0.1 + move_s,
                "transfer_s": move_s,
                "moved_bytes": 800,
            },
            received_bytes=received,
            phases={**PHASES, "transfer": received / 400},
        )
        for number, (received, move_s) in enumerate([(800, 1.0), (400, 2.0**0.5), (0, 1.0)], 2)
    ]
    costs = learn_costs(events, (), link_bytes_per_s=1e9, microbatches=8)
    assert costs["bytes_per_s"] == pytest.approx(0.5e9)
