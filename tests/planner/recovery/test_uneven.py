"""What is done about slow workers, and when nothing is."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from oobleck.core.codec import encode
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import Generation, WorkerId
from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.planner.cost.estimate import estimate_step, peak_bytes
from oobleck.planner.cost.listed import estimate_listed
from oobleck.planner.recovery.answer import Change, splitting_weight
from oobleck.planner.recovery.chooser import weighed_s
from oobleck.planner.recovery.policies import answer
from oobleck.planner.recovery.reconfigure import can_lose
from oobleck.planner.recovery.uneven import candidates
from oobleck.planner.recovery.uneven.answer import by_rates
from oobleck.planner.recovery.worth import shadowed, worth_choosing
from oobleck.planner.search.shadows import with_shadows
from oobleck.planner.search.templates import generate_templates
from support.choices import for_slow as uneven
from support.plans import plan_of_cuts, plan_of_templates, worker
from support.profiles import profile_of


def costs(layers: int = 12) -> Profile:
    return profile_of([1.0] * layers, activation=100)


def over_slow_links(profile: Profile) -> Profile:
    """A layer takes minutes on its way."""
    return replace(profile, links=replace(profile.links, inter_node_bytes_per_s=5.0))


def change(
    rates: Mapping[WorkerId, float], *, sizes: Sequence[int] = (4, 4, 4), profile: Profile
) -> Change:
    """Pipelines of these sizes with 8 micro-batches each."""
    templates = generate_templates(profile, range(1, max(sizes) + 1))
    plan = plan_of_templates(templates, *((size, 8) for size in sizes))
    return Change(
        plan=plan,
        base=plan,
        live=plan.nodes,
        generation=Generation(2),
        templates=templates,
        profile=profile,
        fault_tolerance=1,
        tied=False,
        rates=rates,
    )


def test_a_slow_worker_is_relieved() -> None:
    asked = change({worker(5): 0.5}, profile=costs())
    now_s = estimate_step(asked.plan.with_rates(asked.rates), asked.profile).step_s
    found = uneven(asked)
    assert found.policy == "uneven"
    assert found.step_s < 0.75 * now_s
    assert found.found.plan.generation == 2
    assert found.found.plan.microbatches == 24
    assert [(str(one.worker), one.rate) for one in found.found.plan.rates] == [("n5/0", 0.5)]
    for words in ("n5/0 at 0.5 of the profiled speed", found.found.rule, f"{now_s:.4g} s", "bytes"):
        assert words in found.found.reason.replace(" B ", " bytes ")
    assert encode(uneven(asked)) == encode(found)


def test_of_no_gain_staying_is_better() -> None:
    with pytest.raises(PlanInfeasible, match=r"no other plan is better|not worth a change"):
        uneven(change({worker(5): 0.99}, profile=costs()))
    with pytest.raises(PlanInfeasible, match="no other plan is better"):
        uneven(change({}, profile=costs()))


def test_what_was_done_is_undone_when_the_worker_is_well() -> None:
    asked = change({worker(5): 0.25}, profile=costs())
    (running,) = (each for each in by_rates(asked)[1] if each.found.rule == "reshare")
    again = replace(asked, plan=running.found.plan, generation=Generation(3))
    assert by_rates(again)[0] == pytest.approx(running.step_s)
    well = uneven(replace(again, rates={}))
    assert well.step_s <= estimate_step(asked.base, asked.profile).step_s
    assert well.moved_bytes == 0
    assert "all workers are well again" in well.found.reason


@pytest.mark.parametrize("named", [False, True])
def test_what_was_done_is_undone_though_split_backwards_seem_faster(named: bool) -> None:
    """Under 1F1B, which was chosen or named; the way around splits backwards, if it may."""
    templates = generate_templates(costs(16), range(1, 5))
    plan = plan_of_templates(templates, *[(4, 32)] * 3)
    asked = change({worker(5): 0.8}, profile=costs(16))
    asked = replace(asked, plan=plan, base=plan, schedule_named=named)
    (around,) = (each for each in by_rates(asked)[1] if each.found.rule == "partial reroute")
    listing = around.found.plan.listing
    assert listing is not None
    assert listing.split != named
    well = replace(asked, plan=around.found.plan, rates={}, generation=Generation(3))
    found = uneven(well).found
    assert (found.rule, found.plan.routes) == ("as planned", plan.routes)


def test_split_backwards_have_to_gain_what_they_may_cost() -> None:
    """As for the schedule of a first plan."""
    asked = change({worker(5): 0.5}, profile=costs())
    (around,) = (each for each in by_rates(asked)[1] if each.found.rule == "partial reroute")
    assert splitting_weight(around.found.plan) == splitting_weight(
        replace(asked.plan, schedule="zb-h1")
    )
    weight = splitting_weight(around.found.plan)
    assert (splitting_weight(asked.plan), weight) == (1.0, 1.05)
    for step_s, each, why in (
        (9.4, around, "a step would take 9.4 s in place of 10 s, with backwards split"),
        (9.2, around, ""),
        (9.4, replace(around, weight=1.0), ""),
    ):
        offers = [replace(each, step_s=step_s)]
        if why:
            with pytest.raises(PlanInfeasible, match=why):
                worth_choosing(offers, asked.plan, 10.0)
        else:
            assert worth_choosing(offers, asked.plan, 10.0)


def test_what_was_done_after_another_cut_is_undone_too() -> None:
    """Some micro-batches go around in pipelines that are cut anew; nobody has to stay slow then."""
    asked = change({worker(1): 0.5}, sizes=(4, 4), profile=costs())
    (cut,) = (each for each in by_rates(asked)[1] if each.found.rule == "recut")
    again = replace(
        asked,
        plan=cut.found.plan,
        base=cut.found.plan,
        rates={worker(1): 0.5, worker(6): 0.25},
        generation=Generation(3),
    )
    (around,) = (each for each in by_rates(again)[1] if each.found.rule == "partial reroute")
    well = replace(again, plan=around.found.plan, rates={}, generation=Generation(4))
    before_s, found = by_rates(well)
    assert [each.found.rule for each in found if not each.moved_bytes] == ["as planned", "reshare"]
    assert uneven(well).step_s < 0.9 * before_s


def test_shadows_stay_where_what_was_done_is_undone() -> None:
    asked = change({}, sizes=(4, 4), profile=costs())
    plan = with_shadows(asked.plan, asked.profile, fault_tolerance=2)
    assert plan.shadows
    slow = replace(asked, plan=plan, rates={worker(1): 0.25})
    (around,) = (each for each in by_rates(slow)[1] if each.found.rule == "partial reroute")
    _, found = by_rates(replace(asked, plan=around.found.plan, generation=Generation(3)))
    (planned,) = (each for each in found if each.found.rule == "as planned")
    assert planned.found.plan.shards == plan.shards
    assert planned.found.plan.routes == asked.plan.routes


def test_in_another_cut_what_is_held_in_place_stays_a_shadow() -> None:
    asked = replace(change({}, sizes=(4, 4), profile=costs()), fault_tolerance=2, shadows=True)
    plan = with_shadows(asked.plan, asked.profile, fault_tolerance=2)
    slow = replace(asked, plan=plan, base=plan, rates={worker(1): 0.25})
    (cut,) = (each for each in by_rates(slow)[1] if each.found.rule == "recut")
    kept = cut.found.plan
    assert kept.shadows
    for own, layers in kept.shadows.items():
        assert {shard for shard in kept.shards[own] if shard.layer in layers} <= plan.shards[own]
    assert can_lose(kept) == 2


def test_behind_another_cut_come_the_shadows_that_it_has_given_up() -> None:
    asked = change({worker(0): 0.5}, sizes=(4, 4), profile=costs())
    short = replace(asked.profile, gpu_memory_bytes=5750)
    plan = with_shadows(asked.plan, short, fault_tolerance=2)
    asked = replace(asked, profile=short, plan=plan, base=plan, fault_tolerance=2, shadows=True)
    found = uneven(asked)
    cut = found.found.plan
    assert (found.found.rule, can_lose(plan), can_lose(cut)) == ("recut", 2, 1)
    assert found.then == "shadow"
    behind = shadowed(replace(asked, plan=cut, base=cut, generation=Generation(3))).found.plan
    assert can_lose(behind) == 2
    assert behind.routes == cut.routes


@pytest.mark.parametrize("rate", [0.35, 0.6])
def test_no_cut_leaves_less_to_lose_for_good(rate: float) -> None:
    """There is no room for the shadows that it would need."""
    asked = change({worker(1): rate}, sizes=(2, 2), profile=costs(8))
    short = replace(asked.profile, gpu_memory_bytes=6900)
    plan = with_shadows(asked.plan, short, fault_tolerance=2)
    assert can_lose(plan) == 2
    asked = replace(asked, profile=short, plan=plan, base=plan, fault_tolerance=2, shadows=True)
    offers = by_rates(asked)[1]
    assert offers
    assert min(can_lose(each.found.plan) for each in offers) == 2
    one_less = replace(asked, fault_tolerance=1)
    assert "recut" in {each.found.rule for each in by_rates(one_less)[1]}


def test_after_a_cut_a_loss_is_answered_from_what_is_held_then() -> None:
    asked = change({worker(1): 0.25}, sizes=(4, 4), profile=costs())
    (cut,) = (each for each in by_rates(asked)[1] if each.found.rule == "recut")
    held = cut.found.plan
    live = tuple(node for node in held.nodes if node != "n7")
    lost = replace(asked, plan=held, base=held, live=live, generation=Generation(3))
    found = answer(lost, "templates")
    assert held.pipelines[0].stages == found.found.plan.pipelines[0].stages
    assert found.moved_bytes < answer(replace(lost, base=asked.base), "templates").moved_bytes
    # The cut was made for a worker that is slow no more.
    well = answer(replace(lost, rates={}), "templates").found
    assert well.plan.pipelines[0].stages == asked.plan.pipelines[0].stages
    assert "n1/0 is slow no more" in well.reason


def test_more_microbatches_do_not_go_where_there_is_no_room() -> None:
    plan = replace(plan_of_cuts(([3, 3], 4), ([3, 3], 4)), schedule="gpipe")
    asked = change({worker(0): 0.5}, sizes=(2, 2), profile=costs(6))
    profile = replace(asked.profile, gpu_memory_bytes=peak_bytes(plan, asked.profile))
    asked = replace(asked, plan=plan, base=plan, live=plan.nodes, profile=profile)
    found = by_rates(asked)[1]
    assert found
    for plan in (each.found.plan for each in found):
        listed = plan.listing is not None
        peak = estimate_listed(plan, profile, tied=False).peak_bytes if listed else 0
        assert max(peak, 0 if listed else peak_bytes(plan, profile)) <= profile.gpu_memory_bytes


def test_what_takes_long_to_cut_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """All stages of all pipelines count."""
    asked = change({worker(5): 0.5}, profile=costs())
    cuts = 3 * 4 * 12**2
    for most, there in ((cuts, True), (cuts - 1, False)):
        monkeypatch.setattr(candidates, "_MOST_CUTS", most)
        assert ("recut" in {each.found.rule for each in by_rates(asked)[1]}) == there


def test_state_that_takes_long_to_move_does_not_move() -> None:
    """One pipeline has nobody to share with: only another cut helps."""
    rates = {worker(1): 0.5}
    found = uneven(change(rates, sizes=(4,), profile=costs()))
    assert found.found.rule == "recut"
    assert found.moved_bytes > 0
    with pytest.raises(PlanInfeasible, match="not worth a change"):
        uneven(change(rates, sizes=(4,), profile=over_slow_links(costs())))


def test_what_costs_too_much_does_not_keep_out_what_costs_nothing() -> None:
    """Standing by makes most steps, and takes too long until then."""
    known = costs()
    profile = replace(
        known,
        layers=tuple(replace(layer, output_bytes=0, parameter_bytes=0) for layer in known.layers),
        links=replace(known.links, inter_node_bytes_per_s=1.0),
    )
    asked = change({worker(1): 0.05}, sizes=(2, 2, 2), profile=profile)
    now_s, offers = by_rates(asked)
    fastest = min(offers, key=weighed_s)
    assert fastest.found.rule == "stand by"
    assert fastest.stall_s > 600
    waits = change({worker(1): 0.05}, sizes=(2, 2, 2), profile=over_slow_links(known))
    aside = next(each for each in by_rates(waits)[1] if each.found.rule == "stand by")
    assert aside.late_s > aside.outrun_bytes / waits.profile.links.inter_node_bytes_per_s
    found = uneven(asked)
    assert found.found.rule != "stand by"
    assert found.step_s < 0.2 * now_s


def test_a_recut_pipeline_has_room() -> None:
    asked = change({worker(1): 0.5}, sizes=(4,), profile=costs())
    least = peak_bytes(asked.plan, asked.profile)
    for memory in (least, 2 * least):
        tight = replace(asked, profile=replace(asked.profile, gpu_memory_bytes=memory))
        for found in by_rates(tight)[1]:
            assert peak_bytes(found.found.plan, tight.profile) <= memory


def test_a_very_slow_node_stands_by_and_is_taken_back() -> None:
    asked = change({worker(5): 0.05}, sizes=(3, 3), profile=costs())
    by_rule = {each.found.rule: each for each in by_rates(asked)[1]}
    assert list(by_rule) == ["reshare", "partial reroute", "recut", "stand by"]
    found = by_rule["stand by"].found
    assert found.idle == ("n5",)
    assert "n5" not in found.plan.nodes
    aside = replace(asked, plan=found.plan, base=found.plan, generation=Generation(3))
    with pytest.raises(PlanInfeasible, match="not worth a change"):
        uneven(aside)
    back = uneven(replace(aside, rates={worker(5): 0.3}))
    assert back.found.rule == "take back"
    assert back.found.plan.nodes == asked.plan.nodes
    assert [str(one.worker) for one in back.found.plan.rates] == ["n5/0"]
    # Another one may take its place at the same time.
    swapped = replace(aside, rates={worker(5): 0.3, worker(2): 0.05})
    out = [set(asked.plan.nodes) - {*each.found.plan.nodes} for each in by_rates(swapped)[1]]
    assert {"n2"} in out


@pytest.mark.parametrize(("sizes", "tolerance", "there"), [((2, 2), 1, False), ((2, 2), 0, True)])
def test_nobody_stands_by_at_the_cost_of_a_guarantee(
    sizes: Sequence[int], tolerance: int, there: bool
) -> None:
    asked = change({worker(0): 0.05}, sizes=sizes, profile=costs())
    memory = 1.2 * peak_bytes(asked.plan, asked.profile)
    tight = replace(asked.profile, gpu_memory_bytes=round(memory))
    asked = replace(asked, fault_tolerance=tolerance, profile=tight)
    asked = replace(asked, templates=generate_templates(tight, range(2, 4)))
    assert any(each.found.rule == "stand by" for each in by_rates(asked)[1]) == there


def test_nobody_stands_by_who_alone_holds_a_layer() -> None:
    asked = replace(change({worker(1): 0.05}, sizes=(4,), profile=costs()), fault_tolerance=0)
    assert not [each for each in by_rates(asked)[1] if each.found.rule == "stand by"]


@pytest.mark.parametrize("wanted", ["templates", "reroute"])
def test_after_a_loss_the_rates_of_those_that_are_left_count(wanted: RecoveryPolicy) -> None:
    """n4 has the stage of the lost node in another pipeline."""
    rates = {worker(4): 0.5, worker(0): 0.5}
    asked = change(rates, profile=costs())
    asked = replace(asked, live=tuple(node for node in asked.live if node != "n0"))
    found = answer(asked, wanted)
    plan = found.found.plan
    assert found.policy == wanted
    assert [str(one.worker) for one in plan.rates] == ["n4/0"]
    blind = answer(replace(asked, rates={}), wanted).found.plan
    assert load(plan, worker(4)) < load(blind, worker(4))


def load(plan: Plan, of: WorkerId) -> int:
    """Layers of all micro-batches."""
    return sum(
        route.microbatches * len(hop.layers)
        for route in plan.routes
        for hop in route.hops
        if of in hop.workers
    )
