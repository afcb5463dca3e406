"""How much slower than others a worker is, by what each computes; `slow_*` among the scenarios tell
when that is called slow."""

from collections.abc import Mapping

import pytest

from oobleck.core.ids import Incarnation, NodeName, WorkerId
from oobleck.core.plan import Plan
from oobleck.core.profile import Profile
from oobleck.master.rules import pace
from oobleck.master.rules.pace import _sample, slowness_of
from oobleck.master.state.pace import Reading, Round
from oobleck.planner.cost.estimate import computing_by_layer_s
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of
from support.scenario import Player

A, B, C, D = (WorkerId(NodeName(name), 0) for name in "abcd")
#: Two pipelines, cut differently: every layer takes a second of its two holders.
CUT = {
    A: dict.fromkeys(range(4), 1.0),
    B: dict.fromkeys(range(4, 8), 1.0),
    C: dict.fromkeys(range(3), 1.0),
    D: dict.fromkeys(range(3, 8), 1.0),
}


def took(slower: dict[WorkerId, float], wrong: dict[int, float]) -> dict[WorkerId, float]:
    """Seconds of each worker, some slower than others, where the profile is wrong of layers."""
    return {
        worker: slower.get(worker, 1.0) * sum(s * wrong.get(layer, 1.0) for layer, s in own.items())
        for worker, own in CUT.items()
    }


def in_a_step_s(plan: Plan, profile: Profile) -> dict[WorkerId, float]:
    """Seconds that each worker computes in a step of the plan."""
    found = computing_by_layer_s(plan, profile)
    return {worker: sum(layers.values()) for worker, layers in found.items()}


@pytest.mark.parametrize("slow", [A, B, C, D])
def test_the_one_that_is_slow(slow: WorkerId) -> None:
    found = slowness_of(took({slow: 2.0}, {}), CUT)
    assert found[slow] == pytest.approx(2.0)
    assert all(found[worker] == pytest.approx(1.0) for worker in CUT if worker != slow)


def test_a_head_that_takes_longer_than_its_profile_makes_nobody_slow() -> None:
    """All who compute it need that time, also those that others share a right layer with."""
    found = slowness_of(took({}, {7: 5.0}), CUT)
    assert max(found.values()) < 1.2


def test_who_is_faster_than_all_others_makes_nobody_slow() -> None:
    """Nor those who compute the same layers."""
    for pipelines, speed in ((2, 1.5), (3, 2.0), (4, 3.0)):
        plan, profile = plan_of_cuts(*[([4, 4, 4, 4], 8)] * pipelines), profile_of([1.0] * 16)
        step_s = in_a_step_s(plan, profile)
        step_s[worker(0)] /= speed
        found = slowness_of(step_s, computing_by_layer_s(plan, profile))
        assert found.pop(worker(0)) == pytest.approx(1 / speed)
        assert list(found.values()) == pytest.approx([1.0] * len(found))


@pytest.mark.parametrize("head_s", [1.3, 3.0, 4.0, 6.0])
@pytest.mark.parametrize("cuts", [([4, 4, 4, 2], [5, 5, 4]), ([7, 7], [5, 5, 4])])
def test_a_head_that_is_profiled_wrong_makes_nobody_slow_in_these_cuts(
    cuts: tuple[list[int], list[int]], head_s: float
) -> None:
    """It takes 2 s."""
    plan = plan_of_cuts(*[(cut, 8) for cut in cuts])
    real = in_a_step_s(plan, profile_of([1.0] * 13 + [2.0]))
    profiled = computing_by_layer_s(plan, profile_of([1.0] * 13 + [head_s]))
    assert max(slowness_of(real, profiled).values()) < 1.2


def test_two_of_four_are_held_against_the_others() -> None:
    found = slowness_of(took({B: 3.0, C: 3.0}, {}), CUT)
    assert found[B] > 2.5
    assert found[C] == pytest.approx(3.0)
    assert found[A] == pytest.approx(1.0)


def test_who_computes_nothing_is_not_compared() -> None:
    assert slowness_of({A: 4.0, B: 4.0, C: 1.0}, {A: CUT[A], B: CUT[B]}) == {A: 1.0, B: 1.0}
    assert slowness_of({A: 4.0}, {}) == {}


@pytest.mark.parametrize("spent_s", [5e-324, 1e-20, 1e300])
def test_times_that_nobody_takes_say_nothing(spent_s: float) -> None:
    """Held against others, or others against them, they would be beyond all numbers."""
    before, after = (
        Round(
            at,
            {
                worker(0): Reading(Incarnation("a"), 2 * at, at * spent_s),
                worker(1): Reading(Incarnation("b"), 2 * at, at * 24.0),
            },
        )
        for at in (1, 2)
    )
    plan, profile = plan_of_cuts(([4, 4], 1)), profile_of([1.0] * 8)
    assert _sample(plan, profile, before, after).slowness == {worker(1): 1.0}


@pytest.mark.parametrize("times", ["1e-20", "1e12", "1e300"])
def test_nor_do_those_that_were_measured_standing_by(times: str) -> None:
    told = Player().play(
        "0.0 register n1 n2 n3 n4\n0.0 submit demo hidden=1024 steps=1000 f=0\n"
        "0.5 ready n1 n2 n3 n4\n0.7 enter 1 n1 n2 n3 n4\n1.0 steps 1 1 1\n"
        "1.0 compute 6 2 n2/0=20\n7.1 enter 2 n1 n2 n3 n4\n7.2 steps 2 2 2\n"
        f"7.3 compute 3 2\n12.0 alone 1 n2/0={times}\n13.0 rates"
    )
    assert "stand by" in told
    assert "rates: n2/0=0.05" in told


def test_each_that_was_measured_standing_by_is_worked_out_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every reconcile asks for all of them, however many stand by."""
    asked: list[Profile] = []

    def computing(plan: Plan, profile: Profile) -> Mapping[WorkerId, Mapping[int, float]]:
        asked.append(profile)
        return computing_by_layer_s(plan, profile)

    monkeypatch.setattr(pace, "computing_by_layer_s", computing)
    names = [f"n{number}" for number in range(10, 24)]
    slow = [f"{name}/0={20 + number / 10}" for number, name in enumerate(names[:5])]
    player, nodes = Player(), " ".join(names)
    player.play(
        f"0.0 register {nodes}\n0.0 submit demo hidden=1024 steps=1000 f=0\n0.5 ready {nodes}\n"
        f"0.7 enter 1 {nodes}\n1.0 steps 1 1 1\n1.0 compute 6 2 {' '.join(slow)}\n"
        f"7.1 enter 2 {nodes}\n7.2 steps 2 2 2\n7.3 compute 3 2"
    )
    before = len(asked)
    told = player.play(f"12.0 alone 1 {' '.join(slow)}\n13.0 look\n14.0 look\n15.0 rates")
    assert told.count("=0.05") == len(slow)
    assert len(asked) == before + len(slow)
