"""The choice among courses: its values against drawn events, and what must never be taken."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import NodeName
from oobleck.planner.recovery.answer import Answer, Exposure
from oobleck.planner.recovery.chooser import (
    TIE,
    Candidates,
    Copying,
    Course,
    Phase,
    Staying,
    choose,
    expected_steps,
)
from oobleck.planner.recovery.outlook import (
    MTBF_S,
    REJOIN_S,
    SWITCH_S,
    TOGETHER_S,
    Losses,
    Outlook,
    best_interval_s,
    corrected,
    expecting,
    learned_pause_s,
    learned_share,
)
from oobleck.planner.recovery.policies import without_crowded
from oobleck.planner.recovery.rules import Reconfiguration
from support.plans import plan_of_cuts

PLAN = plan_of_cuts(([1, 1], 4), ([1, 1], 4))
SAFE = Exposure(nodes=4, sets=((2, 2),))
ALONE = Exposure(nodes=4, sets=((1, 4),))


def course(
    step_s: float,
    *,
    stall_s: float = 0.0,
    moved: int = 0,
    guarantee: int = 1,
    exposure: Exposure = SAFE,
    policy: str = "templates",
    behind: Answer | None = None,
) -> Course:
    made = Reconfiguration(plan=PLAN, rule="reshape", reason="a course")
    first = Answer(
        policy=policy,  # type: ignore[arg-type]
        found=made,
        moved_bytes=moved,
        stall_s=stall_s,
        step_s=step_s,
        weight=1.0,
        exposure=exposure,
    )
    return Course(
        first=first,
        behind=behind,
        copying=Copying(seconds=behind.stall_s) if behind else None,
        guarantee=guarantee,
        exposure=exposure,
    )


def forced(*courses: Course) -> Candidates:
    return Candidates(courses=courses, live=4, before=ALONE)


def test_a_plan_that_nccl_cannot_carry_is_no_choice_where_there_is_another() -> None:
    crowded = plan_of_cuts(([(1, 8), (1, 1), (1, 8)], 4))
    quick, slow = course(0.1), course(1.0)
    made = replace(quick.first.found, plan=crowded)
    quick = replace(quick, first=replace(quick.first, found=made))
    behind = replace(slow, behind=quick.first)
    found = without_crowded(forced(quick, slow, behind), tied=False)
    assert found.courses == (slow,)
    assert without_crowded(forced(quick, behind), tied=False).courses == (quick, behind)


# ---- Values


def drawn_steps(
    phases: Sequence[Phase],
    outlook: Outlook,
    nodes: int,
    until_s: float,
    undone: float,
    rounds: int = 40_000,
) -> float:
    """The mean over drawn events and joins of the steps committed until the first of them, less
    what a return undoes."""
    draw, wait_s, total = random.Random(7), outlook.wait_s(nodes), 0.0
    joins_per_s = outlook.joins_per_s
    for _ in range(rounds):
        event_s = draw.expovariate(1 / wait_s)
        join_s = draw.expovariate(joins_per_s) if joins_per_s else math.inf
        at, end = 0.0, min(event_s, join_s, until_s)
        for phase in phases:
            until = min(at + phase.seconds, end)
            total += phase.steps_per_s * max(0.0, until - at)
            if at <= event_s < min(at + phase.seconds, until_s, join_s) and phase.exposure:
                sizes, shares = zip(*outlook.sizes, strict=True)
                taken = draw.choices(sizes, shares)[0]
                total -= undone * phase.exposure.share(((taken, 1.0),))
            at += phase.seconds
    return total / rounds


@pytest.mark.parametrize("joins_per_s", [0.0, 1 / 150.0])
@pytest.mark.parametrize("until_s", [50.0, 400.0, math.inf])
def test_a_value_is_the_mean_over_drawn_events(until_s: float, joins_per_s: float) -> None:
    outlook = Outlook(
        per_node_s=1 / (4 * 100.0), joins_per_s=joins_per_s, sizes=((1, 0.7), (2, 0.3))
    )
    phases = [
        Phase(seconds=20.0, steps_per_s=0.0, exposure=ALONE),
        Phase(seconds=90.0, steps_per_s=0.5, exposure=ALONE),
        Phase(seconds=10.0, steps_per_s=0.0, exposure=SAFE),
        Phase(seconds=math.inf, steps_per_s=0.8, exposure=SAFE),
    ]
    value = expected_steps(phases, outlook, 4, until_s=until_s, undone=30.0)
    drawn = drawn_steps(phases, outlook, 4, until_s, 30.0)
    assert value == pytest.approx(drawn, abs=0.05 * 50)
    assert value == pytest.approx(drawn, rel=0.1, abs=0.6)


@pytest.mark.parametrize(
    ("pipelines", "within"),
    [
        ([([1, 1, 1], 4)] * 3, 1e-12),
        ([([2, 2, 1], 4)] * 2, 1e-12),
        ([([1] * 5, 4), ([2, 3], 4), ([2, 2, 1], 2), ([1, 4], 1)], 0.06),
        ([([1, 2], 4), ([2, 1], 4), ([1, 1, 1], 2)], 0.13),
    ],
)
def test_the_share_of_events_that_take_last_holders_is_that_of_all_groups_of_nodes(
    pipelines: Sequence[tuple[list[int], int]], within: float
) -> None:
    plan = plan_of_cuts(*pipelines)
    holders = [frozenset(own) for own in plan.layer_nodes()]
    apart = sum(map(len, set(holders))) <= len(plan.nodes)
    assert apart == (within < 0.01)
    for taken in range(1, len(plan.nodes) + 1):
        groups = list(combinations(plan.nodes, taken))
        hit = sum(any(own <= set(gone) for own in holders) for gone in groups)
        share = Exposure.of(plan).share(((taken, 1.0),))
        smallest = taken <= min(map(len, holders))
        assert share == pytest.approx(hit / len(groups), abs=1e-12 if smallest else within), taken


def test_for_large_groups_and_clusters_the_share_is_an_estimate() -> None:
    many = Exposure(nodes=1000, sets=((10, 100),))
    assert many.share(((9, 1.0),)) == 0
    assert 0 < many.share(((300, 1.0),)) < many.share(((500, 1.0),)) < 0.15


@pytest.mark.parametrize("labels", ["aabb", "abab", "abcd", "a.bb", "...."])
def test_the_share_of_events_counts_racks_whose_loss_takes_last_holders(labels: str) -> None:
    """The nodes n0 and n2, and n1 and n3, hold the same. An event takes a rack, or two nodes."""
    racks = {name: label.strip(".") for name, label in zip(PLAN.nodes, labels, strict=True)}
    own: dict[str, set[NodeName]] = {}
    for name, label in racks.items():
        own.setdefault(label, set()).add(name)
    several = [nodes for label, nodes in own.items() if label and len(nodes) > 1]
    losses = Losses()
    losses.pass_time(0.0, 4)
    whole = losses.rack_share(racks)
    assert whole == pytest.approx(len(several) / (len(several) + 4) if several else 0)
    draw, hits, rounds = random.Random(5), 0, 4000
    for _ in range(rounds):
        rack = draw.random() < whole
        gone = draw.choice(several) if rack else set(draw.sample(PLAN.nodes, 2))
        hits += any(nodes <= gone for nodes in PLAN.layer_nodes())
    share = Exposure.of(PLAN, racks=racks).share(((2, 1.0),), whole)
    assert share == pytest.approx(hits / rounds, abs=0.03)


def test_holders_in_one_rack_are_at_risk_where_racks_fail() -> None:
    racks = dict(zip(PLAN.nodes, "abab", strict=True))
    together = Exposure.of(PLAN, racks=racks)
    apart = Exposure.of(PLAN, racks=dict(zip(PLAN.nodes, "aabb", strict=True)))
    assert (together.fatal_racks, apart.fatal_racks) == (2, 0)
    risky, safe = course(1.0, exposure=together), course(1.1, exposure=apart)
    quiet = msgspec.structs.replace(expecting(1000.0, 4), behind_steps=5000, every_steps=math.inf)
    assert choose(forced(risky, safe), quiet).step_s == 1.0
    failing = msgspec.structs.replace(quiet, whole_rack=0.5)
    assert choose(forced(risky, safe), failing).step_s == 1.1


def test_a_risk_counts_until_nodes_come_in_place_of_lost_ones() -> None:
    """The plan that a join makes ends what another risks and what a longer step gives away."""
    risky, safe = course(1.0, exposure=ALONE), course(1.1)
    alone = msgspec.structs.replace(expecting(1000.0, 4), every_steps=math.inf, back_s=0.0)
    assert choose(forced(risky, safe), alone).step_s == 1.1
    awaited = msgspec.structs.replace(alone, joins_per_s=1 / 30.0)
    assert choose(forced(risky, safe), awaited).step_s == 1.0


@given(
    behind=st.floats(0, 50),
    every=st.floats(1, 100),
    rate=st.floats(0.01, 2),
    wait=st.floats(5, 500),
)
@settings(max_examples=20, deadline=None)
def test_a_return_undoes_the_steps_since_the_checkpoint_before_it(
    behind: float, every: float, rate: float, wait: float
) -> None:
    behind = min(behind, every)
    outlook = Outlook(behind_steps=behind, every_steps=every, back_s=0.0)
    draw = random.Random(3)
    mean = (
        sum(math.fmod(behind + rate * draw.expovariate(1 / wait), every) for _ in range(20_000))
        / 20_000
    )
    assert outlook.undone_steps(rate, wait) == pytest.approx(mean, rel=0.05, abs=0.02 * every)


@given(
    behind=st.floats(0, 50),
    due_s=st.floats(0, 400),
    every=st.floats(1, 100),
    rate=st.floats(0.01, 2),
    wait=st.floats(5, 500),
)
@settings(max_examples=20, deadline=None)
def test_a_return_undoes_less_where_the_clock_soon_makes_a_checkpoint(
    behind: float, due_s: float, every: float, rate: float, wait: float
) -> None:
    outlook = Outlook(behind_steps=behind, every_steps=every, next_s=due_s, back_s=0.0)
    draw, undone = random.Random(3), 0.0
    for _ in range(20_000):
        event_s = draw.expovariate(1 / wait)
        if event_s < due_s:
            undone += behind + rate * event_s
        else:
            undone += math.fmod(rate * (event_s - due_s), every)
    scale = every + behind + rate * min(due_s, wait)
    assert outlook.undone_steps(rate, wait) == pytest.approx(undone / 20_000, abs=0.02 * scale)


# ---- The choice


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_course_that_is_worse_in_every_respect_is_never_taken(data: st.DataObject) -> None:
    number = st.integers(1, 100)
    drawn = [
        course(
            data.draw(number) / 10,
            stall_s=data.draw(number),
            moved=100 * data.draw(number),
            guarantee=data.draw(st.integers(0, 2)),
            exposure=data.draw(st.sampled_from([SAFE, ALONE])),
        )
        for _ in range(data.draw(st.integers(2, 5)))
    ]
    # Beside each, one that is a little worse in every respect: a tie by value and bytes.
    worse = [
        course(
            1.001 * one.first.step_s,
            stall_s=1.001 * one.first.stall_s,
            moved=one.first.moved_bytes + 1,
            guarantee=one.guarantee,
            exposure=one.exposure,
        )
        for one in drawn
    ]
    drawn = data.draw(st.permutations([*drawn, *worse]))
    outlook = msgspec.structs.replace(
        expecting(data.draw(st.floats(10, 1e6)), 4),
        left_steps=data.draw(st.sampled_from([None, 5, 1000])),
        behind_steps=data.draw(st.integers(0, 100)),
        every_steps=data.draw(st.sampled_from([0.0, 100.0, math.inf])),
    )
    found = choose(forced(*drawn), outlook)
    (chosen,) = (one for one in drawn if one.first.found is found.found)
    assert chosen.guarantee == max(one.guarantee for one in drawn)
    for other in drawn:
        is_worse = (
            chosen.first.step_s > other.first.step_s
            and chosen.first.stall_s > other.first.stall_s
            and chosen.first.moved_bytes > other.first.moved_bytes
            and chosen.guarantee <= other.guarantee
            and chosen.exposure.can_lose <= other.exposure.can_lose
        )
        assert not is_worse


def test_among_equals_the_fewest_bytes_are_moved_then_most_holders_are_kept() -> None:
    outlook = expecting(1e5, 4)
    nearly = 1.0 + 0.9 * TIE
    many, few = course(1.0, moved=1000), course(nearly, moved=10)
    assert choose(forced(many, few), outlook).moved_bytes == 10
    assert choose(forced(many, course(1.0 + 3 * TIE, moved=10)), outlook).moved_bytes == 1000
    alone = course(1.0, moved=10, exposure=ALONE)
    assert choose(forced(alone, course(nearly, moved=10)), outlook).step_s == nearly


def test_how_long_a_plan_is_used_decides_what_a_standstill_is_worth() -> None:
    fast, ready = course(1.0, stall_s=60.0), course(1.2, policy="reroute")
    assert choose(forced(fast, ready), expecting(100.0, 4)).policy == "reroute"
    found = choose(forced(fast, ready), expecting(10_000.0, 4))
    assert found.policy == "templates"
    assert found.runner_up is not None
    assert found.runner_up.policy == "reroute"
    # So does what is left of the job.
    short = msgspec.structs.replace(expecting(10_000.0, 4), left_steps=50)
    assert choose(forced(fast, ready), short).policy == "reroute"


def test_transfers_that_took_long_are_expected_to_take_long_again() -> None:
    fast, ready = course(1.0, stall_s=2.0), course(1.01, policy="reroute")
    outlook = expecting(1000.0, 4)
    assert choose(forced(fast, ready), outlook).policy == "templates"
    factor = 1.0
    for _ in range(8):
        factor = corrected(factor, expected_s=2.0 * factor, happened_s=40.0)
    assert factor == pytest.approx(20.0, rel=0.02)
    slow = msgspec.structs.replace(outlook, transfers=factor)
    found = choose(forced(fast, ready), slow)
    assert found.policy == "reroute"
    assert choose(forced(fast), slow).stall_s == pytest.approx(40.0, rel=0.02)
    assert corrected(factor, expected_s=0.01, happened_s=40.0) == factor


def test_steps_that_take_longer_than_their_profile_says_make_a_follow_up_late() -> None:
    """The same world in the profile's seconds and in its own gives the same choice."""

    def ways(step_s: float) -> Candidates:
        fast = course(step_s, stall_s=2.0)
        return forced(fast, course(1.5 * step_s, policy="reroute", behind=fast.first))

    outlook = expecting(60.0, 4)
    assert choose(ways(1.0), outlook).policy == "reroute"
    slow = msgspec.structs.replace(outlook, step_s=9.0, transfers=1.1)
    found = replace(ways(1.0), running_s=0.9)
    taken = choose(found, slow)
    assert (taken.policy, taken.step_s) == ("templates", 1.0)
    assert taken.stall_s == pytest.approx(2.2), "as the outlook tells"
    world = choose(ways(10.0), msgspec.structs.replace(slow, step_s=None))
    assert (world.policy, world.stall_s) == ("templates", pytest.approx(2.2))
    assert world.value == pytest.approx(taken.value)
    # Steps of a few milliseconds are mostly overhead, whatever the plan.
    short = msgspec.structs.replace(slow, step_s=0.4)
    assert choose(replace(found, running_s=0.04), short).policy == "reroute"


def test_an_outlook_in_other_units_has_all_its_times_in_them() -> None:
    outlook = Outlook(
        per_node_s=0.5,
        seen_per_node_s=0.75,
        joins_per_s=0.25,
        left_steps=7.0,
        left_s=8.0,
        behind_steps=3.0,
        every_steps=9.0,
        next_s=16.0,
        back_s=24.0,
        rejoin_s=2.0,
        switch_s=4.0,
        kept=0.1,
        transfers=6.0,
        step_s=12.0,
    )
    assert outlook.in_units_of(4.0) == Outlook(
        per_node_s=2.0,
        seen_per_node_s=3.0,
        joins_per_s=1.0,
        left_steps=7.0,
        left_s=2.0,
        behind_steps=3.0,
        every_steps=9.0,
        next_s=4.0,
        back_s=6.0,
        rejoin_s=0.5,
        switch_s=1.0,
        kept=0.1,
        transfers=1.5,
        step_s=3.0,
    )


@pytest.mark.parametrize(
    ("undone", "step_s", "is_taken"),
    [
        (0.0, 0.9, False),  # without a risk it is no choice
        (6.0, 0.9, False),
        (30.0, 1.003, True),
        (30.0, 1.007, False),  # within half a percent of the plain one
    ],
)
def test_more_is_tolerated_than_asked_only_where_that_is_clearly_worth_it(
    undone: float, step_s: float, is_taken: bool
) -> None:
    """A return costs a third of the `undone` steps in the mean, of a thousand until the loss."""
    outlook = msgspec.structs.replace(
        expecting(1000.0, 4), sizes=((2, 1.0),), behind_steps=undone, back_s=0.0
    )
    plain = course(1.0)
    beyond = replace(course(step_s, exposure=Exposure(nodes=4, sets=((4, 1),))), beyond=True)
    assert choose(forced(plain, beyond), outlook).step_s == (step_s if is_taken else 1.0)


def test_shadows_count_among_the_bytes_that_move_and_for_their_longer_steps() -> None:
    outlook = expecting(1000.0, 4)
    bare = course(1.0, moved=100)
    shadowing = Copying(steps=2.0, seconds=1.0, moved_bytes=200)
    with_shadows = replace(course(1.0), shadowing=shadowing, shadowed_s=1.0)
    assert choose(forced(bare, with_shadows), outlook).moved_bytes == 100
    slower = replace(with_shadows, shadowed_s=1.5)
    *_, copying, last = slower.phases(outlook, ALONE, None)
    assert (copying.steps_per_s, last.steps_per_s) == (1.0, 1 / 1.5)
    followed = replace(slower, then="shadow")
    assert choose(forced(followed), outlook).then == "shadow"


def test_one_transfer_that_stood_still_does_not_end_all_others() -> None:
    """By its time alone no answer would move state again, so that none would correct it."""
    fast, ready = course(1.0, stall_s=2.0), course(1.01, policy="reroute")
    stuck = corrected(1.0, expected_s=2.0, happened_s=600.0)
    slow = msgspec.structs.replace(expecting(1000.0, 4), transfers=stuck)
    assert choose(forced(fast, ready), slow).policy == "templates"


def test_transfers_that_were_quick_once_are_learned_to_be_slow_again() -> None:
    factor = 1.0
    for _ in range(8):
        factor = corrected(factor, expected_s=0.5 * factor, happened_s=0.01)
    assert factor == 0.25
    for _ in range(8):
        factor = corrected(factor, expected_s=0.5 * factor, happened_s=0.5)
    assert factor == pytest.approx(1.0, rel=0.01)


def test_last_holders_at_risk_cost_what_a_return_would_undo() -> None:
    risky, safe = course(1.0, exposure=ALONE), course(1.1, exposure=SAFE)
    saved = msgspec.structs.replace(expecting(1000.0, 4), behind_steps=1, every_steps=2)
    unsaved = msgspec.structs.replace(saved, behind_steps=5000, every_steps=math.inf)
    assert choose(forced(risky, safe), saved).step_s == 1.0
    assert choose(forced(risky, safe), unsaved).step_s == 1.1


#: The prior expects a loss in a day; in the storm, one came every ten seconds.
CALM = Outlook(per_node_s=1 / (4 * 86_400.0), behind_steps=100.0)
STORM = msgspec.structs.replace(CALM, seen_per_node_s=1 / (4 * 10.0))


def test_in_a_storm_of_losses_nothing_that_is_worse_in_it_takes_the_place_of_templates() -> None:
    safe = course(1.5, guarantee=0)
    quick = course(1.0, policy="reroute", guarantee=0, exposure=ALONE)
    assert choose(forced(safe, quick), CALM).policy == "reroute"
    found = choose(forced(safe, quick), STORM)
    assert found.policy == "templates"
    assert found.found.reason.endswith("; losses come faster than expected")
    assert found.runner_up is not None
    assert found.runner_up.policy == "reroute"
    drained = replace(
        forced(safe, quick),
        staying=Staying(step_s=1.0, weight=1.0, guarantee=0, exposure=ALONE),
        forced=True,
    )
    assert choose(drained, CALM).policy == "reroute"
    assert choose(drained, STORM).policy == "templates"
    fewer = msgspec.structs.replace(CALM, seen_per_node_s=CALM.per_node_s / 2)
    assert choose(forced(safe, quick), fewer).policy == "reroute"


@pytest.mark.parametrize(
    "better",
    [
        course(1.0, policy="reroute", guarantee=0, exposure=SAFE),
        course(1.503, policy="reroute", guarantee=0, exposure=SAFE),  # equal
        course(1.0, policy="reroute", guarantee=1, exposure=ALONE),
    ],
)
def test_in_a_storm_what_is_as_good_or_lets_more_nodes_be_lost_is_a_choice(better: Course) -> None:
    safe = course(1.5, guarantee=0, moved=100)
    assert choose(forced(safe, better), STORM).policy == "reroute"


@pytest.mark.parametrize(
    "other",
    [
        course(1.5, guarantee=0, policy="normalise"),
        replace(course(1.5, guarantee=0), beyond=True),
        replace(course(1.5, guarantee=0, behind=course(1.5).first)),
        replace(course(1.5, guarantee=0), first=replace(course(1.5).first, anew=True)),
    ],
)
def test_in_a_storm_plain_templates_alone_are_compared(other: Course) -> None:
    """What only `auto` does may be chosen against a storm, but excludes nothing."""
    quick = course(1.0, policy="reroute", guarantee=0, exposure=ALONE)
    assert choose(forced(other, quick), STORM).policy == "reroute"


def test_a_storm_makes_a_follow_up_worth_it() -> None:
    def behind(step_s: float, *courses: Course, exposure: Exposure) -> Candidates:
        staying = Staying(step_s=step_s, weight=1.0, guarantee=0, exposure=exposure)
        return replace(forced(*courses), staying=staying, by_value=True)

    safe, quick = course(1.5, guarantee=0), course(1.0, guarantee=0, exposure=ALONE)
    leaving_risk = behind(1.0, safe, exposure=ALONE)
    with pytest.raises(PlanInfeasible, match=r"not worth a change$"):
        choose(leaving_risk, CALM)
    found = choose(leaving_risk, STORM)
    assert (found.step_s, found.found.reason) == (1.5, "a course; losses come faster than expected")
    # It refuses none: the answer to the loss counted on templates.
    taking_risk = behind(1.5, quick, exposure=SAFE)
    for outlook in (CALM, STORM):
        assert choose(taking_risk, outlook).found.reason == "a course"
    safer = behind(1.0, course(1.5, guarantee=1), exposure=ALONE)
    assert choose(safer, STORM).found.reason == "a course", "it is made for the guarantee"
    # The quicker one of two is no choice, so that the other one is made.
    either = behind(
        1.4,
        course(1.2, guarantee=0),
        course(1.0, guarantee=0, exposure=ALONE),
        exposure=ALONE,
    )
    assert (choose(either, CALM).step_s, choose(either, STORM).step_s) == (1.0, 1.2)
    with pytest.raises(PlanInfeasible, match="not worth a change"):  # nodes join
        choose(replace(leaving_risk, by_value=False), STORM)


def test_the_clock_of_checkpoints_decides_what_a_risk_costs() -> None:
    risky, safe = course(1.0, exposure=ALONE), course(1.1, exposure=SAFE)
    by_steps = msgspec.structs.replace(expecting(1000.0, 4), every_steps=50)
    assert choose(forced(risky, safe), by_steps).step_s == 1.0
    late = msgspec.structs.replace(by_steps, next_s=900.0)
    assert choose(forced(risky, safe), late).step_s == 1.1
    # Steps were shorter when more nodes were there, so that more were committed than `every_steps`.
    soon = msgspec.structs.replace(by_steps, behind_steps=500, next_s=1.0)
    assert choose(forced(risky, safe), soon).step_s == 1.0


def test_shadows_count_once_they_are_copied() -> None:
    """Until then a loss that takes a last holder costs a return, whatever will be held later."""
    quick, safe = course(1.0, exposure=ALONE), course(1.1, exposure=SAFE)
    outlook = msgspec.structs.replace(expecting(100.0, 4), every_steps=math.inf, behind_steps=200)
    with_shadows = replace(quick, exposure=SAFE)
    assert choose(forced(with_shadows, safe), outlook).step_s == 1.0
    for copying in (Copying(steps=40), Copying(seconds=40.0)):
        late = replace(with_shadows, shadowing=copying)
        assert choose(forced(late, safe), outlook).step_s == 1.1
    # The factor that was learned for transfers is one for shadows as well.
    soon = replace(with_shadows, shadowing=Copying(seconds=1.0))
    assert choose(forced(soon, safe), outlook).step_s == 1.0
    slow = msgspec.structs.replace(outlook, transfers=40.0)
    assert choose(forced(soon, safe), slow).step_s == 1.1


def test_the_shadows_of_the_running_plan_count_once_they_are_copied() -> None:
    staying = Staying(step_s=1.0, weight=1.0, guarantee=1, exposure=SAFE)
    found = Candidates(courses=(course(1.0),), live=4, staying=staying, by_value=True, before=ALONE)
    outlook = msgspec.structs.replace(expecting(100.0, 4), every_steps=math.inf, behind_steps=200)
    with pytest.raises(PlanInfeasible, match="not worth a change"):
        choose(found, outlook)
    late = replace(found, staying=replace(staying, shadowing=Copying(steps=40)))
    assert choose(late, outlook).step_s == 1.0


def test_nothing_voluntary_makes_a_step_longer_unless_more_nodes_can_be_lost() -> None:
    staying = Staying(step_s=1.0, weight=1.0, guarantee=1, exposure=SAFE)
    for step_s, guarantee, taken in ((0.9, 1, True), (1.005, 1, True), (1.02, 1, False)):
        found = Candidates(
            courses=(course(step_s, guarantee=guarantee),), live=4, staying=staying, before=SAFE
        )
        if taken:
            assert choose(found, expecting(1e5, 4)).step_s == step_s
        else:
            with pytest.raises(PlanInfeasible, match="a step would take"):
                choose(found, expecting(1e5, 4))
    more = Candidates(courses=(course(2.0, guarantee=2),), live=4, staying=staying, before=SAFE)
    assert choose(more, expecting(1e5, 4)).step_s == 2.0
    less = Candidates(courses=(course(0.5, guarantee=0),), live=4, staying=staying, before=SAFE)
    with pytest.raises(PlanInfeasible, match="fewer nodes could be lost"):
        choose(less, expecting(1e5, 4))


def test_a_change_that_has_to_gain_is_not_made_for_a_short_time() -> None:
    staying = Staying(step_s=1.0, weight=1.0, guarantee=1, exposure=SAFE)
    found = Candidates(
        courses=(course(0.9, stall_s=300.0),), live=4, staying=staying, to_gain=True, before=SAFE
    )
    assert choose(found, expecting(10_000.0, 4)).step_s == 0.9
    with pytest.raises(PlanInfeasible, match="after 300 s of copying"):
        choose(found, expecting(60.0, 4))


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_behind_a_re_route_the_course_with_more_drawn_steps_is_taken(data: st.DataObject) -> None:
    """A risk counts as it did at the loss; where nodes join, it keeps none idle."""
    part = st.floats(0.8, 1.25)
    staying = Staying(step_s=1.0, weight=1.0, guarantee=0, exposure=data.draw(RISKS))
    made = course(
        data.draw(part),
        stall_s=data.draw(st.floats(0, 200)),
        guarantee=0,
        exposure=data.draw(RISKS),
    )
    outlook = msgspec.structs.replace(
        expecting(data.draw(st.floats(100, 5000)), 4),
        behind_steps=data.draw(st.integers(0, 2000)),
        every_steps=data.draw(st.sampled_from([1.0, math.inf])),
    )
    found = Candidates(courses=(made,), live=4, staying=staying, by_value=True, before=ALONE)
    phases = made.phases(outlook, ALONE, staying)
    stays = [Phase(seconds=math.inf, steps_per_s=1.0, exposure=staying.exposure)]
    undone = outlook.undone_steps(phases[-1].steps_per_s, outlook.wait_s(4))
    gain, rate = 0.0, phases[-1].steps_per_s
    for one, sign in ((phases, 1), (stays, -1)):
        gain += sign * drawn_steps(one, outlook, 4, math.inf, undone, 8000)
    assume(abs(gain) > 0.05 * outlook.wait_s(4) * max(rate, 1.0) + 0.05 * undone)
    if gain > 0:
        assert choose(found, outlook).found is made.first.found
    else:
        with pytest.raises(PlanInfeasible, match="not worth a change"):
            choose(found, outlook)


RISKS = st.sampled_from([SAFE, ALONE])


def test_a_node_that_joins_is_used_where_it_pays_within_what_is_left() -> None:
    staying = Staying(step_s=1.0, weight=1.0, guarantee=1, exposure=SAFE)
    found = Candidates(courses=(course(0.9, stall_s=20.0),), live=4, staying=staying, before=SAFE)
    for left_s in (1.0, 15.0, 20.4, 26.0, 40.0, 1000.0):
        outlook = msgspec.structs.replace(expecting(1e6, 4), left_s=left_s)
        rest = left_s - 20.0 - SWITCH_S
        if rest > 0 and 20.0 + rest / 0.9 >= (1 - TIE) * left_s:
            assert choose(found, outlook).step_s == 0.9
        else:
            with pytest.raises(PlanInfeasible, match=f"for the {left_s:g} s that are left"):
                choose(found, outlook)


def test_a_drained_node_trains_until_the_boundary() -> None:
    """At once the cut that moves little would be taken; ahead of a boundary, the faster one."""
    staying = Staying(step_s=1.0, weight=1.0, guarantee=0, exposure=ALONE)
    near, far = course(1.1), course(1.0, stall_s=60.0)
    outlook = expecting(400.0, 4)
    assert choose(forced(near, far), outlook).step_s == 1.1
    found = replace(forced(near, far), staying=staying, forced=True)
    assert choose(found, outlook).step_s == 1.0
    # It must go, whatever that costs.
    slow = replace(found, courses=(course(5.0, stall_s=1e4, guarantee=0),))
    ending = msgspec.structs.replace(outlook, left_s=1.0)
    assert choose(slow, ending).step_s == 5.0


def test_a_follow_up_costs_whole_steps_of_the_first_plan() -> None:
    moved = course(1.0, stall_s=25.0).first
    both = course(10.0, policy="reroute", behind=moved)
    stall, routed, switch, last = both.phases(Outlook(), ALONE, None)
    assert (stall.seconds, switch.seconds) == (REJOIN_S, SWITCH_S)
    assert (routed.seconds, last.steps_per_s) == (40.0, 1.0)
    assert both.answer.then == "templates"
    (_, routed, *_) = replace(both, copying=Copying(steps=4.2)).phases(Outlook(), ALONE, None)
    assert routed.seconds == 60.0, "workers need time to get ready, whatever moves"
    # A part of the broken step is not done again.
    _, routed, *_ = both.phases(Outlook(kept=0.5), ALONE, None)
    assert routed.seconds == 35.0


def test_a_return_stands_still_for_the_load_and_undoes_the_steps_behind_the_checkpoint() -> None:
    outlook = msgspec.structs.replace(expecting(1e4, 4), behind_steps=500, back_s=40.0)
    back, on = course(1.0, policy="morph"), course(1.0)
    stall, _ = back.phases(outlook, ALONE, None)
    assert stall.seconds == REJOIN_S + 40.0
    returned, kept = (choose(forced(each), outlook).value for each in (back, on))
    assert returned is not None
    assert kept is not None
    # What is expected until the next change is discounted by the standstill.
    assert kept - returned == pytest.approx(540, rel=0.02)
    assert choose(forced(back, on), outlook).policy == "templates"


def test_shares_and_pauses_are_learned_as_means() -> None:
    """Of all of a step's work, half is done on average; most pauses are none."""
    draw, share, pause = random.Random(3), 0.55, SWITCH_S
    shares, pauses = [], []
    for _ in range(4000):
        share = learned_share(share, 0.8 * draw.random())
        pause = learned_pause_s(pause, 0.8 if draw.random() < 0.4 else 0.0)
        shares.append(share)
        pauses.append(pause)
    assert sum(shares) / len(shares) == pytest.approx(0.8, abs=0.03)
    assert sum(pauses) / len(pauses) == pytest.approx(0.32, abs=0.03)
    assert learned_pause_s(SWITCH_S, 600.0) < 3 * SWITCH_S


def test_what_changes_were_seen_to_take_decides_how_many_are_worth_it() -> None:
    """A second change behind the first costs its standstill, however little state moves."""
    both = course(1.5, policy="reroute", behind=course(1.0).first)
    stays, moves = course(1.5, policy="reroute"), course(1.0, stall_s=20.0, moved=1)
    outlook = expecting(500.0, 4)
    assert choose(forced(stays, moves, both), outlook).then == "templates"
    slow = msgspec.structs.replace(outlook, switch_s=30.0)
    assert choose(forced(stays, moves, both), slow).policy == "templates"


def test_the_runner_up_is_the_best_of_the_others() -> None:
    others = (
        course(1.5, policy="morph"),
        course(1.2, policy="reroute"),
        course(1.3, policy="shadow"),
    )
    found = choose(forced(course(1.0), *others), expecting(1e4, 4))
    assert found.runner_up is not None
    assert (found.policy, found.runner_up.policy) == ("templates", "reroute")
    assert found.value is not None
    assert found.value > found.runner_up.value > 0


# ---- The outlook


def test_losses_of_a_cluster_are_believed_within_hours() -> None:
    """30 nodes, one of which is lost every 10 minutes."""
    losses = Losses()
    losses.pass_time(0.0, 30)
    assert 1 / losses.per_node_s() == pytest.approx(MTBF_S)
    for number in range(1, 31):
        losses.pass_time(600.0 * number, 30)
        losses.lose(NodeName(f"n{number}"), 600.0 * number)
    assert 600 < 1 / (30 * losses.per_node_s()) < 1200
    quiet = msgspec.structs.replace(losses)
    quiet.pass_time(30 * 86_400.0, 30)
    assert 1 / quiet.per_node_s() > 5 * 86_400
    assert losses.node_s < 31 * 600 * 30, "the copy alone passed the time"


def test_a_storm_is_seen_behind_the_prior_and_an_early_loss_says_little() -> None:
    """Ten nodes live for 20 minutes each: three of them are lost within six minutes."""
    losses = Losses()
    losses.pass_time(0.0, 10)
    for number in range(1, 4):
        losses.pass_time(120.0 * number, 10)
        losses.lose(NodeName(f"n{number}"), 120.0 * number)
    assert 1200 < 1 / losses.seen_per_node_s < 3600
    assert 1 / losses.per_node_s() > 12 * 3600
    early = Losses()
    early.pass_time(0.0, 4)
    for at, seen in ((600.0, 0.5 / (2400 + 3600)), (660.0, 1.5 / (2640 + 3600))):
        early.pass_time(at, 4)
        early.lose(NodeName(f"n{at}"), at)
        assert early.seen_per_node_s == pytest.approx(seen, rel=0.01)


def test_a_quiet_year_says_as_much_in_one_piece_as_in_days() -> None:
    once, daily = Losses(at_s=0.0, vacant=1), Losses(at_s=0.0, vacant=1)
    once.pass_time(365 * 86_400.0, 30)
    for day in range(1, 366):
        daily.pass_time(day * 86_400.0, 30)
    assert once.node_s == pytest.approx(daily.node_s)
    assert once.vacant_s == pytest.approx(daily.vacant_s)
    # Then a node is lost every ten minutes, for an hour.
    for number in range(6):
        at = once.at_s + 600.0
        once.pass_time(at, 30)
        once.lose(NodeName(f"n{number}"), at)
    assert 1 / (30 * once.per_node_s()) < 86_400.0


def test_losses_after_the_clock_was_set_back_are_events_of_their_own() -> None:
    losses = Losses()
    for at, node in ((7200.0, "a"), (100.0, "b"), (1000.0, "c"), (2000.0, "d")):
        losses.pass_time(at, 10)
        losses.lose(NodeName(node), at)
    # Those at the jump may be of one moment.
    assert losses.events.keys() <= {1, 2}
    assert losses.events[1] == pytest.approx(2, rel=0.02)
    assert losses.node_s == pytest.approx(10 * 1900.0, rel=0.02)


def test_losses_of_one_moment_are_one_event() -> None:
    losses = Losses()
    for at, node in ((0.0, "a"), (TOGETHER_S, "b"), (1.5 * TOGETHER_S, "c"), (100.0, "d")):
        losses.pass_time(at, 10)
        losses.lose(NodeName(node), at)
    assert {size: round(n, 2) for size, n in losses.events.items() if n > 0.01} == {3: 1, 1: 1}
    assert losses.sizes == (
        (1, pytest.approx(2 / 3, rel=0.01)),
        (3, pytest.approx(1 / 3, rel=0.01)),
    )
    assert losses.median_back_s is None
    losses.come(NodeName("a"), 50.0)
    losses.come(NodeName("b"), 80.0)
    losses.come(NodeName("unknown"), 80.0)
    assert losses.median_back_s == pytest.approx(60.0)


def test_losses_of_a_rack_are_one_event_though_they_are_found_one_after_the_other() -> None:
    losses = Losses()
    racks = {NodeName(name): rack for name, rack in zip("abcdef", "xxxyyy", strict=True)}
    left = dict(racks)
    for at, node in ((0.0, "a"), (30.0, "b"), (80.0, "c"), (100.0, "d"), (500.0, "e")):
        losses.pass_time(at, len(left))
        rack = left.pop(NodeName(node))
        losses.lose(NodeName(node), at, rack, [*left.values()].count(rack))
    assert losses.whole_racks == pytest.approx(1, rel=0.01)
    assert {size: round(n, 2) for size, n in losses.events.items() if n > 0.01} == {1: 2}
    assert losses.seen == pytest.approx(3, rel=0.01)
    assert losses.rack_share(racks) == pytest.approx((1 + 2 / 8) / (3 + 1), rel=0.01)
    assert losses.rack_share(dict.fromkeys(racks, "")) == 0
    # The last node of a rack alone is no rack.
    losses.pass_time(1000.0, 1)
    losses.lose(NodeName("f"), 1000.0, "y", 0)
    assert losses.whole_racks == pytest.approx(1, rel=0.01)


def test_nodes_that_come_in_place_of_lost_ones_are_joins_to_expect() -> None:
    losses = Losses()

    def at(now_s: float) -> Losses:
        losses.pass_time(now_s, 8)
        return losses

    at(0.0).come(NodeName("grown"), 0.0)
    for node in "abc":
        at(1000.0).lose(NodeName(node), 1000.0)
    assert losses.joins_per_s(0.0) == 0, "a cluster that grew replaced nothing"
    for seconds, node in ((2000.0, "a"), (2001.0, "new")):
        at(seconds).come(NodeName(node), seconds)
    once = losses.joins_per_s(0.0)
    assert 1 / once == pytest.approx(1001.0 + 600.0, rel=0.02)
    assert 1 / losses.joins_per_s(400.0) == pytest.approx(1 / once + 200.0)
    assert at(20_000.0).joins_per_s(0.0) < once / 10
    losses.come(NodeName("other"), 20_000.0)
    assert losses.joins_per_s(0.0) == 0, "no place is vacant"
    losses.lose(NodeName("d"), 20_000.0)
    assert losses.joins_per_s(0.0) > 0


def test_a_node_that_comes_and_goes_is_no_rack() -> None:
    losses = Losses()
    for at in (0.0, 3.0, 6.0):
        losses.pass_time(at, 10)
        losses.lose(NodeName("a"), at)
        losses.come(NodeName("a"), at + 1)
    assert {size for size, n in losses.events.items() if n > 0.01} == {1}


def test_where_saves_fail_a_return_undoes_all_since_the_last_one() -> None:
    outlook = Outlook(behind_steps=5000, every_steps=100, back_s=0.0)
    assert outlook.undone_steps(1.0, 1000.0) == 5100


def test_the_best_interval_between_checkpoints_is_that_of_least_waste() -> None:
    save_s, between_s = 5.0, 7200.0

    def waste(every_s: float) -> float:
        return save_s / every_s + every_s / 2 / between_s

    best = best_interval_s(save_s, between_s)
    least = min(range(10, 2000), key=waste)
    assert best == pytest.approx(least, rel=0.01)
