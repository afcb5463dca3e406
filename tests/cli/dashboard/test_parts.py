"""What of a page has changed, how lines are drawn, tokens and sessions: no process, no network."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from oobleck.cli.dashboard.chart import Chart, Mark, chart, ticks
from oobleck.cli.dashboard.parts import MOST_CHARACTERS, Part, Renderings, changes, rendering
from oobleck.cli.dashboard.sessions import BadToken, Sessions, check, default_folder, make, read_key
from oobleck.cli.view.series import Point

KEY = b"k" * 32


def log(rows: Mapping[str, str], frame: str = "<ol><!--rows--></ol>") -> list[Part]:
    return [Part(id="top", html="same"), Part(id="log", html=frame, rows=rows)]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "2"}, []),
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, [["replace", "b", "3"]]),
        ({"a": "1"}, {"a": "1", "b": "2", "c": "3"}, [["append", "log-rows", "23"]]),
        (
            {"a": "1", "b": "2"},
            {"b": "2", "c": "3"},
            [["remove", "a", ""], ["append", "log-rows", "3"]],
        ),
        (
            {"a": "1", "b": "2"},
            {"b": "2", "a": "1"},
            [["remove", "a", ""], ["append", "log-rows", "1"]],
        ),
        ({"a": "1", "b": "2"}, {"b": "2"}, [["remove", "a", ""]]),
        ({"a": "1"}, {"x": "9"}, [["fill", "log", "<ol>9</ol>"]]),
        ({}, {"x": "9"}, [["append", "log-rows", "9"]]),
        ({"a": "1"}, {}, [["fill", "log", "<ol></ol>"]]),
    ],
)
def test_of_rows_those_that_differ_are_sent(
    before: dict[str, str], after: dict[str, str], told: list[list[str]]
) -> None:
    found = changes(rendering(log(before)), rendering(log(after)))
    assert [change.data() for change in found] == told


def test_a_browser_that_nobody_knows_gets_all_and_one_with_another_frame_that_part() -> None:
    now = rendering(log({"a": "1"}))
    assert [change.id for change in changes(None, now)] == ["top", "log"]
    other = rendering(log({"a": "1"}, "<ul><!--rows--></ul>"))
    assert [change.data() for change in changes(other, now)] == [["fill", "log", "<ol>1</ol>"]]


def test_renderings_are_shared_and_bounded() -> None:
    kept, first = Renderings(), rendering(log({}))
    kept.add("page", 1, first)
    assert kept.newest("page", 1) is first
    assert kept.newest("page", 2) is None
    assert kept.known(first.digest) is first
    for number in range(1000):
        kept.add(f"page {number}", 1, rendering(log({"a": str(number)})))
    assert kept.known(first.digest) is None
    assert kept.newest("page 999", 1) is not None
    large = [rendering(log({"a": str(number) * (MOST_CHARACTERS // 3)})) for number in range(4)]
    for one in large:
        kept.add(one.digest, 1, one)
    assert [kept.known(one.digest) is not None for one in large] == [False, False, True, True]
    assert kept.newest("page 999", 1) is None


def point(step: int, loss: float | None, spread: float = 0.0) -> Point:
    low, high = (None, None) if loss is None else (loss - spread, loss + spread)
    return Point(
        first=step,
        last=step,
        loss=loss,
        low=low,
        high=high,
        tokens_per_s=100.0,
        time=float(step),
        generation=1,
    )


def drawn(*points: Point, banded: bool = False) -> Chart:
    marks = [Mark(step=s, title="", href="", tone="bad") for s in (1, 3, 99)]
    found = chart(points, lambda one: one.loss, marks, banded=banded)
    assert found is not None
    return found


def test_a_line_spans_its_chart_and_breaks_where_a_loss_was_not_finite() -> None:
    found = drawn(point(1, 4.0), point(2, 3.0), point(3, None), point(4, 2.0), point(5, 0.0))
    assert [line.split()[0] for line in found.lines] == ["58.0,16.4", "487.0,96.2"]
    assert found.lines[1].split()[1] == "630.0,176.0"
    assert [tick.label for tick in found.y_ticks] == ["0", "1", "2", "3", "4"]
    assert [tick.label for tick in found.x_ticks] == ["1", "2", "3", "4", "5"]
    assert [placed.at for placed in found.marks] == [58.0, 344.0]  # none of steps not shown
    assert found.bands == ()
    banded = drawn(point(1, 4.0, 1.0), point(2, 3.0, 2.0), banded=True)
    assert len(banded.bands[0].split()) == 4
    assert banded.y_range[0] == 1.0


def test_a_line_breaks_where_records_are_lost() -> None:
    found = drawn(point(1, 4.0), point(2, 3.0), point(7, 2.0), point(8, 1.0))
    assert [len(line.split()) for line in found.lines] == [2, 2]


def test_a_line_without_height_or_points() -> None:
    assert chart([], lambda one: one.loss) is None
    assert chart([point(1, None), point(2, float("inf"))], lambda one: one.loss) is None
    alone = drawn(point(7, 2.5))
    assert alone.x_range == (7.0, 8.0)
    assert alone.y_range[0] < 2.5 < alone.y_range[1]
    zero = drawn(point(7, 0.0), point(8, 0.0))
    assert zero.y_range[0] < 0.0 < zero.y_range[1]


@pytest.mark.parametrize(("low", "high"), [(0, 1), (2.301, 2.309), (0, 12_345), (-3, 1e-3), (5, 6)])
def test_ticks_are_a_handful_and_lie_in_between(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)


def test_a_token_is_of_one_secret_and_ends(tmp_path: Path) -> None:
    text = make(KEY, "operator", 1000.0)
    found = check(KEY, f" {text}\n", 999.0)
    assert (found.role, found.expires_at) == ("operator", 1000)
    with pytest.raises(BadToken, match="has expired"):
        check(KEY, text, 1000.0)
    body, _, mac = text.partition(".")
    for bad in ("", ".", text[:-1], f"{body}x.{mac}", f"{body}.", "é.é", "x" * 10_000):
        with pytest.raises(BadToken, match="not a token of this dashboard"):
            check(KEY, bad, 0.0)
    with pytest.raises(BadToken):
        check(b"o" * 32, text, 0.0)
    folder = tmp_path / "deep" / "er"
    assert read_key(folder) == read_key(folder)
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    (folder / "secret").write_bytes(b"short")
    with pytest.raises(ValueError, match="is damaged; remove it"):
        read_key(folder)
    assert default_folder({"XDG_STATE_HOME": "/x"}) == Path("/x/oobleck/dashboard")


def test_a_token_is_used_up_for_every_dashboard_of_its_folder(tmp_path: Path) -> None:
    token = make(KEY, "viewer", 50.0)
    before, after = (Sessions(KEY, tmp_path, lasts_s=100.0) for _ in range(2))
    before.log_in(token, 0.0)
    for dashboard in (before, after):
        with pytest.raises(BadToken, match="was used"):
            dashboard.log_in(token, 1.0)
    after.log_in(make(KEY, "viewer", 500.0), 60.0)
    assert [path.name[:4] for path in (tmp_path / "spent").iterdir()] == ["500-"], (
        "the others ended"
    )
    (tmp_path / "file").touch()
    blocked = Sessions(KEY, tmp_path / "file", lasts_s=100.0)
    with pytest.raises(BadToken, match="cannot record"):
        blocked.log_in(make(KEY, "viewer", 500.0), 60.0)


def test_sessions_end_and_are_bounded(tmp_path: Path) -> None:
    sessions = Sessions(KEY, tmp_path, lasts_s=100.0)
    shown = sessions.log_in(make(KEY, "viewer", 50.0), 0.0)
    found = sessions.find(*shown, 99.0)
    assert found is not None
    assert found.id == shown[0]
    assert sessions.find("", shown[1], 99.0) is None
    assert found.role == "viewer"
    assert found.proves(found.csrf)
    assert not found.proves("")
    assert sessions.find(*shown, 100.0) is None
    assert sessions.find("", "", 0.0) is None
    first, *others = (sessions.log_in(make(KEY, "viewer", 500.0), 101.0) for _ in range(1001))
    assert sessions.find(*first, 102.0) is None
    assert all(sessions.find(*other, 102.0) for other in others)
    sessions.log_out(*others[0])
    assert sessions.find(*others[0], 102.0) is None
