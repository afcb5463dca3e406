"""When sums of gradients may begin, worker by worker."""

import pytest

from oobleck.planner.cost.ends import plan_end_s
from oobleck.planner.search.shadows import with_shadows
from support.plans import plan_of_cuts, worker
from support.profiles import profile_of


def test_a_sum_does_not_wait_for_who_holds_the_layer_and_does_not_run_it() -> None:
    """Each stage is a shadow of its neighbour. The last one has computed at 5 s and is summed with
    the first, which has at 10 s: that sum of 3 s is over by then."""
    profile = profile_of([1.0] * 3, state=12 * 10**9)
    plan = with_shadows(plan_of_cuts(([1, 1, 1], 4)), profile, fault_tolerance=1)
    assert plan.shadows == {worker(0): (2,), worker(1): (0,), worker(2): (1,)}
    ends_s = {worker(0): 10.0, worker(1): 6.0, worker(2): 5.0}
    found = plan_end_s(plan, ends_s, profile, tied=False)
    assert found == pytest.approx(13.0, abs=0.01)
