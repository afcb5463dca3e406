"""What `oobleck plan --lost` tells of each loss, and of what comes behind its answer."""

from dataclasses import replace
from typing import Any, get_args

import pytest

from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.profile import Profile
from oobleck.planner.report.report import make_report
from support.profiles import LINKS, profile_of

#: A layer's state takes a second.
SLOW_LINKS = replace(LINKS, inter_node_bytes_per_s=1e3)
FIGURES = {"step_s", "moved_bytes", "stall_s", "can_lose", "plan"}


def with_small_sums(profile: Profile) -> Profile:
    """So that a step is mostly compute, though state moves slowly."""
    return replace(
        profile, layers=tuple(replace(layer, parameter_bytes=1) for layer in profile.layers)
    )


def after(profile: Any, **asked: Any) -> list[dict[str, Any]]:
    report = make_report(profile, **{"fault_tolerance": 1, "lost": 1, **asked}).data()
    found = report["after_losses"]
    assert isinstance(found, list)
    return found


def test_templates_behind_a_re_routed_plan_are_told_and_their_shadows_behind_them() -> None:
    profile = with_small_sums(profile_of([0.01] * 8, memory=6400, links=SLOW_LINKS))
    (loss,) = after(profile, nodes=4, global_batch=18, policy="auto", shadows=True)
    assert (loss["policy"], loss["then"]) == ("reroute", "templates")
    templates, shadow = loss["follow_ups"]
    assert templates.keys() == shadow.keys() == FIGURES | {"policy", "rule", "reason"}
    # It moves what it would have moved at once, and comes to the same.
    assert {key: templates[key] for key in FIGURES} == loss["policies"]["templates"]
    assert (templates["policy"], templates["rule"]) == ("templates", "merge")
    assert (shadow["policy"], shadow["rule"]) == ("shadow", "shadow")
    assert shadow["moved_bytes"] > 0
    assert (templates["can_lose"], shadow["can_lose"]) == (0, 1)


def test_a_stage_that_moves_behind_a_re_routed_plan_is_told_or_why_none_does() -> None:
    asked = {"nodes": 6, "min_nodes": 2, "global_batch": 4, "policy": "reroute"}
    (loss,) = after(profile_of([1, 1, 2]), **asked)
    (moved,) = loss["follow_ups"]
    assert loss["then"] == moved["policy"] == "normalise"
    assert moved["moved_bytes"] == 1000
    assert moved["step_s"] < loss["policies"]["reroute"]["step_s"]
    slow = replace(LINKS, inter_node_bytes_per_s=1e3)
    never = with_small_sums(profile_of([1, 1, 2], state=10**11, links=slow))
    (loss,) = after(never, **asked)
    (refused,) = loss["follow_ups"]
    assert refused.keys() == {"policy", "refused"}
    assert refused["policy"] == "normalise"
    assert "s of copying" in refused["refused"]


def test_the_next_loss_comes_ahead_of_what_follows_the_one_before() -> None:
    links = replace(LINKS, inter_node_bytes_per_s=500.0)
    profile = with_small_sums(profile_of([0.07] * 8, memory=5000, links=links))
    first, second = after(profile, nodes=6, global_batch=18, policy="auto", lost=2)
    assert first["follow_ups"][0]["rule"] == "normalise", "a stage is moved behind n1"
    assert (first["lost"], second["lost"]) == ("n2", "n1")
    assert second["policies"]["reroute"]["plan"] == "4 routes over 4 nodes"
    assert first["plan"].keys() == {"routes", "idle", "step_s"}


def test_the_taken_answer_is_among_those_of_the_policies() -> None:
    profile = profile_of([0.07] * 8, memory=5000)
    for policy in get_args(RecoveryPolicy):
        for nodes in (5, 6, 7, 8, 9):
            (loss,) = after(profile, nodes=nodes, global_batch=18, policy=policy)
            if loss["policy"] is not None:
                told = loss["policies"][loss["policy"]]
                assert told["step_s"] == pytest.approx(loss["plan"]["step_s"]), (policy, nodes)


def test_nothing_follows_where_nothing_is_done() -> None:
    profile = profile_of([0.1] * 8, memory=5000)
    *_, last = after(profile, nodes=5, global_batch=16, lost=4)
    assert (last["plan"], last["then"], last["follow_ups"]) == (None, None, [])
