"""Settings of a job: their search against all of a small grid, racks, and spares."""

from itertools import product

import pytest

from oobleck.planner.simulate.racks import parse_racks, with_racks
from oobleck.planner.simulate.search import NOTHING, Point, Tried, search
from oobleck.planner.simulate.trace import Row, parse_rows, trace_of

HEAD = "time_s,event,node,value\n"
START = Point(fault_tolerance=1, spares=0, min_nodes=2, checkpoint_every_s=3600)


def test_search_finds_the_best_of_all_where_there_is_one_hill() -> None:
    def attempt(point: Point) -> Tried:
        if point.min_nodes > 3:
            return Tried(point=point, value=NOTHING, figures={}, refused="needs more nodes")
        value = 100.0 - (point.fault_tolerance - 2) ** 2 - 3 * abs(point.spares - 1)
        value -= (point.min_nodes - 1) / 10 + abs(point.checkpoint_every_s - 900) / 1e4
        return Tried(point=point, value=value, figures={"samples_per_s": value})

    found = search(START, 6, attempt)
    grid = product(range(6), range(6), range(1, 6), (60, 300, 900, 1800, 3600, 7200))
    best = max(
        (
            attempt(Point(fault_tolerance=f, spares=k, min_nodes=n, checkpoint_every_s=every_s))
            for f, k, n, every_s in grid
        ),
        key=lambda one: one.value,
    )
    assert found.best == best
    assert len(found.tried) < 40
    told = found.data("samples_per_s")
    assert told["best"]["worse_by"] == 0
    assert (told["best"]["fault_tolerance"], told["best"]["spares"]) == (2, 1)
    assert told["second"]["worse_by"] == pytest.approx(0.06 / 100)
    assert len(told["neighbours"]) == 7
    assert all(one["worse_by"] > 0 for one in told["neighbours"])


def test_search_tells_what_has_no_plan_and_leaves_out_checkpoints_that_are_not_wanted() -> None:
    def attempt(point: Point) -> Tried:
        if point != START_WITHOUT:
            return Tried(point=point, value=NOTHING, figures={}, refused="needs 4 nodes")
        return Tried(point=point, value=-3.0, figures={"cost_per_million_samples": 3.0})

    told = search(START_WITHOUT, 4, attempt).data("cost_per_million_samples")
    assert told["second"] is None
    assert {one["refused"] for one in told["neighbours"]} == {"needs 4 nodes"}
    assert {one["checkpoint_every_s"] for one in told["neighbours"]} == {0}


START_WITHOUT = Point(fault_tolerance=1, spares=0, min_nodes=2, checkpoint_every_s=0)


def test_a_row_of_a_rack_hits_its_nodes_that_are_there_at_once() -> None:
    racks = parse_racks("node,rack\na,r1\nb,r1\nc,r2\n\n")
    rows = parse_rows(
        f"{HEAD}0,add,r1\n0,add,c\n5,remove,a\n9,remove,r1\n20,add,r1\n30,notice,r1,60"
    )
    found = trace_of(with_racks(rows, racks)).instants
    assert [(one.time_s, one.added, one.removed, one.noticed) for one in found] == [
        (0, ("a", "b", "c"), (), ()),
        (5, (), ("a",), ()),
        (9, (), ("b",), ()),
        (20, ("a", "b"), (), ()),
        (30, (), (), ("a", "b")),
        (90, (), ("a", "b"), ()),
    ]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("0,add,r1\n1,add,r1", "line 3: add of rack r1, whose nodes are all already there"),
        ("0,add,c\n1,remove,r1", "line 3: remove of rack r1, whose nodes are all not there"),
    ],
)
def test_a_row_of_a_rack_that_hits_no_node_is_refused(rows: str, told: str) -> None:
    racks = parse_racks("node,rack\na,r1\nb,r1")
    with pytest.raises(ValueError, match=told):
        list(with_racks(parse_rows(HEAD + rows), racks))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "line 1: no header; it must be node,rack"),
        ("a,r1\n", "line 1: no header"),
        ("node,rack\n", "line 2: no nodes; give a node and its rack"),
        ("node,rack\na", "line 2: 'a'; give a node and its rack, as n1,r1"),
        ("node,rack\na,r1\na,r2", "line 3: a is in line 2, too; remove one"),
        ("node,rack\na,r1\nr1,r2", "line 3: r1 is a rack as well; name one differently"),
    ],
)
def test_wrong_racks_are_refused_with_their_line_and_the_fix(text: str, told: str) -> None:
    with pytest.raises(ValueError, match="line") as refused:
        parse_racks(text)
    assert str(refused.value).startswith(told)


def test_rows_keep_their_values_and_lines() -> None:
    racks = parse_racks("node,rack\na,r1")
    rows = [Row(0.0, "add", "a", None, 2), Row(4.0, "slow", "r1", 0.5, 3)]
    assert [*with_racks(rows, racks)][1] == Row(4.0, "slow", "a", 0.5, 3)
