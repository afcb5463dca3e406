"""Which policy answers a change of the nodes, and what it costs by each."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, NodeName
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan, place
from oobleck.core.profile import Profile
from oobleck.core.routes import Shard, require_holders
from oobleck.planner.cost.estimate import estimate_step, peak_bytes
from oobleck.planner.programs.communicators import communicators
from oobleck.planner.programs.listing.schedule import listed_routes
from oobleck.planner.programs.transfer import plan_transfers
from oobleck.planner.recovery import policies, worth
from oobleck.planner.recovery.answer import (
    Answer,
    Change,
    Exposure,
    late_behind_s,
    splitting_weight,
)
from oobleck.planner.recovery.chooser import choose
from oobleck.planner.recovery.course import JOINED, SETTLED, behind_answer
from oobleck.planner.recovery.normalise import normalised
from oobleck.planner.recovery.outlook import REJOIN_S, SWITCH_S, expecting
from oobleck.planner.recovery.policies import answer, answers, ask, at_once, copying
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.terms import after
from oobleck.planner.recovery.worth import shadowed
from oobleck.planner.search.shadows import with_shadows
from oobleck.planner.search.templates import generate_templates
from support.plans import plan_of_cuts
from support.profiles import profile_of

#: A layer of 1 GB takes a second on its way.
GIGABYTE = 10**9


def profile(state_bytes: int, forward_s: float = 1.0) -> Profile:
    found = profile_of([forward_s] * 8, state=[state_bytes] * 8, activation=[1] * 8)
    links = replace(found.links, inter_node_bytes_per_s=float(GIGABYTE))
    # So that sums take little of a step beside the compute.
    layers = tuple(replace(layer, parameter_bytes=state_bytes // 100) for layer in found.layers)
    return replace(found, links=links, layers=layers)


def names(count: int) -> list[NodeName]:
    return [NodeName(f"n{number}") for number in range(count)]


def change(
    sizes: Sequence[int],
    lost: str,
    *,
    state_bytes: int = 10,
    forward_s: float = 1.0,
    joined: Sequence[str] = (),
) -> Change:
    """Pipelines of these sizes on n0, n1, ... with 8 micro-batches each lose nodes."""
    costs = profile(state_bytes, forward_s)
    templates = generate_templates(costs, range(1, 5))
    nodes, pipelines = iter(names(sum(sizes))), []
    for size in sizes:
        own = tuple(next(nodes) for _ in range(size))
        pipelines.append(place(templates[size], own, microbatches=8))
    plan = Plan.of_pipelines(pipelines, generation=Generation(1))
    gone = set(lost.split())
    return Change(
        plan=plan,
        base=plan,
        live=tuple(n for n in [*plan.nodes, *map(NodeName, joined)] if n not in gone),
        generation=Generation(2),
        templates=templates,
        profile=costs,
        fault_tolerance=1,
        tied=False,
    )


def test_state_that_moves_at_once_is_moved() -> None:
    found = answer(change([4, 4, 4], "n1"), "auto")
    assert (found.policy, found.then) == ("templates", None)
    assert found.stall_s < 1.0
    assert found.moved_bytes > 0


#: Steps of a second, and state that takes eight.
SHORT: dict[str, Any] = {"state_bytes": 2 * GIGABYTE, "forward_s": 0.01}


def test_state_that_takes_longer_moves_behind_a_plan_that_goes_on_at_once() -> None:
    asked = change([4, 4], "n1", **SHORT)
    found = answer(asked, "auto")
    assert (found.policy, found.then) == ("reroute", "templates")
    assert (found.moved_bytes, found.stall_s) == (0, 0.0)
    assert found.found.rule == "reroute"
    by_name = answer(asked, "templates")
    assert by_name.policy == "templates"
    assert by_name.stall_s >= 4.0


def test_a_course_knows_how_late_its_boundary_is() -> None:
    """The last gradients of the re-routed plan reach the copies after its step."""
    asked = change([4, 4], "n1", **SHORT)
    course = next(each for each in ask(asked, "auto").courses if each.behind is not None)
    boundary = ask(after(asked, course.first), SETTLED)
    expected = min(boundary.courses, key=lambda each: each.first.step_s).first.late_s
    assert course.behind is not None
    assert course.behind_late_s == pytest.approx(expected)
    assert course.behind_late_s > course.behind.late_s


@pytest.mark.parametrize("idle", [(), ("n9",)])
def test_a_boundary_behind_a_re_route_goes_by_value_also_beside_an_idle_node(
    idle: tuple[str, ...],
) -> None:
    """Where nodes join, a risk keeps none idle; the purpose says which of both it is."""
    asked = change([4, 4], "n1", **SHORT)
    routed = answer(asked, "auto")
    assert routed.then is not None
    following = after(asked, routed)
    following = replace(following, live=(*following.live, *map(NodeName, idle)))
    assert ask(following, behind_answer(routed.then)).by_value
    assert not ask(following, JOINED).by_value


def test_the_shape_of_a_first_plan_is_taken_where_its_step_is_worth_what_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = change([4, 4, 4], "n1")
    plain = answer(asked, "templates")
    for share, taken in ((0.9, 0.9), (0.997, 1.0)):
        shaped = replace(plain, step_s=share * plain.step_s, moved_bytes=GIGABYTE)
        monkeypatch.setattr(policies, "anew", lambda _, shaped=shaped: shaped)
        found = answer(asked, "auto")
        assert (found.policy, found.then) == ("templates", None)
        assert found.step_s == taken * plain.step_s


#: Events take one node, or as often three; a return undoes so many steps.
BY_THREES = msgspec.structs.replace(
    expecting(1e3, 11), sizes=((1, 0.5), (3, 0.5)), behind_steps=1000.0
)


def test_more_nodes_can_be_lost_than_asked_where_events_take_several() -> None:
    asked = replace(
        change([4, 4, 4], "n1", state_bytes=GIGABYTE, forward_s=0.3), fault_tolerance=1, most_more=2
    )
    plain = answer(asked, "auto", expecting(1e3, 11))
    wide = answer(asked, "auto", BY_THREES)
    assert (can_lose(plain.found.plan), can_lose(wide.found.plan)) == (2, 3)
    assert 1.03 * plain.step_s < wide.step_s < 1.08 * plain.step_s
    assert wide.found.reason.endswith("; 3 nodes can be lost")
    # Who names a policy gets plans for the fault tolerance alone.
    named = answer(replace(asked, most_more=0), "auto", BY_THREES)
    assert named.found.plan == plain.found.plan
    for wanted, found in (("templates", plain), ("morph", wide)):
        assert answer(asked, wanted, BY_THREES).found.plan == found.found.plan


def test_a_longer_shape_of_a_first_plan_is_offered_where_losses_are_less_often_fatal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = replace(change([4, 4, 4], "n1"), fault_tolerance=1)
    plain = answer(asked, "templates")
    assert plain.exposure.sets == ((3, 5),)
    for sets, is_offered in ((((3, 1),), True), (((3, 5),), False)):
        safer = replace(
            plain, step_s=1.001 * plain.step_s, exposure=replace(plain.exposure, sets=sets)
        )
        plan = plain.found.plan.having(generation=Generation(9))
        safer = replace(safer, found=replace(plain.found, plan=plan))
        monkeypatch.setattr(policies, "anew", lambda _, safer=safer: safer)
        offered = [course.first.step_s for course in ask(asked, "auto").courses]
        assert (safer.step_s in offered) == is_offered


def test_the_running_plans_step_by_its_profile_is_told_with_candidates() -> None:
    forced = ask(change([4, 4, 4], "n1"), "auto")
    joined = ask(change([4, 4, 4], "", joined=["x"]), JOINED)
    plan = change([4, 4, 4], "").plan
    step_s = estimate_step(plan, profile(10), tied=False).step_s * splitting_weight(plan)
    assert forced.running_s == joined.running_s == pytest.approx(step_s)


def test_a_re_route_may_be_followed_by_a_plan_that_lets_more_nodes_be_lost() -> None:
    asked = replace(change([4, 4, 4], "n1", state_bytes=GIGABYTE), fault_tolerance=1, most_more=2)
    pairs = [
        (course.beyond, can_lose(course.last.found.plan))
        for course in ask(asked, "auto").courses
        if course.first.policy == "reroute" and course.last.policy == "templates"
    ]
    assert pairs == [(False, 2), (True, 3)]


def test_copies_that_are_promised_are_made() -> None:
    """Sums of gradients over more nodes take a large part of these steps."""
    promised = 0
    sizes = ([4], [4, 4], [4, 4, 4])
    for each, layer_gb, wait_s in product(sizes, (1, 10), (1000.0, 3000.0)):
        size = layer_gb * GIGABYTE
        asked = change(each, "n1", state_bytes=size)
        layers = tuple(replace(one, parameter_bytes=size // 6) for one in asked.profile.layers)
        costs = replace(asked.profile, layers=layers)
        templates = generate_templates(costs, range(1, 5))
        asked = replace(
            asked, profile=costs, templates=templates, shadows=True, most_more=2, fault_tolerance=1
        )
        outlook = msgspec.structs.replace(
            expecting(wait_s, len(asked.live)),
            sizes=((1, 0.3), (2, 0.4), (3, 0.3)),
            behind_steps=200.0,
        )
        found = answer(asked, "auto", outlook)
        if found.then == "shadow":
            promised += 1
            assert choose(ask(after(asked, found), "copies"), outlook).policy == "shadow"
    assert promised > 5


def test_a_node_that_joins_is_used_though_the_safer_plan_has_too_long_a_step() -> None:
    asked = replace(
        change([4, 4, 4], "", joined=["x"], state_bytes=GIGABYTE, forward_s=0.3),
        fault_tolerance=0,
        most_more=2,
    )
    found = ask(asked, JOINED)
    (plain,) = [course for course in found.courses if not course.beyond]
    plain = replace(plain, exposure=replace(plain.exposure, sets=((2, 4),)))
    # One that would be taken if the running plan's step were longer.
    safer = replace(plain, first=replace(plain.first, step_s=1.02 * plain.first.step_s))
    safer = replace(safer, beyond=True, exposure=replace(plain.exposure, sets=((9, 1),)))
    assert found.staying is not None
    found = replace(
        found,
        courses=(plain, safer),
        staying=replace(found.staying, step_s=1.005 * plain.first.step_s),
    )
    assert choose(found, BY_THREES).step_s == plain.first.step_s
    found = replace(found, staying=replace(found.staying, step_s=1.02 * plain.first.step_s))
    assert choose(found, BY_THREES).step_s == safer.first.step_s


def test_until_state_has_moved_a_loss_takes_what_is_left_of_the_running_plan() -> None:
    asked = change([4, 4], "n1")
    assert Exposure.of(asked.plan).can_lose == 1
    before = ask(asked, "auto").before
    assert before is not None
    assert (before.nodes, before.can_lose) == (7, 0)


def test_long_steps_are_not_made_longer_to_save_a_short_standstill() -> None:
    asked = change([4, 4], "n1", state_bytes=2 * GIGABYTE)
    found, rerouted = answer(asked, "auto"), answers(asked)["reroute"]
    assert (found.policy, found.then) == ("templates", None)
    assert isinstance(rerouted, Answer)
    assert rerouted.step_s > found.step_s + found.stall_s


def test_templates_do_not_follow_where_their_step_is_the_longer_one() -> None:
    asked = change([4, 4, 4, 4, 4], "n1", state_bytes=2 * GIGABYTE, forward_s=0.03)
    found, templates = answer(asked, "auto"), answers(asked)["templates"]
    assert (found.policy, found.then) == ("reroute", "normalise")
    assert isinstance(templates, Answer)
    assert templates.step_s > found.step_s


def step_time(one: Answer) -> float:
    return one.step_s * splitting_weight(one.found.plan)


def steps_by_the_clock(asked: Change, first: Answer, behind: Answer | None, wait_s: float) -> float:
    """Steps until the next loss, made one by one, each counted with the chance that the loss comes
    later."""
    now, steps, plan = REJOIN_S + first.stall_s, 0.0, first
    left = 0
    if behind is not None:
        copied = copying(asked, first.found.plan, behind.found.plan)
        left = 1 + math.ceil(max(copied.steps, copied.seconds / step_time(first)))
    while now < 20 * wait_s:
        step_s = step_time(plan)
        steps += wait_s / step_s * (math.exp(-now / wait_s) - math.exp(-(now + step_s) / wait_s))
        now, left = now + step_s, left - 1
        if plan is first and behind is not None and left <= 0:
            now, plan = now + SWITCH_S + late_behind_s(asked, first, behind), behind
        elif plan is behind or behind is None:
            return steps + wait_s / step_s * math.exp(-now / wait_s)
    return steps


def courses_of(asked: Change) -> list[tuple[Answer, Answer | None]]:
    """Templates, a re-route, a re-route with a stage moved, and what may follow the re-route."""
    made = {policy: one for policy, one in answers(asked).items() if isinstance(one, Answer)}
    found: list[tuple[Answer, Answer | None]] = [(made["templates"], None)]
    if "reroute" in made:
        routed = made["reroute"]
        found += [(routed, None), (routed, made["templates"])]
        with suppress(PlanInfeasible):
            for moved in normalised(after(asked, routed)):
                found += [(routed, moved), (at_once(asked, routed, moved), None)]
    return found


@given(
    pipelines=st.integers(2, 4),
    lost=st.integers(0, 7),
    forward_s=st.floats(0.003, 3.0),
    state_bytes=st.integers(10, 8 * GIGABYTE),
    tolerance=st.integers(0, 2),
    wait_s=st.floats(30.0, 1e6),
)
@settings(max_examples=40, deadline=None)
def test_no_other_course_keeps_the_guarantee_and_commits_more(
    pipelines: int, lost: int, forward_s: float, state_bytes: int, tolerance: int, wait_s: float
) -> None:
    asked = change([4] * pipelines, f"n{lost}", state_bytes=state_bytes, forward_s=forward_s)
    asked = replace(asked, fault_tolerance=tolerance)
    outlook = msgspec.structs.replace(expecting(wait_s, len(asked.live)), back_s=0.0)
    taken = answer(asked, "auto", outlook)
    assert taken.value is not None
    ways = courses_of(asked)
    steps = [steps_by_the_clock(asked, *way, wait_s) for way in ways]
    kept = [min(tolerance, can_lose((behind or first).found.plan)) for first, behind in ways]
    own = [
        number
        for number, (first, behind) in enumerate(ways)
        if first.found.plan == taken.found.plan
        and (first.then if behind is None else behind.policy) == taken.then
    ]
    assert own, f"{taken.policy}, then {taken.then}, is another course"
    assert max(kept[number] for number in own) == max(kept)
    best = max(found for found, safe in zip(steps, kept, strict=True) if safe == max(kept))
    mine = max(steps[number] for number in own)
    assert mine >= 0.99 * best
    if not tolerance and pipelines > 2:  # no event takes a last holder
        assert taken.value == pytest.approx(mine, rel=0.02)


def test_a_policy_that_is_wanted_by_name_stays() -> None:
    found = answer(change([4, 4, 4], "n1"), "reroute")
    assert (found.policy, found.then) == ("reroute", None)
    plan = found.found.plan
    assert plan.microbatches == 24
    assert listed_routes(plan)
    assert plan.nodes == tuple(sorted(set(names(12)) - {"n1"}))
    again = replace(
        change([4, 4, 4], "n1 n6"), plan=plan, generation=Generation(3)
    )  # a worker that helps
    second = answer(again, "reroute")
    assert second.policy == "reroute"
    assert second.found.plan.microbatches == 24
    assert second.step_s > found.step_s


@pytest.mark.parametrize("wanted", ["reroute", "normalise"])
def test_templates_answer_where_the_wanted_policy_cannot_and_the_reason_says_so(
    wanted: RecoveryPolicy,
) -> None:
    asked = change([4, 4], "n1 n5")
    found = answer(asked, wanted)
    assert found.policy == "templates"
    why = f"not by {wanted}: no live worker holds the state of layer"
    assert why in found.found.reason
    assert isinstance(answers(asked)["reroute"], PlanInfeasible)


@pytest.mark.parametrize("wanted", ["templates", "auto", "reroute"])
def test_who_holds_all_layers_goes_on_though_they_are_too_few_for_templates(
    wanted: RecoveryPolicy,
) -> None:
    """The halves of two pipelines, and a lone one with shadows."""
    halves = change([2, 2], "n1 n2")
    halves = replace(halves, templates={3: halves.templates[3]})
    with_copies = lone("n1")
    with_copies = replace(with_copies, templates={4: with_copies.templates[4]})
    for asked, needed in ((halves, 3), (with_copies, 4)):
        found = answer(asked, wanted)
        assert (found.policy, found.found.rule) == ("reroute", "reroute")
        assert set(found.found.plan.nodes) == set(asked.live)
        why = f"; not by templates: needs at least {needed} nodes"
        assert (why in found.found.reason) == (wanted != "reroute")
        # Nor is there an answer where one of them holds a layer alone.
        fewer = replace(asked, live=asked.live[:1])
        with pytest.raises(PlanInfeasible, match=f"needs at least {needed} nodes"):
            answer(fewer, wanted)


def test_too_few_nodes_for_templates_are_no_loss_by_themselves() -> None:
    asked = replace(change([2, 2], ""), templates={5: change([4], "").templates[4]})
    with pytest.raises(PlanInfeasible, match="needs at least 5 nodes"):
        answer(asked, "templates")


def test_where_nobody_is_lost_templates_answer() -> None:
    asked = change([4, 4], "", joined=["n8", "n9"])
    found = answer(asked, "reroute")
    assert found.policy == "templates"
    assert "reroute" not in found.found.reason
    assert "no node is lost" in str(answers(asked)["reroute"])


def test_where_too_many_would_have_to_be_scheduled_pipelines_take_whole_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With fewer helpers than pipelines the others take them whole; with none, all do."""
    asked = change([4, 4, 4, 4, 4], "n1", state_bytes=2 * GIGABYTE, forward_s=0.03)
    listed, loads = [], []
    for visits in (4 * 40, 3 * 4 * 8, 4 * 8):
        monkeypatch.setattr(worth, "MOST_VISITS", visits)
        plan = answer(asked, "reroute").found.plan
        listed.append(len(listed_routes(plan)))
        loads.append(sorted(route.microbatches for route in plan.routes))
    assert listed[0] >= 5
    assert 0 < listed[1] <= 2 * 2
    assert listed[2] == 0
    assert [sum(own) for own in loads] == [40] * 3
    assert loads[2] == [10] * 4


def test_a_schedule_that_the_job_names_stays() -> None:
    """Of five pipelines one helps, and the others have their own schedule."""
    asked = change([4, 4, 4, 4, 4], "n1")
    asked = replace(asked, plan=few(asked.plan), base=few(asked.plan))
    split = answer(asked, "reroute").found.plan
    named = answer(replace(asked, schedule_named=True), "reroute").found.plan
    assert (split.schedule, named.schedule) == ("zb-h1", "1f1b")


def few(plan: Plan) -> Plan:
    """The first pipeline, which is hit, has one micro-batch."""
    first, *others = plan.pipelines
    pipelines = [replace(first, microbatches=1), *others]
    return Plan.of_pipelines(pipelines, generation=plan.generation)


def test_a_node_without_layers_keeps_nobody_waiting() -> None:
    asked = change([4, 4], "n1", joined=["spare"], **SHORT)
    found = answer(asked, "auto")
    assert (found.policy, found.then) == ("reroute", "templates")
    assert found.found.idle == ("spare",)


def test_what_nobody_can_answer_is_refused() -> None:
    asked = change([2, 2], "n1 n2 n3")
    asked = replace(asked, templates={2: asked.templates[2]})
    for wanted in ("auto", "templates", "reroute"):
        with pytest.raises(PlanInfeasible, match="needs at least 2 nodes"):
            answer(asked, wanted)


def test_a_lost_pipeline_leaves_plain_ones() -> None:
    found = answer(change([1, 1, 1], "n1"), "reroute")
    plan = found.found.plan
    assert plan.listing is None
    assert [pipeline.nodes for pipeline in plan.pipelines] == [("n0",), ("n2",)]
    assert plan.microbatches == 24
    assert found.step_s == pytest.approx(estimate_step(plan, profile(10)).step_s)


def test_a_step_of_a_re_routed_plan_takes_what_the_table_says() -> None:
    """3 pipelines of 4 stages with 6 micro-batches each, one worker lost (ReCycle's example): 29
    slots where a plan without a loss takes 27 under 1F1B; memory that 1F1B needs on the first
    stage."""
    costs = profile_of(
        [1.0] * 4,
        state=[16] * 4,
        activation=[100] * 4,
        memory=4 * 100 + 100,
    )
    inputs = [replace(layer, backward_input_s={1: 1.0}) for layer in costs.layers]
    costs = replace(costs, layers=tuple(inputs))
    templates = generate_templates(costs, range(4, 5))
    pipelines = [
        place(templates[4], tuple(names(12)[4 * k : 4 * k + 4]), microbatches=6) for k in range(3)
    ]
    plan = Plan.of_pipelines(pipelines, generation=Generation(1))
    asked = Change(
        plan=plan,
        base=plan,
        live=tuple(node for node in plan.nodes if node != "n6"),
        generation=Generation(2),
        templates=templates,
        profile=costs,
        fault_tolerance=1,
        tied=False,
    )
    found = answers(asked)["reroute"]
    assert isinstance(found, Answer)
    assert found.step_s == pytest.approx(29.0, rel=0.01)


def test_wait_lets_no_plan_be_smaller() -> None:
    asked = change([3, 2], "n4")
    with pytest.raises(PlanInfeasible, match="policy wait: 5 nodes are to train, as before, and 4"):
        answer(asked, "wait")
    back = answer(replace(asked, live=(*asked.live, NodeName("n9"))), "wait")
    assert (back.policy, len(back.found.plan.nodes)) == ("templates", 5)


# ---- shadows


def lone(lost: str, *, shadows: bool = True) -> Change:
    """A lone pipeline of 4 nodes, each layer on a second one, loses nodes."""
    asked = change([4], lost)
    asked = replace(asked, templates={size: asked.templates[size] for size in (3, 4)})
    plan = with_shadows(asked.plan, asked.profile, fault_tolerance=1) if shadows else asked.plan
    return replace(asked, plan=plan, base=plan, shadows=shadows)


def test_more_copies_follow_than_asked_where_events_take_several() -> None:
    """Each half of a pipeline is held once more, so that one node can be lost."""
    asked = replace(lone(""), fault_tolerance=1, most_more=2)
    assert can_lose(asked.plan) == 1
    with pytest.raises(PlanInfeasible, match="not worth a change"):
        choose(ask(asked, "copies"), expecting(1e5, 4))
    wide = choose(ask(asked, "copies"), BY_THREES)
    assert (wide.policy, can_lose(wide.found.plan)) == ("shadow", 3)
    with pytest.raises(PlanInfeasible, match="no layer can be on one node more"):
        ask(replace(asked, most_more=0), "copies")
    # They are expected behind an answer as well.
    lost = replace(lone("n1"), most_more=2)
    found = answer(lost, "auto", BY_THREES)
    assert found.then == "shadow"
    by_pairs = msgspec.structs.replace(BY_THREES, sizes=((1, 0.5), (2, 0.5)))
    following = choose(ask(after(lost, found), "copies"), by_pairs)
    assert can_lose(following.found.plan) == 2, "of three nodes"


def test_a_loss_in_a_lone_pipeline_is_answered_by_its_shadows_at_once() -> None:
    asked = lone("n1")
    found = answers(asked)["reroute"]
    assert isinstance(found, Answer)
    assert (found.policy, found.then) == ("reroute", "shadow")
    # Wanted by name, a stage moves first: another order of compute has other room for shadows.
    assert replace(answer(asked, "reroute"), value=None) == replace(found, then="normalise")
    assert replace(answer(asked, "shadow"), value=None) == found
    assert replace(answer(asked, "stay"), value=None) == found
    assert (found.moved_bytes, found.stall_s) == (0, 0.0)
    plan = found.found.plan
    assert plan.nodes == ("n0", "n2", "n3")
    assert all(plan.shards[w] == asked.plan.shards[w] for w in plan.workers), "nothing is dropped"
    require_holders(plan.shards, plan.layer_count)
    refused = answers(lone("n1", shadows=False))["reroute"]
    assert isinstance(refused, PlanInfeasible)
    assert "no live worker holds the state of layer" in str(refused)


def test_templates_find_the_state_with_shadows_and_move_none_for_further_ones() -> None:
    asked = lone("n1")
    found = answer(asked, "templates")
    plan, live = found.found.plan, {w: s for w, s in asked.plan.shards.items() if w.node != "n1"}
    require_holders(live, plan.layer_count)
    sizes = [layer.state_bytes for layer in asked.profile.layers]
    moves = plan_transfers(live, plan, state_bytes=sizes)
    assert sum(sizes[move.layer] for move in moves) == found.moved_bytes
    for worker, layers in plan.shadows.items():
        assert {Shard(layer) for layer in layers} <= live[worker]
    assert found.then == "shadow"
    bare = answer(replace(asked, shadows=False), "templates")
    assert (bare.moved_bytes, bare.then) == (found.moved_bytes, None)
    after = replace(asked, plan=plan, generation=Generation(3))
    behind = shadowed(after).found.plan
    assert (can_lose(plan), can_lose(behind)) == (0, 1)
    assert (behind.generation, behind.routes) == (3, plan.routes)
    with pytest.raises(PlanInfeasible, match="none has to be"):
        shadowed(replace(after, plan=behind))


@pytest.mark.parametrize("wanted", ["auto", "templates", "reroute"])
def test_who_holds_layers_and_has_no_time_for_them_alone_computes_none(
    wanted: RecoveryPolicy,
) -> None:
    """Stages are on two workers, and shadows on one. The state is there, so templates find it."""
    costs = profile_of([1.0] * 4, gpus=(2,), gpus_per_node=2, activation=10)
    costs = replace(costs, links=replace(costs.links, inter_node_bytes_per_s=100.0))
    bare = plan_of_cuts(([(2, 2), (2, 2)], 8), ([(2, 2), (2, 2)], 8))
    plan = with_shadows(bare, costs, fault_tolerance=2)
    assert plan.shadows
    asked = Change(
        plan=plan,
        base=plan,
        live=tuple(map(NodeName, ("n0", "n2", "n3"))),
        generation=Generation(2),
        templates=generate_templates(costs, range(1, 3)),
        profile=costs,
        fault_tolerance=2,
        tied=False,
        shadows=True,
    )
    found = answer(asked, wanted).found.plan
    assert all(len(hop.workers) == 2 for route in found.routes for hop in route.hops)
    last = replace(asked, live=(NodeName("n0"), NodeName("n2")))
    found = answer(last, wanted)
    assert (found.policy, found.found.plan.nodes) == ("templates", last.live)
    refused = answers(last)["reroute"]
    assert isinstance(refused, PlanInfeasible)
    assert "has no time of a layer for so few of them" in str(refused)


def test_a_shadow_without_memory_to_compute_does_not_take_over() -> None:
    asked = lone("n0")
    layers = tuple(replace(layer, activation_bytes=100) for layer in asked.profile.layers)
    wide = replace(asked.profile, layers=layers)
    tight = replace(wide, gpu_memory_bytes=peak_bytes(asked.plan, wide))
    assert isinstance(answers(replace(asked, profile=wide))["reroute"], Answer)
    refused = answers(replace(asked, profile=tight))["reroute"]
    assert isinstance(refused, PlanInfeasible)
    assert "move state instead" in str(refused)


@pytest.mark.parametrize(("policy", "kept", "of"), [("templates", 17, 21), ("reroute", 17, 26)])
def test_most_communicators_of_a_plan_are_those_of_the_plan_before(
    policy: RecoveryPolicy, kept: int, of: int
) -> None:
    """Workers keep these, and connect the others (docs/cuda.md)."""
    asked = change([4, 4, 4], "n5")
    before = communicators(asked.plan, tied=False)
    after = communicators(answer(asked, policy).found.plan, tied=False)
    assert (len(set(before) & set(after)), len(after)) == (kept, of)


def test_state_that_takes_longer_than_the_horizon_moves_where_nothing_else_is_possible() -> None:
    asked = change([4, 4], "n1 n5", state_bytes=2 * GIGABYTE)
    links = replace(asked.profile.links, inter_node_bytes_per_s=3e6)
    found = answer(replace(asked, profile=replace(asked.profile, links=links)), "auto")
    assert found.policy == "templates"
    assert found.stall_s > 600


def test_layers_that_take_no_time_are_planned() -> None:
    assert answer(change([4, 4], "n1", forward_s=0.0), "auto").found.plan.microbatches == 16


@pytest.mark.parametrize("sizes", [(3, 2), (4, 2, 2), (2, 2)])
def test_racks_cost_no_bytes_and_no_step_time(sizes: tuple[int, ...]) -> None:
    asked = change(sizes, "n0", state_bytes=GIGABYTE, joined=["x", "y"])
    labelled = replace(asked, racks=dict(zip(asked.live, "abab" * 3, strict=False)))
    plain, found = (answer(one, "templates") for one in (asked, labelled))
    assert found.exposure.racks == 2
    plain_racks = Exposure.of(plain.found.plan, racks=labelled.racks)
    assert found.exposure.fatal_racks <= plain_racks.fatal_racks
    assert (found.moved_bytes, found.stall_s) == (plain.moved_bytes, plain.stall_s)
    assert found.step_s == plain.step_s
    assert set(found.found.plan.nodes) | set(found.found.idle) == set(asked.live)
