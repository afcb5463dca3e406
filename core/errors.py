"""Refusals of the planner; each carries its reason and its fix as data."""

from collections.abc import Iterable


class PlanInfeasible(ValueError):
    """Refusal to plan: no plan exists under the given limits. Each cause is one readable clause
    with its fix.
    """

    def __init__(self, *causes: str) -> None:
        super().__init__("; ".join(causes))
        self.causes = causes


class NoNodeReady(PlanInfeasible):
    """Refusal to plan for no node at all; the second cause is the fix."""


class ModelTooLarge(PlanInfeasible):
    """Model that is too large for any number of these nodes."""


class ProgramDeadlock(Exception):
    """Deadlock of a plan's programs; `waiting` names each waiter and its instruction."""

    def __init__(self, waiting: Iterable[str]) -> None:
        self.waiting = tuple(waiting)
        super().__init__("programs wait for each other: " + "; ".join(self.waiting))


class InvalidJob(ValueError):
    """Error of a job file; the text is one line with the place and the fix."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))
