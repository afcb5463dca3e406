"""Plans that contradict themselves cannot be built."""

from dataclasses import replace

import pytest

from oobleck.core.codec import decode, encode
from oobleck.core.ids import Generation, NodeName
from oobleck.core.plan import Pipeline, Plan, WorkerRate
from oobleck.core.routes import Hold, Route, Shard
from oobleck.planner.recovery.reconfigure import can_lose
from support.plans import hold, hop, plan_of_cuts, route, worker


def plan(*parts: Hold | Route) -> Plan:
    return Plan(
        generation=Generation(1),
        holds=tuple(part for part in parts if isinstance(part, Hold)),
        routes=tuple(part for part in parts if isinstance(part, Route)),
    )


#: n1 computes the whole model for some micro-batches and the end of it for others; n2 holds the
#: last layer and computes nothing.
ROUTED = plan(
    hold(0, 1, worker(0)),
    hold(0, 3, worker(1)),
    hold(3, 3, worker(2)),
    route(hop(0, 1, worker(0)), hop(2, 3, worker(1)), microbatches=3),
    route(hop(0, 3, worker(1)), microbatches=2),
)


def test_routes_take_the_batch_in_their_order() -> None:
    assert ROUTED.microbatches == 5
    assert ROUTED.shares == (range(3), range(3, 5))
    assert ROUTED.layer_count == 4
    assert ROUTED.workers == (worker(0), worker(1), worker(2))
    assert ROUTED.nodes == ("n0", "n1", "n2")


def test_what_is_held_follows_from_holds_and_not_from_routes() -> None:
    assert ROUTED.owners(3) == (worker(1), worker(2))
    assert ROUTED.held == {worker(0): (0, 1), worker(1): (0, 1, 2, 3), worker(2): (3,)}
    assert ROUTED.shards[worker(2)] == {Shard(3)}
    assert ROUTED.hold_of(worker(1), 2).first_layer == 0
    with pytest.raises(ValueError, match="n2/0 does not hold layer 2 in generation 1"):
        ROUTED.hold_of(worker(2), 2)


def test_what_a_worker_holds_need_not_be_contiguous() -> None:
    both = plan(
        hold(0, 0, worker(0)),
        hold(3, 3, worker(0)),
        hold(1, 2, worker(1)),
        route(hop(0, 0, worker(0)), hop(1, 2, worker(1)), hop(3, 3, worker(0))),
    )
    assert both.held[worker(0)] == (0, 3)
    assert both.shards[worker(0)] == {Shard(0), Shard(3)}


def test_nodes_with_a_copy_count_for_what_can_be_lost() -> None:
    assert can_lose(ROUTED) == 0  # layer 2 is with n1 alone
    assert can_lose(replace(ROUTED, holds=(*ROUTED.holds, hold(2, 2, worker(2))))) == 1
    twice = hold(2, 2, worker(1, 1))
    assert can_lose(replace(ROUTED, holds=(*ROUTED.holds, twice))) == 0  # on the same node


def test_other_times_of_a_plan_leave_all_that_follows_from_its_holds() -> None:
    assert hash(ROUTED)
    assert ROUTED.rate([worker(0)]) == 1.0
    rates = (WorkerRate(worker=worker(0), rate=0.5),)
    slow = ROUTED.having(generation=Generation(2), schedule="zb-h1", rates=rates)
    assert slow == replace(ROUTED, generation=Generation(2), schedule="zb-h1", rates=rates)
    assert hash(slow) != hash(ROUTED)
    assert slow.rate([worker(0)]) == 0.5
    assert slow.workers is ROUTED.workers
    with pytest.raises(ValueError, match="it is no worker of the plan"):
        ROUTED.having(rates=(WorkerRate(worker=worker(7), rate=0.5),))


def test_it_comes_back_from_its_text() -> None:
    assert decode(Plan, encode(ROUTED)) == ROUTED
    assert hash(decode(Plan, encode(ROUTED))) == hash(ROUTED)


def test_of_pipelines_it_is_made_of_them() -> None:
    cut = plan_of_cuts(([(1, 2), 1], 2), ([2], 1))
    assert Plan.of_pipelines(cut.pipelines, generation=Generation(1)) == cut
    assert [(p.nodes, p.microbatches) for p in cut.pipelines] == [(("n0", "n1"), 2), (("n2",), 1)]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([hold(0, 1, worker(0))], "needs at least one route"),
        (
            [hold(0, 1, worker(0)), route(hop(0, 1, worker(0))), route(hop(0, 0, worker(0)))],
            "disagree on the number of layers",
        ),
        (
            [hold(0, 1, worker(0)), hold(0, 0, worker(1)), route(hop(0, 1, worker(1)))],
            "n1/0 compute layer 1, which they do not hold",
        ),
        (
            # Each has half of the rows and needs half of the state.
            [
                hold(0, 0, worker(0)),
                hold(0, 0, worker(0, 1)),
                route(hop(0, 0, worker(0), worker(0, 1))),
            ],
            "n0/0, n0/1 compute layer 0, which they do not hold",
        ),
        (
            [hold(0, 1, worker(0)), hold(1, 1, worker(0)), route(hop(0, 1, worker(0)))],
            "n0/0 holds layer 1 twice",
        ),
        (
            [hold(0, 0, worker(0)), hold(1, 1, worker(1)), route(hop(0, 0, worker(0)))],
            "none of the model's 1",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(parts: list[Hold | Route], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(*parts)


#: More than could be looked at one by one.
MANY = 1 << 50


def test_a_plan_of_any_size_is_checked_at_once() -> None:
    """An agent may tell the master of any plan."""
    with pytest.raises(ValueError, match="none of the model's 1"):
        plan(hold(0, 0, worker(0)), hold(0, MANY, worker(1)), route(hop(0, 0, worker(0))))
    with pytest.raises(ValueError, match="holds layer 1 twice"):
        plan(hold(0, MANY, worker(0)), hold(1, 1, worker(0)), route(hop(0, MANY, worker(0))))
    with pytest.raises(ValueError, match=f"n1/0 compute layer {MANY}, which they do not hold"):
        plan(
            hold(0, MANY, worker(0)),
            hold(0, MANY - 1, worker(1)),
            route(hop(0, 1, worker(0)), hop(2, MANY, worker(1))),
        )


def test_a_node_stands_in_one_pipeline() -> None:
    one = Pipeline(nodes=(NodeName("n0"),), stages=(hold(0, 0, worker(0)),), microbatches=1)
    with pytest.raises(ValueError, match="a node is in two pipelines"):
        Plan.of_pipelines([one, one], generation=Generation(1))
