"""What plans are asked for, and the answers: data that can go to another process and back.

A first plan of a large cluster takes seconds, and the loop that hears a thousand nodes has none to
spare. So rules ask a `Planner`, which either has the answer or is told after the decision what is
wanted; the loop goes on, and the rules ask again when the answer is there. By then the question may
be another one. Owns what is asked and what is remembered; must not know how a plan is made, nor
where.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from oobleck.master.planning.machines import Machines
from oobleck.planner.ids import Generation, NodeName
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.programs.plan import Plan
from oobleck.planner.recovery.reconfigure import Reconfiguration

#: Answers that are kept beside those that the last decision has asked for.
_KEPT = 8


class FirstPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first plan of a job on these nodes."""

    spec: JobSpec
    machines: Machines
    nodes: tuple[NodeName, ...]
    generation: Generation


class NextPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What becomes of `plan` on `nodes`. `most_nodes`: so many did any plan of the job have."""

    spec: JobSpec
    machines: Machines
    plan: Plan
    nodes: tuple[NodeName, ...]
    most_nodes: int
    generation: Generation


Question = FirstPlan | NextPlan


class Made(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `FirstPlan`."""

    plan: Plan


class Changed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `NextPlan`."""

    found: Reconfiguration


class NoPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """There is none; see `PlanInfeasible`."""

    causes: tuple[str, ...]


class Broken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An error of ours."""

    error: str


Answer = Made | Changed | NoPlan | Broken


class StillPlanning(Exception):
    """The answer is not there yet."""

    def __init__(self, question: Question) -> None:
        super().__init__(f"a plan for {len(question.nodes)} nodes is being made")
        self.question = question


class Planner(Protocol):
    """Whom the rules ask, and who is told what they wait for."""

    def answer(self, question: Question) -> Answer:
        """Raises StillPlanning."""

    def prepare(self) -> None:
        """There is a job: plans will be wanted."""

    def want(self, question: Question | None) -> None:
        """What the newest decision waits for; None: nothing."""

    def listen(self, tell: Callable[[], None]) -> None:
        """Call `tell` with each answer that comes."""


class Answers:
    """Those that are there, as many as the decisions of now need."""

    def __init__(self) -> None:
        #: Those asked for last come last; to compare questions costs milliseconds where plans are
        #: large.
        self._known: dict[Question, Answer] = {}
        #: How many were asked for since the last decision.
        self._used = 0

    def __contains__(self, question: Question) -> bool:
        return question in self._known

    def answer(self, question: Question) -> Answer:
        """Raises StillPlanning."""
        answer = self._known.pop(question, None)
        if answer is None:
            raise StillPlanning(question)
        self._known[question] = answer
        self._used += 1
        return answer

    def add(self, question: Question, answer: Answer) -> None:
        self._known[question] = answer

    def forget_unused(self) -> None:
        """A decision has been made: what it did not ask for, but for the newest, is let go. One
        that asks for many at once finds all of them again."""
        spare = len(self._known) - self._used - _KEPT
        for question in list(self._known)[: max(0, spare)]:
            del self._known[question]
        self._used = 0
