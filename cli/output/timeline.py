"""Timeline of a job's steps as a table: each worker's activities in a step. Pure."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oobleck.cli.output.table import table
from oobleck.host.timeline import DEVICE_THREADS

#: Columns, and the instructions that each counts.
_COLUMNS: Mapping[str, Sequence[str]] = {
    "LOAD": ("load",),
    "COMPUTE": ("forward", "backward", "backward input", "backward weight", "optimizer"),
    "RECEIVE": ("receive activation", "receive gradient"),
    "SEND": ("send activation", "send gradient"),
    "SUM": ("sync gradient",),
    "VOTE": ("vote",),
}
_COLUMN_OF = {name: column for column, names in _COLUMNS.items() for name in names}

Worker = tuple[int, int]


def steps_table(trace: Mapping[str, Any], width: int | None = None) -> str:
    """Format the milliseconds of a step by activity, for each worker in a Chrome trace.

    `oobleck.host.timeline` makes the trace. Several steps are averaged. `GPU`: time in which a
    device computed queued work; the other columns have the host's time.
    """
    events: list[dict[str, Any]] = trace["traceEvents"]
    nodes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[Worker, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in ("step", "device") and event["ph"] == "X":
            spans[event["pid"], event["tid"]].append(event)
    on_devices = any(thread >= DEVICE_THREADS for _, thread in titles)
    rows = []
    for worker, title in titles.items():
        if worker[1] >= DEVICE_THREADS:
            continue
        taken_us = dict.fromkeys([*_COLUMNS, "OTHER", "STEP"], 0.0)
        steps = 0
        for depth, name, duration_us in _nested(spans[worker]):
            if depth == 0:
                steps += 1
                taken_us["STEP"] += duration_us
            elif depth == 1:
                taken_us[_COLUMN_OF.get(name, "OTHER")] += duration_us
        between_us = taken_us["STEP"] - sum(us for key, us in taken_us.items() if key != "STEP")
        taken_us["OTHER"] += max(0.0, between_us)
        cells = [f"{us / 1000 / max(1, steps):.1f}" for us in taken_us.values()]
        if on_devices:
            of_device = _nested(spans[worker[0], worker[1] + DEVICE_THREADS])
            busy_us = sum(us for depth, _, us in of_device if depth == 0)
            cells.insert(len(_COLUMNS), f"{busy_us / 1000 / max(1, steps):.1f}")
        rows.append([f"{nodes[worker[0]]}/{worker[1]}", *cells, title.partition(": ")[2]])
    columns = [*_COLUMNS, *(["GPU"] if on_devices else []), "OTHER", "STEP"]
    return table(["WORKER", *columns, "STAGE"], rows, width=width)


def _nested(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, float]]:
    """Yield depth (0: a step), name without number, and duration of one worker's spans.

    The spans are adjacent or nested.
    """
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        name, _, number = span["name"].rpartition(" ")
        yield len(ends), name if number.isdigit() else span["name"], span["dur"]
        ends.append(span["ts"] + span["dur"])
