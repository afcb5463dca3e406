"""How much slower than others a worker is, by what each computes; `slow_*` among the scenarios tell
when that is called slow."""

import pytest

from oobleck.master.rules.pace import slowness_of
from oobleck.planner.ids import NodeName, WorkerId

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


@pytest.mark.parametrize("slow", [A, B, C, D])
def test_the_one_that_is_slow(slow: WorkerId) -> None:
    found = slowness_of(took({slow: 2.0}, {}), CUT)
    assert found[slow] == pytest.approx(2.0)
    assert all(found[worker] == pytest.approx(1.0) for worker in CUT if worker != slow)


def test_a_head_that_takes_longer_than_its_profile_makes_nobody_slow() -> None:
    """All who compute it need that time, also those that others share a right layer with."""
    found = slowness_of(took({}, {7: 5.0}), CUT)
    assert max(found.values()) < 1.2


def test_two_of_four_are_held_against_the_others() -> None:
    found = slowness_of(took({B: 3.0, C: 3.0}, {}), CUT)
    assert found[B] > 2.5
    assert found[C] == pytest.approx(3.0)
    assert found[A] == pytest.approx(1.0)


def test_who_computes_nothing_is_not_compared() -> None:
    assert slowness_of({A: 4.0, B: 4.0, C: 1.0}, {A: CUT[A], B: CUT[B]}) == {A: 1.0, B: 1.0}
    assert slowness_of({A: 4.0}, {}) == {}
