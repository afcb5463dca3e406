"""Traces of a cluster as text, and traces made at random."""

import re
import statistics

import pytest

from oobleck.planner.simulate.made import make_rows, parse_make
from oobleck.planner.simulate.trace import Instant, Trace, format_trace, parse_rows, trace_of

HEAD = "time_s,event,node,value\n"


def parse_trace(text: str) -> Trace:
    return trace_of(parse_rows(text))


def test_rows_of_one_time_are_one_event() -> None:
    trace = parse_trace(
        f"{HEAD}0,add,a\n0,add,b,\n\n5,remove,a\n5,add,a\n5,slow,b,0.5\n7.5,notice,b,120\n8,repair,a\n"
    )
    assert trace.instants == (
        Instant(time_s=0.0, line=2, added=("a", "b")),
        Instant(time_s=5.0, line=5, removed=("a",), added=("a",), rates={"b": 0.5}),
        Instant(time_s=7.5, line=8, noticed=("b",)),
        Instant(time_s=8.0, line=9, repaired=("a",)),
        Instant(time_s=127.5, line=8, removed=("b",)),
    )
    assert [live for _, live in trace.live()] == [2, 2, 2, 2, 1]
    assert trace.end_s == 127.5


def test_a_node_that_comes_and_goes_at_one_time_was_never_there() -> None:
    (instant,) = parse_trace("time_s,event,node\n1,add,a\n1,remove,a\n").instants
    assert (instant.added, instant.removed) == ((), ())


def test_a_node_goes_at_the_end_of_its_notice_unless_a_row_says_when() -> None:
    head = "0,add,a\n0,add,b\n0,add,c\n"
    found = parse_trace(f"{HEAD}{head}10,notice,a,30\n20,notice,b,30\n25,remove,b\n90,add,a")
    assert [(one.time_s, one.noticed, one.removed, one.added) for one in found.instants[1:]] == [
        (10, ("a",), (), ()),
        (20, ("b",), (), ()),
        (25, (), ("b",), ()),
        (40, (), ("a",), ()),
        (90, (), (), ("a",)),
    ]
    again = parse_trace(f"{HEAD}{head}10,notice,a,30\n40,add,a")
    assert (again.instants[-1].removed, again.instants[-1].added) == (("a",), ("a",))
    at_once = parse_trace(f"{HEAD}{head}10,notice,a,0")
    assert [one.removed for one in at_once.instants] == [(), ("a",)]
    told_twice = parse_trace(f"{HEAD}{head}10,notice,a,30\n12,notice,a,20")
    assert [one.time_s for one in told_twice.instants] == [0, 10, 12, 32]
    with pytest.raises(ValueError, match="line 6: adds a, which is there already"):
        parse_trace(f"{HEAD}{head}10,notice,a,30\n39,add,a")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("0,remove,a", "line 2: remove of a, which is not there; add it before"),
        ("0,add,a\n0,add,a", "line 3: adds a, which is there already"),
        ("5,add,a\n4,add,b", "line 3: goes back in time, from 5 s to 4 s; sort the rows"),
        ("0,ad,a", "line 2: unknown event 'ad'; did you mean add?"),
        ("0,add,a\n1,slow,a,0", "line 3: the rate is '0'; give the share"),
        ("0,add,a\n1,slow,a,1.5", "line 3: the rate is '1.5'; give the share"),
        ("0,add,a\n1,slow,a", "line 3: the rate is ''; give the share"),
        ("0,add,a\n1,notice,a,-1", "line 3: the notice is '-1'; give the seconds"),
        ("0,add,a,3", "line 2: add takes no value, and has '3'; remove it"),
        ("nan,add,a", "line 2: time_s is 'nan'; give seconds"),
        ("-1,add,a", "line 2: time_s is '-1'; give seconds"),
        ("1e10,add,a", "line 2: time_s is '1e10'; give seconds from 0 on, at most 3.2e+09"),
        ("0,add,", "line 2: node is ''; name the node"),
        ("0,add", "line 2: 2 columns; give time_s,event,node,value"),
        ("", "line 1: no rows; give at least the nodes at time 0"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line_and_the_fix(rows: str, told: str) -> None:
    with pytest.raises(ValueError, match="line") as refused:
        parse_trace(HEAD + rows)
    assert str(refused.value).startswith(told)


def test_a_text_without_a_header_is_refused() -> None:
    for text in ("", "0,add,a\n"):
        with pytest.raises(ValueError, match="line 1: no header"):
            parse_trace(text)


def test_a_made_trace_has_the_failures_that_were_asked_for_and_is_the_same_each_time() -> None:
    spec = "mtbf=10d,repair=5h,nodes=200,days=100,seed=7"
    rows = list(make_rows(parse_make(spec)))
    text = format_trace(rows)
    assert text == format_trace(make_rows(parse_make(spec)))
    assert text != format_trace(make_rows(parse_make(spec.replace("seed=7", "seed=8"))))
    assert parse_trace(text) == parse_trace(format_trace(rows))
    lost = [row for row in rows if row.event == "remove"]
    # 200 nodes of 10 days for 100 days, less the 2 % of the time that they are away.
    assert len(lost) == pytest.approx(2000 / (1 + 5 / 240), rel=0.1)
    back = {row.node.split(".")[0]: row.time_s for row in reversed(rows) if row.event == "add"}
    assert set(back.values()) == {0.0}
    live = [count for _, count in trace_of(rows).live()]
    assert max(live) <= 200
    assert statistics.fmean(live) == pytest.approx(196, rel=0.02)


def test_a_rack_fails_as_a_whole() -> None:
    make = parse_make("mtbf=1y,repair=1h,nodes=20,rack=8,rack_mtbf=20d,days=200,seed=1")
    sizes = [len(instant.removed) for instant in trace_of(make_rows(make)).instants]
    assert max(sizes) == 8
    assert 4 in sizes, "the last rack has four"
    assert sum(size >= 4 for size in sizes) == pytest.approx(30, rel=0.5)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("mtbf=1d", "nodes: missing"),
        ("nodes=3,mtbf=1d,repair=1h,days=1,nodes=4", "nodes: given twice"),
        ("nodes=3,mtbf=1x,repair=1h,days=1", "mtbf: '1x' is no time"),
        ("nodes=3.5,mtbf=1d,repair=1h,days=1", "nodes: '3.5' is no whole number"),
        ("nodes=0,mtbf=1d,repair=1h,days=1", "nodes: 0; give 1 to 1,000,000,000"),
        ("nodes=3,mtbf=1d,repair=1h,days=1,seed=-1", "seed: -1; give 0 to 1,000,000,000"),
        ("nodes=3,mtbf=1d,repair=40y,days=1", "repair: 1261440000.0 s; give 0 to 1,000,000,000 s"),
        ("nodes=32,mtbf=1d,rack_mtbf=1y,repair=1h,days=1", "rack_mtbf: no racks; give also"),
        ("nodes=3,mtbf=1d,repair=1h,days=0", "days: a trace of no time"),
        ("nodes=1000,mtbf=1s,repair=1h,days=365", "mtbf: about"),
        ("nodez=3", "'nodez=3': give mtbf, repair, "),
    ],
)
def test_a_wrong_spec_is_refused(spec: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(told)}"):
        parse_make(spec)
