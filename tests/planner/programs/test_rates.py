"""The rates of a plan's workers: what may be said, and how it travels."""

import json
import math

import pytest

from oobleck.core.codec import decode, encode
from oobleck.core.plan import Plan, WorkerRate, is_of_pipelines
from support.plans import plan_of_cuts, worker

PLAN = plan_of_cuts(([1, (2, 2)], 2), ([3], 1))


@pytest.mark.parametrize("rate", [0.0, -0.5, 1.0, 1.5, math.inf, math.nan])
def test_a_rate_is_a_share_of_the_profiled_speed(rate: float) -> None:
    with pytest.raises(ValueError, match="rate of n0/0"):
        WorkerRate(worker=worker(0), rate=rate)


def test_rates_are_of_workers_of_the_plan_each_once() -> None:
    one, other = (WorkerRate(worker=worker(number), rate=0.5) for number in (0, 2))
    fields = {"generation": PLAN.generation, "holds": PLAN.holds, "routes": PLAN.routes}
    assert Plan(**fields, rates=(one, other)).rates == (one, other)
    for wrong in ((one, one), (other, one)):
        with pytest.raises(ValueError, match="sorted, each worker once"):
            Plan(**fields, rates=wrong)
    with pytest.raises(ValueError, match="rate of n9/0: it is no worker of the plan"):
        Plan(**fields, rates=(WorkerRate(worker=worker(9), rate=0.5),))


def test_the_slowest_worker_sets_the_rate_and_others_have_the_profiled_one() -> None:
    slow = PLAN.with_rates({worker(1, 1): 0.25, worker(1, 0): 0.5, worker(9): 0.1, worker(0): 1.0})
    assert [str(one.worker) for one in slow.rates] == ["n1/0", "n1/1"]
    assert slow.rate((worker(1, 0), worker(1, 1))) == 0.25
    assert slow.rate((worker(0),)) == 1.0
    assert is_of_pipelines(slow)
    assert slow.with_rates({}) == PLAN
    assert slow != PLAN


def test_rates_travel_and_plans_without_them_are_read() -> None:
    slow = PLAN.with_rates({worker(1, 1): 0.25})
    assert decode(Plan, encode(slow)) == slow
    before = json.loads(encode(PLAN))
    del before["rates"]
    assert decode(Plan, json.dumps(before)) == PLAN
    for rate in ("0", "2", "1e999", '"a"'):
        text = encode(slow).replace(b'"rate":0.25', f'"rate":{rate}'.encode())
        with pytest.raises(ValueError):  # noqa: PT011
            decode(Plan, text)
