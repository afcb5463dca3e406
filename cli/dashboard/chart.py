"""Line chart over a job's steps, as the coordinates of an SVG. Pure; must not know markup."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from oobleck.cli.output.table import Tone
from oobleck.cli.view.series import Point

WIDTH, HEIGHT = 640, 200
LEFT, RIGHT, TOP, BOTTOM = 58, 10, 10, 24
_TICKS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Event at a step."""

    step: int
    title: str
    #: Address of its page; empty: it has none.
    href: str
    tone: Tone


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedMark:
    at: float
    mark: Mark


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Drawing of one curve; coordinates are in units of WIDTH x HEIGHT."""

    #: Coordinates of each unbroken piece of the line.
    lines: tuple[str, ...]
    #: Area around it, from the lowest to the highest value that each point summarises.
    bands: tuple[str, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    marks: tuple[PlacedMark, ...]
    #: Ranges of the axes: step, value.
    x_range: tuple[float, float]
    y_range: tuple[float, float]


def chart(
    points: Sequence[Point],
    value: Callable[[Point], float | None],
    marks: Iterable[Mark] = (),
    *,
    through: int = 0,
    banded: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    """Draw `value` over the points' steps. Return None if there is nothing to draw. `through`: step
    up to which the axis goes at least."""
    known = [(p, v) for p in points if (v := value(p)) is not None and math.isfinite(v)]
    if not known:
        return None
    lows = [p.low if banded and p.low is not None else v for p, v in known]
    highs = [p.high if banded and p.high is not None else v for p, v in known]
    low, high = _widened(0.0 if from_zero else min(lows), max(highs))
    first = float(known[0][0].first)
    last = float(max(known[-1][0].last, known[0][0].first + 1, through))

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first)

    def y(of: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (high - of) / (high - low)

    lines, bands = [], []
    for piece in _pieces(points, value):
        middles = [(x((p.first + p.last) / 2), v, p) for p, v in piece]
        lines.append(" ".join(f"{at:.1f},{y(v):.1f}" for at, v, _ in middles))
        if banded and any(p.low != p.high for p, _ in piece):
            upper = [f"{at:.1f},{y(p.high):.1f}" for at, _, p in middles if p.high is not None]
            lower = [f"{at:.1f},{y(p.low):.1f}" for at, _, p in middles if p.low is not None]
            bands.append(" ".join([*upper, *reversed(lower)]))
    return Chart(
        lines=tuple(lines),
        bands=tuple(bands),
        x_ticks=tuple(Tick(at=x(t), label=f"{t:,.0f}") for t in ticks(first, last) if t == int(t)),
        y_ticks=tuple(Tick(at=y(t), label=_short(t, high - low)) for t in ticks(low, high)),
        marks=tuple(
            PlacedMark(at=x(mark.step), mark=mark) for mark in marks if first <= mark.step <= last
        ),
        x_range=(first, last),
        y_range=(low, high),
    )


def _pieces(
    points: Sequence[Point], value: Callable[[Point], float | None]
) -> list[list[tuple[Point, float]]]:
    """Return the unbroken pieces of the line; missing or infinite losses break it."""
    found: list[list[tuple[Point, float]]] = [[]]
    for point in points:
        of = value(point)
        if found[-1] and point.first > found[-1][-1][0].last + 1:
            found.append([])
        if of is None or not math.isfinite(of):
            found.append([])
        else:
            found[-1].append((point, of))
    return [piece for piece in found if piece]


def ticks(low: float, high: float) -> list[float]:
    """Return a handful of round numbers between `low` and `high`."""
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    begin, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(begin, end + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """Widen the range, so that a constant line has a height."""
    if high - low > 1e-9 * max(abs(low), abs(high)):
        return low, high + 0.04 * (high - low)
    room = max(abs(high) * 0.05, 1e-9)
    return low - room, high + room


def _short(of: float, span: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(of) >= factor and span >= factor / 100:
            return f"{of / factor:g}{unit}"
    return f"{round(of, 12):.4g}" if span > abs(of) / 1000 else f"{of:.6g}"
