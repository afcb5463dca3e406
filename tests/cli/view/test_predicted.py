"""What the planner expected of its answers, held against what happened."""

import pytest

from oobleck.cli.view.predicted import predicted, predicted_table


def change(
    to: int, policy: str, rule: str, expected: tuple[float, float] | None, stall_s: float | None
) -> dict[str, object]:
    step_s, stall = expected or (0.0, 0.0)
    return {
        "event": "reconfigured",
        "policy": policy,
        "rule": rule,
        "to_generation": to,
        "expected": None if expected is None else {"step_s": step_s, "stall_s": stall},
        "stall_s": stall_s,
    }


def steps(generation: int, *seconds: float) -> list[dict[str, object]]:
    return [{"generation": generation, "step_seconds": s} for s in seconds]


def test_each_rule_of_a_policy_has_its_medians() -> None:
    events = [
        {"event": "node_lost"},
        change(2, "templates", "merge", (1.0, 0.5), 1.0),
        change(3, "templates", "merge", (2.0, 0.5), 2.0),
        change(4, "templates", "merge", (2.0, 1.0), None),
        change(5, "reroute", "reroute", (3.0, 0.5), 0.25),
        change(6, "morph", "regroup", None, 9.0),
    ]
    records = [*steps(2, 9.0, 1.5, 1.5), *steps(3, 9.0, 2.0), *steps(4, 9.0), *steps(5, 5.0, 6.0)]
    by_rule = {(one.policy, one.rule): one for one in predicted(events, records)}
    assert list(by_rule) == [("morph", "regroup"), ("reroute", "reroute"), ("templates", "merge")]
    merged = by_rule["templates", "merge"].data()
    assert merged["n"] == 3
    assert merged["stall_s"] == {"expected": 0.5, "happened": 1.5, "ratio": 3.0}
    # The first step of a generation is part of the recovery, and generation 4 has no other.
    assert merged["step_s"] == {
        "expected": 2.0,
        "happened": pytest.approx(1.75),
        "ratio": pytest.approx(1.25),
    }
    assert by_rule["reroute", "reroute"].data()["stall_s"] == {
        "expected": 0.5,
        "happened": 0.25,
        "ratio": 0.5,
    }
    unasked = by_rule["morph", "regroup"].data()
    assert unasked["stall_s"] == {"expected": None, "happened": 9.0, "ratio": None}
    assert unasked["step_s"] == {"expected": None, "happened": None, "ratio": None}
    table = predicted_table(list(by_rule.values()), width=None, wide=False).splitlines()
    assert table[0].split()[:3] == ["POLICY", "RULE", "N"]
    assert table[-1].split() == ["templates", "merge", "3", "0.5", "1.5", "3", "2", "1.75", "1.25"]


def test_what_is_expected_to_take_no_time_has_no_ratio() -> None:
    (one,) = predicted([change(2, "templates", "join", (1.0, 0.0), 0.1)], steps(2, 1.0, 1.0))
    assert (one.stall.expected_s, one.stall.happened_s, one.stall.ratio) == (0.0, 0.1, None)
