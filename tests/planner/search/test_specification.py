"""Node specification: n0 by memory, consecutive sizes, and causes that say what is missing."""

from functools import cache, partial

import pytest

from oobleck.core.errors import PlanInfeasible
from oobleck.planner.search.firstplan import node_specification
from support.profiles import profile_of


def test_sizes_go_from_what_memory_needs_to_what_the_other_pipelines_leave() -> None:
    # 8 layers of 1000 bytes of state and 10 per micro-batch in flight; 3 layers per node.
    profile = profile_of([1.0] * 8, memory=3100)
    assert node_specification(profile, nodes=10, fault_tolerance=1) == range(3, 8)
    assert node_specification(profile, nodes=6, fault_tolerance=1) == range(3, 6)
    assert node_specification(profile, nodes=30, fault_tolerance=2) == range(3, 9)


def test_min_nodes_raises_the_smallest_size() -> None:
    profile = profile_of([1.0] * 8)
    assert node_specification(profile, nodes=5, fault_tolerance=1, min_nodes=2) == range(2, 4)


def test_too_few_nodes_are_told_how_many_are_needed() -> None:
    profile = profile_of([1.0] * 4, memory=2100)
    with pytest.raises(PlanInfeasible) as caught:
        node_specification(profile, nodes=3, fault_tolerance=1)
    assert caught.value.causes == (
        "needs 4 nodes: fault_tolerance 1 and pipelines of at least 2 nodes; 3 are live; "
        "add 1 node, lower fault_tolerance to 0 or use workers with at least 4.0 KiB, "
        "1.9 KiB more than training may use of one (2.1 KiB)",
    )
    enough = profile_of([1.0] * 4, memory=4040)
    assert node_specification(enough, nodes=3, fault_tolerance=1).start == 1


def test_with_shadows_n0_nodes_are_enough_where_they_are_more_than_may_be_lost() -> None:
    profile = profile_of([1.0] * 6)
    asked = partial(node_specification, profile, min_nodes=2, shadows=True)
    assert asked(nodes=2, fault_tolerance=1) == range(2, 3)
    assert asked(nodes=4, fault_tolerance=3).start == 2
    with pytest.raises(PlanInfeasible, match="needs 8 nodes, or 4 with memory for shadows") as told:
        asked(nodes=3, fault_tolerance=3)
    assert "lower fault_tolerance to 0 (2 with memory for shadows)" in str(told.value)
    assert asked(nodes=3, fault_tolerance=2).start == 2


def test_less_than_one_pipeline_is_told_what_would_do() -> None:
    profile = profile_of([1.0] * 4, memory=1100)
    with pytest.raises(PlanInfeasible) as caught:
        node_specification(profile, nodes=2, fault_tolerance=0)
    (cause,) = caught.value.causes
    assert cause.startswith(
        "needs 4 nodes: fault_tolerance 0 and pipelines of at least 4 nodes; 2 are live; "
        "add 2 nodes or use workers with at least 2.0 KiB, "
    )
    # No memory makes pipelines of 2 nodes where they are to have 3.
    with pytest.raises(PlanInfeasible, match=r"2 are live; add 1 node$"):
        node_specification(profile_of([1.0] * 4), nodes=2, fault_tolerance=0, min_nodes=3)


def test_too_little_memory_is_told_in_units_that_people_read() -> None:
    # Two nodes: the last has 2 layers or 1; the first stage keeps 2 micro-batches in flight.
    profile = profile_of([1.0, 1.0], memory=1009)
    with pytest.raises(
        PlanInfeasible,
        match=r"at least 1020 B, 11 B more .* \(1009 B\), for pipelines of 2 nodes",
    ):
        node_specification(profile, nodes=4, fault_tolerance=0)
    enough = profile_of([1.0, 1.0], memory=1020)
    assert node_specification(enough, nodes=4, fault_tolerance=0) == range(2, 3)


def test_gpus_without_use_are_a_cause_of_their_own() -> None:
    with pytest.raises(PlanInfeasible, match="all 4 workers of a node; lower --workers-per-node"):
        node_specification(profile_of([1.0] * 2, gpus_per_node=4), nodes=1, fault_tolerance=0)
    with pytest.raises(PlanInfeasible, match="no time for 1 workers or fewer"):
        node_specification(profile_of([1.0] * 2, gpus=(2,)), nodes=1, fault_tolerance=0)


def test_min_nodes_above_what_the_model_can_use() -> None:
    with pytest.raises(PlanInfeasible, match="fits 3 at most; lower min_nodes_per_pipeline"):
        node_specification(profile_of([1.0] * 3), nodes=9, fault_tolerance=0, min_nodes=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0, "fault_tolerance": 0}, "nodes is 0; it must be at least 1"),
        ({"nodes": 1, "fault_tolerance": -1}, "fault_tolerance is -1"),
        ({"nodes": 1, "fault_tolerance": 0, "min_nodes": 0}, "min_nodes is 0"),
    ],
)
def test_arguments_out_of_range_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        node_specification(profile_of([1.0] * 3), **arguments)


@cache
def most_parts(sizes: range, most: int) -> list[int | None]:
    """[number of nodes]: the most pipelines whose sizes add up to it; None for no such set."""
    parts: list[int | None] = [0]
    for nodes in range(1, most + 1):
        rest = [parts[nodes - size] for size in sizes if size <= nodes]
        known = [part + 1 for part in rest if part is not None]
        parts.append(max(known, default=None))
    return parts


@pytest.mark.parametrize(
    "smallest",
    [
        pytest.param(each, marks=() if each in (1, 2, 7, 12) else pytest.mark.soak)
        for each in range(1, 13)
    ],
)
def test_every_number_of_nodes_is_a_sum_of_sizes(smallest: int) -> None:
    """Oobleck §4.1.1: no live node idles, and f + 1 pipelines stand while nodes allow it."""
    layers = smallest * -(-64 // smallest)
    profile = profile_of(
        [1.0] * layers, state=1000, activation=0, memory=1000 * (layers // smallest)
    )
    for fault_tolerance in range(5):
        for nodes in range((fault_tolerance + 1) * smallest, 65):
            sizes = node_specification(profile, nodes=nodes, fault_tolerance=fault_tolerance)
            assert sizes.start == smallest
            parts = most_parts(sizes, 64)
            for live in range(smallest, nodes + 1):
                made = parts[live]
                assert made is not None, (nodes, fault_tolerance, live)
                if live >= (fault_tolerance + 1) * smallest:
                    assert made >= fault_tolerance + 1, (nodes, fault_tolerance, live)


def test_n0_follows_from_what_is_kept_in_flight() -> None:
    """The first of S stages keeps S micro-batches, so n0 is not bytes over memory."""
    profile = profile_of([1.0] * 8, state=1000, activation=500, memory=5000)
    # From the last stage on, with 1, 2, 3, 4 micro-batches in flight, a layer needs 1500, 2000,
    # 2500 and 3000 bytes, so that stages have room for 3 + 2 + 2 + 1 layers; 8000 bytes of state
    # alone would fit on 2 nodes.
    assert node_specification(profile, nodes=5, fault_tolerance=0).start == 4
