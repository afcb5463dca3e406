"""What follows a plan around slow workers; the transcripts with `uneven` have the rest."""

from typing import Literal

import pytest

from oobleck.master.rules.stragglers.uneven import what_follows
from oobleck.planner.recovery.answer import Answer
from oobleck.planner.recovery.reconfigure import Reconfiguration
from oobleck.planner.recovery.rules import Next, Rule
from support.plans import plan_of_cuts


@pytest.mark.parametrize(
    ("due", "rule", "then", "follows"),
    [
        ("templates", "partial reroute", "shadow", "templates"),
        ("templates", "partial reroute", None, "templates"),
        # These are templates already.
        ("templates", "stand by", "shadow", "shadow"),
        ("templates", "take back", None, ""),
        ("shadow", "recut", None, ""),
        ("", "recut", "shadow", "shadow"),
    ],
)
def test_templates_that_are_due_stay_so(
    due: Next | Literal[""], rule: Rule, then: Next | None, follows: str
) -> None:
    found = Reconfiguration(plan=plan_of_cuts(([1, 1], 2)), rule=rule, reason="")
    answer = Answer(policy="uneven", found=found, moved_bytes=0, stall_s=0.0, step_s=1.0, then=then)
    assert what_follows(due, answer) == follows
