"""What of a plan is made of whole pipelines."""

from hypothesis import given
from hypothesis import strategies as st

from oobleck.core.ids import Generation, NodeName, WorkerId
from oobleck.core.plan import Pipeline, Plan, is_of_pipelines, pipelines_within
from oobleck.core.routes import Hold, Hop, Route
from oobleck.planner.recovery.reroute import reroute


def worker(name: str) -> WorkerId:
    return WorkerId(NodeName(name), 0)


def pipelines(*shares: int) -> Plan:
    """One of two nodes, a0 and b0, a1 and b1 and so on, for each share."""
    return Plan.of_pipelines(
        (
            Pipeline(
                nodes=(NodeName(f"a{number}"), NodeName(f"b{number}")),
                stages=(
                    Hold(first_layer=0, last_layer=1, workers=(worker(f"a{number}"),)),
                    Hold(first_layer=2, last_layer=3, workers=(worker(f"b{number}"),)),
                ),
                microbatches=share,
            )
            for number, share in enumerate(shares)
        ),
        generation=Generation(1),
    )


def without(plan: Plan, *nodes: str) -> Plan:
    return reroute(plan, {worker(name) for name in nodes}, generation=Generation(2))


def test_a_plan_of_pipelines_is_itself() -> None:
    plan = pipelines(4, 3)
    assert is_of_pipelines(plan)
    assert pipelines_within(plan) is plan


def test_of_a_re_routed_plan_the_whole_pipelines_take_all_micro_batches() -> None:
    plan = without(pipelines(4, 4, 4), "a2")
    assert not is_of_pipelines(plan)
    found = pipelines_within(plan)
    assert is_of_pipelines(found)
    assert [one.nodes for one in found.pipelines] == [("a0", "b0"), ("a1", "b1")]
    assert [one.microbatches for one in found.pipelines] == [6, 6]
    assert found.generation == plan.generation


def test_remainders_go_to_the_largest_first() -> None:
    found = pipelines_within(without(pipelines(5, 4, 2), "b2"))
    assert [one.microbatches for one in found.pipelines] == [6, 5]


def test_pipelines_that_are_left_whole_are_of_pipelines() -> None:
    assert is_of_pipelines(without(pipelines(4, 4), "a1", "b1"))


def test_a_layer_held_beside_what_is_run_makes_no_pipeline() -> None:
    holds = (
        Hold(first_layer=0, last_layer=3, workers=(worker("a"),)),
        Hold(first_layer=0, last_layer=1, workers=(worker("b"),)),
    )
    hop = Hop(first_layer=0, last_layer=3, workers=(worker("a"),))
    route = Route(hops=(hop,), microbatches=2)
    plan = Plan(generation=Generation(1), holds=holds, routes=(route,))
    assert not is_of_pipelines(plan)
    assert pipelines_within(plan).nodes == ("a",)


@given(
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    lost=st.sets(st.tuples(st.sampled_from("ab"), st.integers(0, 4)), max_size=4),
)
def test_every_micro_batch_has_a_pipeline(shares: list[int], lost: set[tuple[str, int]]) -> None:
    gone = {f"{side}{number}" for side, number in lost if 0 < number < len(shares)}
    plan = without(pipelines(*shares), *gone)
    found = pipelines_within(plan)
    assert is_of_pipelines(found)
    assert found.microbatches == plan.microbatches
    assert set(found.nodes) <= set(plan.nodes)
    assert all(one.microbatches for one in found.pipelines)
