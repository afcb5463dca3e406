"""The choice of an answer among candidates, by what is known at that moment. Pure, and quick.

The planner makes candidates without knowing the time; this module weighs them. The value of a
course is the number of steps that it is expected to commit until the next change or the job's end:

    value = integral of rate(t) exp(-t / wait) dt  -  P(the change takes the last holders) * undone

where `wait` is the expected time until the next change, an event or a join, and `undone` are the
steps that a return to the checkpoint costs. Changes are exponential, so what comes after the next
one is alike for all. A join ends what a course risks or gives away until then.

Owns phases, values and the choice. Must not know how a candidate was made.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from oobleck.core.errors import PlanInfeasible
from oobleck.planner.recovery.answer import Answer, Exposure, RunnerUp
from oobleck.planner.recovery.outlook import Outlook
from oobleck.planner.recovery.rules import Next

#: Steps from a plan for a step boundary until workers are ready to switch, to connect and to catch
#: up, beside one for each layer that one of them copies to another (`python -m bench.simulated`).
READY_STEPS = 1.8
#: Courses this close in value are equal: estimates are not more exact.
TIE = 0.005
#: Bytes this close are equal.
_ALIKE = 0.05
#: Least share of a step's time that a voluntary change must save.
LEAST_GAIN = 0.03
#: Share, and seconds, by which a step may get longer where nodes join: estimates of the short steps
#: of small models are rough, and their users expect every node to be used. A choice, not a
#: measurement.
_LONGER, _NOISE_S = 0.01, 0.005
#: Least seconds of a step, seen or by its profile, for which the steps seen tell how far the
#: profile is wrong: shorter ones are mostly overhead, which is alike in all plans. And the most
#: that is believed.
_LEAST_SEEN_S, _MOST_RATIO = 0.5, 100.0
#: Clause of the reason where losses that come faster than expected decided.
_OF_A_STORM = "; losses come faster than expected"
#: Least time of a step: a profile may say that layers take none.
_LEAST_STEP_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Part of a transition."""

    #: Infinite for the last one.
    seconds: float
    steps_per_s: float
    exposure: Exposure | None = None


class Copying(msgspec.Struct, frozen=True, kw_only=True):
    """Copying that has to be over before workers can switch to a plan at a step boundary."""

    #: Steps of the running plan that pass until then, at least.
    steps: float = 0.0
    #: Seconds of copying.
    seconds: float = 0.0
    moved_bytes: int = 0

    def whole_steps(self, step_s: float) -> int:
        """Return how many steps of so many seconds pass until the switch, counting the one in which
        it is asked for."""
        return 1 + math.ceil(max(self.steps, self.seconds / step_s))

    def paced(self, factor: float) -> "Copying":
        """Return this with transfers that take so many times as long."""
        return msgspec.structs.replace(self, seconds=self.seconds * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Course of action: the answer at once, the one that follows at a step boundary, and the
    shadows that follow that."""

    first: Answer
    behind: Answer | None = None
    #: `late_s` of `behind` at a step boundary of `first`; its own is for a loss.
    behind_late_s: float = 0.0
    #: Copying for `behind`, beside steps of `first`; None: nothing is behind it.
    copying: Copying | None = None
    #: Copying of shadows beside steps of the last plan, and seconds of a step with them, as
    #: `weighed_s` has them and no shorter than without; None: no shadows follow it.
    shadowing: Copying | None = None
    shadowed_s: float | None = None
    #: Follow-up of `first` where nothing is `behind` it, if that is not its own.
    then: Next | None = None
    #: Nodes that can be lost in the end, as far as the job asks for that, and what is held then.
    guarantee: int
    #: Exposure of the last plan, with its shadows.
    exposure: Exposure
    #: Whether its plans are made to let more nodes be lost than the job asks for.
    beyond: bool = False

    @property
    def last(self) -> Answer:
        return self.behind or self.first

    @property
    def is_plain(self) -> bool:
        """Return whether this is what the policy `templates` does."""
        is_shape = self.first.policy == "templates" and not self.first.anew
        return is_shape and self.behind is None and not self.beyond

    @property
    def goes_back(self) -> bool:
        """Return whether the state comes from the newest checkpoint."""
        return self.first.policy == "morph"

    @property
    def moved_bytes(self) -> int:
        shadows = self.shadowing.moved_bytes if self.shadowing else 0
        return self.first.moved_bytes + (self.behind.moved_bytes if self.behind else 0) + shadows

    def phases(
        self, outlook: Outlook, before: Exposure | None, staying: "Staying | None"
    ) -> list[Phase]:
        """Return the phases of the transition. `before`: what is held until state has moved.
        `staying`: the running plan, where it trains while state is copied.

        A follow-up costs whole steps of the first plan: its switch waits for a step boundary.
        """
        first = self.first
        found = []
        stall_s = outlook.rejoin_s + first.stall_s
        if staying is not None:
            stall_s = outlook.switch_s + first.late_s
        if self.goes_back:
            stall_s += outlook.back_s
        if staying is not None:
            found.append(
                Phase(
                    seconds=first.stall_s,
                    steps_per_s=1 / staying.weighed_s,
                    exposure=before,
                )
            )
        found.append(Phase(seconds=stall_s, steps_per_s=0.0, exposure=before))
        step_s = weighed_s(first)
        if self.copying is not None:
            kept = outlook.kept if staying is None else 0.0
            found += [
                Phase(
                    seconds=(self.copying.whole_steps(step_s) - kept) * step_s,
                    steps_per_s=1 / step_s,
                    exposure=first.exposure,
                ),
                Phase(
                    seconds=outlook.switch_s + self.behind_late_s,
                    steps_per_s=0.0,
                    exposure=first.exposure,
                ),
            ]
        last_s = weighed_s(self.last)
        found += _until_shadowed(self.shadowing, last_s, self.last.exposure)
        last_s = self.shadowed_s or last_s
        return [*found, Phase(seconds=math.inf, steps_per_s=1 / last_s, exposure=self.exposure)]

    @property
    def answer(self) -> Answer:
        if self.behind is None:
            return replace(self.first, then=self.then) if self.then else self.first
        if self.behind.policy == "normalise":
            return replace(self.first, then="normalise")
        # Behind a re-routed plan templates follow in any case, and may take that shape too.
        anew = self.behind.anew and self.first.policy == "templates"
        return replace(self.first, then="anew" if anew else "templates")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staying:
    """The running plan, where it trains until a step boundary."""

    #: Seconds of a step, and the factor for a split backward.
    step_s: float
    weight: float
    guarantee: int
    #: Exposure with the shadows that follow.
    exposure: Exposure
    #: Copying of these, and seconds of a step with them, as `weighed_s` has them; None: none
    #: follow.
    shadowing: Copying | None = None
    shadowed_s: float | None = None

    @property
    def weighed_s(self) -> float:
        return max(self.step_s * self.weight, _LEAST_STEP_S)

    def phases(self, before: Exposure | None) -> list[Phase]:
        """Return the phases of staying. `before`: what is held without the shadows that follow."""
        shadowed_s = self.shadowed_s or self.weighed_s
        return [
            *_until_shadowed(self.shadowing, self.weighed_s, before),
            Phase(seconds=math.inf, steps_per_s=1 / shadowed_s, exposure=self.exposure),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Courses to choose from, at least one."""

    courses: tuple[Course, ...]
    #: Number of live nodes.
    live: int
    #: None: workers stand still until the change.
    staying: Staying | None = None
    #: True if staying is no choice: a node is drained.
    forced: bool = False
    #: True if a step has to get shorter to be worth a change; else it must not get longer.
    to_gain: bool = False
    #: True if only the value counts, with its risk: the change is behind an answer to a loss.
    by_value: bool = False
    #: Answer where staying is better than all of them.
    instead: Answer | None = None
    #: What is held until the state has moved.
    before: Exposure | None = None
    #: Seconds of a step of the running plan, as `weighed_s` has them; None: it has none.
    running_s: float | None = None


def weighed_s(answer: Answer) -> float:
    """Return the seconds of a step, with the cost of a split backward that profiles lack."""
    return max(answer.step_s * answer.weight, _LEAST_STEP_S)


def expected_steps(
    phases: Sequence[Phase], outlook: Outlook, nodes: int, *, until_s: float, undone: float
) -> float:
    """Return the steps that are expected to be committed until the next change, at most until then,
    less the `undone` steps of a return where it is an event that takes last holders."""
    wait_s = outlook.change_s(nodes)
    undone *= wait_s / outlook.wait_s(nodes)  # other changes are joins
    value = at = 0.0
    for phase in phases:
        end = min(at + phase.seconds, until_s)
        if end <= at:
            continue
        chance = math.exp(-at / wait_s) * -math.expm1(-(end - at) / wait_s)
        value += phase.steps_per_s * wait_s * chance
        if phase.exposure is not None:
            value -= chance * phase.exposure.share(outlook.sizes, outlook.whole_rack) * undone
        at = end
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class _Option:
    """Course with its value."""

    course: Course
    phases: Sequence[Phase]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scale:
    """Values of courses under one outlook."""

    outlook: Outlook
    live: int
    until_s: float
    #: Steps that a return undoes: alike for all, so that a faster course is never worse for it.
    undone: float
    #: Values this close are equal.
    close_by: float = 0.0

    @classmethod
    def of(
        cls, ways: Sequence[Sequence[Phase]], outlook: Outlook, live: int, until_s: float
    ) -> "_Scale":
        fastest = max(phases[-1].steps_per_s for phases in ways)
        undone = outlook.undone_steps(fastest, outlook.change_s(live))
        found = cls(outlook=outlook, live=live, until_s=until_s, undone=undone)
        return replace(found, close_by=TIE * max(map(found.without_risk, ways)))

    def value(self, phases: Sequence[Phase]) -> float:
        return self._steps(phases, self.undone)

    def without_risk(self, phases: Sequence[Phase]) -> float:
        return self._steps(phases, 0.0)

    def is_better(self, phases: Sequence[Phase], other: Sequence[Phase]) -> bool:
        """Return whether these phases are clearly better than others."""
        return self.value(phases) >= self.value(other) + self.close_by

    def _steps(self, phases: Sequence[Phase], undone: float) -> float:
        return expected_steps(phases, self.outlook, self.live, until_s=self.until_s, undone=undone)


def _until_shadowed(
    shadowing: Copying | None, step_s: float, exposure: Exposure | None
) -> list[Phase]:
    """Return the phase of a plan while its shadows are copied: what it holds itself is all there
    is."""
    if shadowing is None:
        return []
    copied_s = shadowing.whole_steps(step_s) * step_s
    return [Phase(seconds=copied_s, steps_per_s=1 / step_s, exposure=exposure)]


def _switched_s(phases: Sequence[Phase]) -> float:
    """Return the seconds until the last plan trains."""
    stands = [number for number, phase in enumerate(phases) if not phase.steps_per_s]
    return sum(phase.seconds for phase in phases[: stands[-1] + 1]) if stands else 0.0


def _finished_s(phases: Sequence[Phase], steps: float) -> float:
    """Return the seconds after which so many steps are committed."""
    at = 0.0
    for phase in phases:
        made = phase.seconds * phase.steps_per_s if phase.steps_per_s else 0.0
        if phase.steps_per_s and made >= steps:
            return at + steps / phase.steps_per_s
        steps -= made
        at += phase.seconds
    return at


def _paced(course: Course, factor: float) -> Course:
    """Return the course with transfers that take so many times as long."""
    if factor == 1:
        return course
    return replace(
        course,
        first=_paced_answer(course.first, factor),
        behind=course.behind and _paced_answer(course.behind, factor),
        behind_late_s=course.behind_late_s * factor,
        copying=course.copying and course.copying.paced(factor),
        shadowing=course.shadowing and course.shadowing.paced(factor),
    )


def _paced_answer(answer: Answer, factor: float) -> Answer:
    return replace(answer, stall_s=answer.stall_s * factor, late_s=answer.late_s * factor)


def choose(found: Candidates, outlook: Outlook) -> Answer:
    """Return the answer of the best course, with what is expected of it and of the best one of
    another policy or rule.

    The highest guarantee comes first, then the value. Within half a percent of the highest value,
    a course that is made for the fault tolerance alone is taken if there is one, then the one that
    moves fewest bytes, then the one that lets most nodes be lost. Where returns cost the best of
    those less than half a percent, there is no other choice. Nor is one that is worse than plain
    templates if losses go on to come as often as they did: the prior may hide a storm. Times of
    transfers in the answer are as the outlook tells, those of steps as the profile does. Raises
    PlanInfeasible where staying is better.
    """
    ratio = 1.0
    seen_s, told_s = outlook.step_s, found.running_s
    if seen_s and told_s and max(seen_s, told_s) >= _LEAST_SEEN_S:
        ratio = min(max(seen_s / told_s, 1 / _MOST_RATIO), _MOST_RATIO)
    return _paced_answer(_choose(found, outlook.in_units_of(ratio), ratio), ratio)


def _choose(found: Candidates, outlook: Outlook, unit_s: float) -> Answer:
    """Return the answer of the best course. All times are in units of so many seconds, in which
    steps take as long as the profile says."""
    staying = found.staying
    courses = [_paced(course, outlook.transfers) for course in found.courses]
    ways = [course.phases(outlook, found.before, staying) for course in courses]
    until_s = _until_s(ways, outlook, staying)
    scale = _Scale.of(ways, outlook, found.live, until_s)
    storm = outlook.in_storm and _Scale.of(ways, outlook.in_storm, found.live, until_s)
    options = [
        _Option(
            course=course,
            phases=phases,
            value=scale.value(phases) - (outlook.behind_steps if course.goes_back else 0.0),
        )
        for course, phases in zip(courses, ways, strict=True)
    ]
    taken = favourite = _best(options, scale)
    if storm:
        taken = _best(_no_worse_in_a_storm(options, storm), scale)
    because = _OF_A_STORM if taken is not favourite else ""
    best = taken.course
    others = [
        RunnerUp(policy=one.policy, rule=one.found.rule, value=option.value)
        for option in options
        if (one := option.course.first).policy != best.first.policy
        or one.found.rule != best.first.found.rule
    ]
    if staying is not None and not found.forced:
        stays = staying.phases(found.before)
        worth = _is_worth_it(taken, stays, found, scale)
        stands_s = outlook.switch_s + best.first.late_s
        why = _why_stay(best, staying, found, until_s, stands_s, unit_s, worth=worth)
        if why and found.by_value and storm and storm.is_better(taken.phases, stays):
            why = _why_stay(best, staying, found, until_s, stands_s, unit_s, worth=True)
            because = _OF_A_STORM
        if why:
            within = tuple(course for course in found.courses if not course.beyond)
            if best.beyond and within:
                return _choose(replace(found, courses=within), outlook, unit_s)
            if found.instead is not None:
                return _paced_answer(found.instead, outlook.transfers)
            raise PlanInfeasible(why)
        others.append(RunnerUp(policy="stay", rule="stay", value=scale.value(stays)))
    runner_up = max(others, key=lambda one: one.value, default=None)
    answer = replace(best.answer, value=taken.value, runner_up=runner_up)
    if not because:
        return answer
    return replace(answer, found=replace(answer.found, reason=answer.found.reason + because))


def _until_s(ways: Sequence[Sequence[Phase]], outlook: Outlook, staying: Staying | None) -> float:
    """Return the seconds until the job's end; infinity: it is not known."""
    if staying is None:
        steps = outlook.left_steps
        return math.inf if steps is None else min(_finished_s(phases, steps) for phases in ways)
    if outlook.left_s is None:
        return math.inf
    # Estimates of the short steps of small models are rough.
    return max(outlook.left_s, (outlook.left_steps or 0.0) * staying.weighed_s)


def _is_worth_it(taken: _Option, stays: Sequence[Phase], found: Candidates, scale: _Scale) -> bool:
    """Return whether the option is worth a change from a plan that `stays`.

    Where nodes join, neither a risk nor a step that is a little longer keeps them idle, if the job
    lasts beyond the switch.
    """
    if found.to_gain or found.by_value:
        return taken.value >= scale.value(stays) + scale.close_by
    least = min(map(scale.without_risk, (stays, _longer(stays, taken.course))))
    in_time = _switched_s(taken.phases) < scale.until_s
    return in_time and scale.without_risk(taken.phases) >= least - scale.close_by


def _best(options: Sequence[_Option], scale: _Scale) -> _Option:
    """Return the option to take by its guarantee, its value and what it moves."""
    most = max(one.course.guarantee for one in options)
    options = [one for one in options if one.course.guarantee == most]
    within = [one for one in options if not one.course.beyond]
    if within:  # without a risk, more steps now may be fewer after the next losses
        safest = max(within, key=lambda one: one.value)
        if scale.without_risk(safest.phases) - scale.value(safest.phases) < scale.close_by:
            options = within
    highest = max(one.value for one in options)
    close = [one for one in options if one.value >= highest - scale.close_by]
    close = [one for one in close if not one.course.beyond] or close
    fewest = min(one.course.moved_bytes for one in close)
    return max(
        (one for one in close if one.course.moved_bytes <= (1 + _ALIKE) * fewest),
        key=lambda one: (one.course.exposure.can_lose, one.value, -one.course.moved_bytes),
    )


def _no_worse_in_a_storm(options: Sequence[_Option], storm: _Scale) -> Sequence[_Option]:
    """Return the options that are no worse than plain templates if losses go on to come as often as
    they did; all of them if no option is plain templates, or others let more nodes be lost."""
    most = max(one.course.guarantee for one in options)
    for plain in options:
        if plain.course.is_plain and plain.course.guarantee == most:
            return [one for one in options if not storm.is_better(plain.phases, one.phases)]
    return options


def _longer(stays: Sequence[Phase], best: Course) -> Sequence[Phase]:
    """Return the phases of staying at the step time of a course that may be longer."""
    return [replace(one, steps_per_s=1 / weighed_s(best.first)) for one in stays]


def _why_stay(
    best: Course,
    staying: Staying,
    found: Candidates,
    until_s: float,
    stands_s: float,
    unit_s: float,
    *,
    worth: bool,
) -> str:
    """Return why staying is better; empty if it is not. A plan that lets more nodes be lost, as far
    as the job asks for that, is worth any step. `stands_s`: standstill of its switch, in units of
    `unit_s`; `worth`: by its value."""
    first = best.first
    if best.guarantee > staying.guarantee or first.undoes:
        return ""
    if best.guarantee < staying.guarantee:
        return f"{first.found.reason}: fewer nodes could be lost"
    then_s, now_s = weighed_s(first), staying.weighed_s
    step_s, staying_s = unit_s * first.step_s, unit_s * staying.step_s
    told = f"a step would take {step_s:.4g} s in place of {staying_s:.4g} s"
    if first.weight > staying.weight:
        told += ", with backwards split"
    most_s = now_s + max(_LONGER * now_s, _NOISE_S)
    if found.to_gain:
        most_s = (1 - LEAST_GAIN) * now_s
    if then_s > most_s and not (found.by_value and worth):
        return f"{told}: not worth a change"
    if not worth:
        copied_s, stands_s, left_s = (unit_s * each for each in (first.stall_s, stands_s, until_s))
        left = f" for the {left_s:.3g} s that are left" if math.isfinite(left_s) else ""
        return (
            f"{told}, after {copied_s:.3g} s of copying and {stands_s:.3g} s of standstill: not "
            f"worth a change{left}"
        )
    return ""
