"""Drawing of a job's recorded steps, as the coordinates of an SVG. Pure; must not know markup.

A lane per worker, and per GPU, has a bar for each activity. Bars that are too narrow to be seen are
merged, so that a drawing of any recording is bounded.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from oobleck.cli.dashboard.chart import Tick, ticks
from oobleck.cli.reading.timeline import COLUMN_OF, nested
from oobleck.host.timeline import DEVICE_THREADS

WIDTH, LEFT, RIGHT = 1200, 130, 10
TOP, ROW, BAR = 8, 24, 18
#: Height of the time axis.
BOTTOM = 24
#: Most lanes; the file has all.
MOST_LANES = 64
#: Width of the narrowest bar that is drawn by itself.
_NARROW = 0.5
#: Kinds of bars, in the legend's order.
KINDS = (
    *("load", "forward", "backward", "weight", "optimizer"),
    *("receive", "send", "sum", "vote", "other"),
)
_KINDS: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward input": "backward",
    "backward weight": "weight",
    "optimizer": "optimizer",
}

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    x: float
    width: float
    kind: str
    title: str

    @property
    def end(self) -> float:
        return self.x + self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    #: Worker, as `n1/0`, and its place in the plan.
    name: str
    title: str
    y: int
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gantt:
    lanes: tuple[Lane, ...]
    #: Those that occur, in the legend's order.
    kinds: tuple[str, ...]
    #: Milliseconds.
    ticks: tuple[Tick, ...]
    height: int
    #: Steps, as `step 12, step 13`, and number of lanes that are not drawn.
    steps: str
    left_out: int


def gantt(trace: Mapping[str, Any]) -> Gantt:
    """Draw a Chrome trace of `oobleck.host.timeline`."""
    events: Sequence[Event] = trace["traceEvents"]
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in ("step", "device"):
            spans[event["pid"], event["tid"]].append(event)
    every = [event for of_lane in spans.values() for event in of_lane]
    begin = min((event["ts"] for event in every), default=0.0)
    span_us = max((event["ts"] + event["dur"] for event in every), default=begin) - begin or 1.0
    scale = (WIDTH - LEFT - RIGHT) / span_us
    lanes = [
        Lane(
            name=f"{nodes[pid]}/{tid % DEVICE_THREADS}" + (" GPU" if tid >= DEVICE_THREADS else ""),
            title=titles[pid, tid],
            y=TOP + ROW * number,
            bars=tuple(_merged(_bars(spans[pid, tid], begin, scale))),
        )
        for number, (pid, tid) in enumerate(list(titles)[:MOST_LANES])
    ]
    steps = {event["name"] for event in every if event["name"].startswith("step ")}
    found = {bar.kind for lane in lanes for bar in lane.bars}
    return Gantt(
        lanes=tuple(lanes),
        kinds=tuple(kind for kind in KINDS if kind in found),
        ticks=tuple(
            Tick(at=LEFT + 1e3 * at * scale, label=f"{at:g} ms") for at in ticks(0.0, span_us / 1e3)
        ),
        height=TOP + ROW * len(lanes) + BOTTOM,
        steps=", ".join(sorted(steps, key=lambda name: int(name.split()[1]))),
        left_out=len(titles) - len(lanes),
    )


def _bars(spans: Sequence[Event], begin: float, scale: float) -> Iterator[Bar]:
    """Yield the activities of a worker's steps, or of its GPU."""
    for depth, name, span in nested(spans):
        in_step = depth == 1 and span["cat"] == "step"
        if in_step or (depth == 0 and span["cat"] == "device"):
            yield Bar(
                x=LEFT + (span["ts"] - begin) * scale,
                width=span["dur"] * scale,
                kind=_KINDS.get(name) or COLUMN_OF.get(name, "other").lower(),
                title=f"{span['name']}: {span['dur'] / 1e3:.3f} ms",
            )


def _merged(bars: Iterable[Bar]) -> Iterator[Bar]:
    """Yield the bars, by place; narrow ones that follow each other closely become one."""
    last: Bar | None = None
    is_short = False
    for bar in bars:
        joins = is_short and bar.width < _NARROW
        if last is not None and joins and bar.x - last.end < _NARROW:
            width = max(last.end, bar.end) - last.x
            last = replace(last, width=width, title="several short activities")
            continue
        if last is not None:
            yield last
        last, is_short = bar, bar.width < _NARROW
    if last is not None:
        yield last
