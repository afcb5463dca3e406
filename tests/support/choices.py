"""Choices among candidates where the next loss is expected in ten minutes."""

from oobleck.planner.recovery.answer import Answer, Change
from oobleck.planner.recovery.chooser import Candidates, choose
from oobleck.planner.recovery.outlook import expecting
from oobleck.planner.recovery.policies import around_slow, behind, unforced

WAIT_S = 600.0


def chosen(found: Candidates) -> Answer:
    """Raises PlanInfeasible."""
    return choose(found, expecting(WAIT_S, found.live))


def for_slow(change: Change) -> Answer:
    """Raises PlanInfeasible."""
    return chosen(around_slow(change))


def for_joins(change: Change) -> Answer:
    """Raises PlanInfeasible."""
    return chosen(unforced(change))


def with_stage_moved(change: Change) -> Answer:
    """Raises PlanInfeasible."""
    return chosen(behind(change, "moved"))
