"""Policies that answer a change of the nodes, and the choice among them.

- `templates` (Oobleck §5): a plan of templates for the live nodes; state moves before the next
  step.
- `reroute` (ReCycle, SOSP 2024): the micro-batches of lost workers go to live holders of their
  layers; no state moves, so training continues at once. `normalise` (also there) then moves one
  stage, so that holes are at different layers.
- `uneven` (Malleus): where no node is lost, by the current speed of each worker.
- `shadow` (Bamboo, NSDI 2023) answers no loss itself. After an answer, nodes get copies of layers
  that too few hold, and `reroute` uses them at the next loss.
- `auto` compares the first two, and `reroute` followed by `templates`, by the steps that each
  commits until the next loss is expected (`Course`).

Owns the choice. Must not know how a policy makes its plan.
"""

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from oobleck.core.errors import PlanInfeasible
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan
from oobleck.planner.recovery.answer import Answer, Change, Policy, RunnerUp, situation
from oobleck.planner.recovery.normalise import normalised, promising
from oobleck.planner.recovery.reconfigure import HORIZON_S
from oobleck.planner.recovery.uneven.candidates import staying_s
from oobleck.planner.recovery.worth import (
    CHANGE_S,
    LEAST_GAIN,
    by_reroute,
    by_templates,
    can_lose_behind,
    routed_at_least,
    shadowed,
    shadows_behind,
    splitting_weight,
)

#: Courses this close in committed steps are equal: estimates are not more exact.
_TIE = 0.01
#: Seconds by which a step may get longer, too: estimates of the short steps of small models are
#: rough, and their users expect every node to be used. A choice, not a measurement.
_NOISE_S = 0.005
#: Least time of a step: a profile may say that layers take none.
_LEAST_STEP_S = 1e-9
_TEMPLATES_FIRST: tuple[Policy, Policy] = ("templates", "reroute")
_REROUTE_FIRST: tuple[Policy, Policy] = ("reroute", "templates")
#: Answer of each policy to a change, or its refusal.
Answers = Mapping[Policy, Answer | PlanInfeasible]


def answer(change: Change, wanted: RecoveryPolicy, known: Answers | None = None) -> Answer:
    """Decide the answer to a change, with what is expected of it and of the best one not taken.

    `known`: `answers(change)`, for a caller that has it already.

    With `auto` a loss is answered by the best of the courses that `_courses` lists. Where the job
    names `reroute`, `normalise` follows if it promises a shorter step, and `shadow` after that.

    If the preferred policy has no answer the other one is used, and the reason says so. Fewer nodes
    than templates need may hold all layers, some as shadows. Raises PlanInfeasible where there is
    no answer.
    """
    found = _answer(change, wanted, known)
    if found.value is not None:
        return found
    return replace(found, value=Course(first=found).steps(change))


def _answer(change: Change, wanted: RecoveryPolicy, known: Answers | None) -> Answer:
    lost = not frozenset(change.live).issuperset(change.plan.nodes)
    first, other = _REROUTE_FIRST if wanted == "reroute" and lost else _TEMPLATES_FIRST
    try:
        found = _made(first, change, known)
    except PlanInfeasible as infeasible:
        return _instead(other, first, infeasible, change, known)
    if first == "reroute" and promising(change, found.found.plan):
        return replace(found, then="normalise")
    if wanted == "auto" and lost:
        return _best(*_courses(found, change, known), change)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Course of action after a loss: the answer at once, and the one that follows at a step
    boundary."""

    first: Answer
    behind: Answer | None = None

    def steps(self, change: Change) -> float:
        """Return the steps that are committed within HORIZON_S."""
        return _steps(self.first.stall_s, _step_s(self.first), self.behind, change)

    def guarantee(self, change: Change) -> int:
        return _guarantee((self.behind or self.first).found.plan, change)

    @property
    def moved_bytes(self) -> int:
        return self.first.moved_bytes + (self.behind.moved_bytes if self.behind else 0)

    @property
    def answer(self) -> Answer:
        return self.first if self.behind is None else replace(self.first, then="templates")


def _guarantee(plan: Plan, change: Change) -> int:
    """Return how many nodes can be lost in the end, as far as the job asks for that."""
    return min(can_lose_behind(plan, change), change.fault_tolerance)


def _steps(stall_s: float, step_s: float, behind: Answer | None, change: Change) -> float:
    """Return the steps within HORIZON_S of a plan with that standstill before it, and of `behind`.

    The follow-up costs whole steps of the first plan: its state is copied while that one trains,
    and the switch waits for a step boundary.
    """
    step_s = max(step_s, _LEAST_STEP_S)
    whole_s = max(0.0, HORIZON_S - stall_s)
    if behind is None:
        return whole_s / step_s
    before = 1 + math.ceil(behind.stall_s / step_s)
    left_s = whole_s - before * step_s - CHANGE_S - behind.outrun_s
    if left_s <= 0:
        return whole_s / step_s
    return before + left_s / max(_step_s(behind), _LEAST_STEP_S)


def _step_s(answer: Answer) -> float:
    return answer.step_s * splitting_weight(answer.found.plan)


def _courses(
    moved: Answer, change: Change, known: Answers | None
) -> tuple[list[Course], RunnerUp | None]:
    """List the courses for a loss to which `moved` is the answer of `templates`; also return the
    re-routed plan that was left out, with the most steps that it could have.

    A re-routed plan stays for good only if the steps of `moved` are not the shorter ones: the time
    until the next loss is not known.

    Scheduling a re-routed plan takes long, and the loss waits for it. So it is left out if it is
    the worse course even at the time of its busiest worker's compute, which no schedule beats.
    """
    courses = [Course(first=moved)]
    if known is None:
        most = _most_by_reroute(moved, change)
        if most is None:
            return courses, None
        if most < (1 - _TIE) * courses[0].steps(change):
            return courses, RunnerUp(policy="reroute", rule="reroute", value=most)
    with suppress(PlanInfeasible):
        routed = _made("reroute", change, known)
        courses.append(Course(first=routed, behind=moved))
        if _step_s(moved) > (1 - LEAST_GAIN) * _step_s(routed):
            courses.append(Course(first=routed))
    return courses, None


def _most_by_reroute(moved: Answer, change: Change) -> float | None:
    """Return the most steps of a course that begins with a re-routed plan; None: there is none.
    Infinite where it keeps a higher guarantee than `moved`."""
    try:
        routed, least_s = routed_at_least(change)
    except PlanInfeasible:
        return None
    if can_lose_behind(routed, change) > can_lose_behind(moved.found.plan, change):
        return math.inf
    return max(_steps(0.0, least_s, None, change), _steps(0.0, least_s, moved, change))


def _best(courses: list[Course], left_out: RunnerUp | None, change: Change) -> Answer:
    """Return the answer of the best course.

    The highest guarantee comes first, then the most steps. Within 1 % of the most, the course that
    moves fewest bytes is taken, then the one that commits most.
    """
    kept = [course.guarantee(change) for course in courses]
    equal = [course for course, own in zip(courses, kept, strict=True) if own == max(kept)]
    most = max(course.steps(change) for course in equal)
    close = [course for course in equal if course.steps(change) >= (1 - _TIE) * most]
    best = min(close, key=lambda one: (one.moved_bytes, -one.steps(change)))
    others = [
        RunnerUp(policy=one.policy, rule=one.found.rule, value=course.steps(change))
        for course in courses
        if (one := course.first).policy != best.first.policy
    ]
    runner_up = max(others, key=lambda one: one.value, default=left_out)
    return replace(best.answer, value=best.steps(change), runner_up=runner_up)


def _instead(
    other: Policy, first: Policy, why: PlanInfeasible, change: Change, known: Answers | None
) -> Answer:
    """Answer by the other policy, with the first one's refusal in the reason. Where both refuse,
    the error of `templates` is raised, since an operator can act on that."""
    try:
        found = _made(other, change, known)
    except PlanInfeasible as infeasible:
        raise (infeasible if other == "templates" else why) from None
    reason = f"{found.found.reason}; not by {first}: {why}"
    return replace(found, found=replace(found.found, reason=reason))


def unforced(change: Change) -> Answer:
    """Answer with a plan of templates where nothing forces a change: nodes have joined, or a
    re-routed plan trains. Raises PlanInfeasible if staying is better.

    A plan that lets more nodes be lost, as far as the job asks for that, is worth any step.
    """
    found = by_templates(change)
    if not frozenset(change.live).issuperset(change.plan.nodes):
        return found
    kept, now = _guarantee(found.found.plan, change), _guarantee(change.plan, change)
    if kept > now:
        return replace(found, value=Course(first=found).steps(change))
    if kept < now:
        raise PlanInfeasible(f"{found.found.reason}: fewer nodes could be lost")
    staying = staying_s(situation(change))
    now_s = max(staying * splitting_weight(change.plan), _LEAST_STEP_S)
    then_s = max(_step_s(found), _LEAST_STEP_S)
    # Training goes on until the switch, so only what cannot be copied ahead costs anything.
    value = max(0.0, HORIZON_S - CHANGE_S - found.outrun_s) / then_s
    longer = then_s > now_s + max(_TIE * now_s, _NOISE_S)
    if longer or value < (1 - _TIE) * HORIZON_S / max(now_s, then_s):
        why = f"a step would take {found.step_s:.4g} s in place of {staying:.4g} s"
        if not longer:
            why += f", and training would stand still for {found.outrun_s:.3g} s"
        raise PlanInfeasible(f"{why}, by {found.found.reason}: not worth a change")
    runner_up = RunnerUp(policy="stay", rule="stay", value=HORIZON_S / now_s)
    return replace(found, value=value, runner_up=runner_up)


def behind(change: Change, wanted: Literal["shadow", "normalise"]) -> Answer:
    """Return the follow-up of an answer at a step boundary; shadows also where no stage is worth
    moving. Raises PlanInfeasible."""
    if wanted == "shadow":
        return shadowed(change)
    try:
        return normalised(change)
    except PlanInfeasible:
        if shadows_behind(change.plan, change) is not None:
            with suppress(PlanInfeasible):
                return shadowed(change)
        raise


def answers(change: Change) -> Answers:
    """Return every policy's own answer, or its refusal."""
    found: dict[Policy, Answer | PlanInfeasible] = {}
    for policy, make in _MAKERS.items():
        try:
            found[policy] = make(change)
        except PlanInfeasible as infeasible:
            found[policy] = infeasible
    return found


def _made(policy: Policy, change: Change, known: Answers | None) -> Answer:
    found = known[policy] if known is not None else _MAKERS[policy](change)
    if isinstance(found, PlanInfeasible):
        raise found
    return found


_MAKERS: Mapping[Policy, Callable[[Change], Answer]] = {
    "templates": by_templates,
    "reroute": by_reroute,
}
