"""What follows a plan around slow workers; the transcripts with `uneven` have the rest."""

from typing import Literal

import pytest

from oobleck.planner.recovery.course import follow_up_of
from oobleck.planner.recovery.rules import Next, Rule


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
    assert follow_up_of(due, rule, then) == follows
