"""`oobleck timeline`: how a job's next steps spend their time."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from oobleck.cli import options
from oobleck.cli.options import job_argument
from oobleck.cli.output.table import table
from oobleck.core.units import count
from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.timeline import DEVICE_THREADS

#: Most steps that a master records.
_MOST_STEPS = 100

_EPILOG = """\b
Examples:
  oobleck timeline demo-1                       a table: milliseconds of each worker
  oobleck timeline demo-1 out.json --steps 3    a Chrome trace, for ui.perfetto.dev"""


@click.command(epilog=_EPILOG)
@job_argument()
@click.argument(
    "output",
    metavar="[OUT.json]",
    required=False,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
)
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=_MOST_STEPS),
    default=1,
    show_default=True,
    metavar="K",
    help="Steps to record.",
)
@options.master_option
@options.json_option("The Chrome trace as one JSON object.")
def timeline(job_id: str, output: Path | None, steps: int, master: Endpoint, as_json: bool) -> None:
    """Record the next steps of the running job JOB on all its workers, and show how they spend
    their time. With OUT.json the whole record is written there, with a track per worker.
    """
    from oobleck.cli.output.table import folded, terminal_width
    from oobleck.cli.output.text import dump_line

    if output is not None:
        check_folder(output)  # before the wait for steps
    text = record(master, job_id, steps)
    trace = json.loads(text)
    if output is not None:
        write(text, output)
    if as_json:
        click.echo(dump_line(trace))
        return
    width = terminal_width()
    click.echo(folded(summary(trace), width, indent=2))
    click.echo(f"\n{steps_table(trace, width)}\n\nmilliseconds of a step")
    if output is not None:
        click.echo(f"written to {output}; open it at ui.perfetto.dev")


def record(master: Endpoint, job_id: str, steps: int) -> str:
    """Return the Chrome trace of the next `steps` steps as text. Raise CommandFailed."""
    from oobleck.cli.client import MasterClient

    with MasterClient(master) as connection:
        return connection.timeline(job_id, steps)


def check_folder(output: Path) -> None:
    """Raise CommandFailed unless the folder of `output` exists."""
    if not output.absolute().parent.is_dir():
        raise CommandFailed(f"{output}: its folder does not exist; make it first", USAGE)


def write(text: str, output: Path) -> None:
    """Write `text` to `output`. Raise CommandFailed."""
    try:
        output.write_text(text)
    except OSError as error:
        raise CommandFailed(
            f"{output}: {error.strerror}; name a file that can be written", FAILED
        ) from error


def summary(trace: dict[str, Any]) -> str:
    events = trace["traceEvents"]
    threads = [event.get("tid", 0) for event in events if event["name"] == "thread_name"]
    workers = sum(thread < DEVICE_THREADS for thread in threads)
    steps = sorted({event["name"] for event in events if event["name"].startswith("step ")})
    phases = ", ".join(f"{name} {ms:.1f} ms" for name, ms in _phases_ms(events).items())
    within_us = max((c["within_us"] for c in trace["otherData"]["clocks"].values()), default=0.0)
    clocks = f"clocks within {within_us:.0f} us" if within_us else "one clock"
    found = f"{', '.join(steps)} of {count(workers, 'worker')}, {clocks}"
    return f"{found}; its plan took effect in: {phases}" if phases else found


def _phases_ms(events: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the milliseconds of each phase in which the plan took effect, in order, of the worker
    that took longest."""
    taken: dict[str, dict[Worker, float]] = defaultdict(lambda: defaultdict(float))
    for event in sorted(events, key=lambda event: float(event.get("ts", 0.0))):
        if event.get("cat") == "recovery":
            taken[event["name"]][event["pid"], event["tid"]] += event["dur"] / 1000
    return {name: max(of_workers.values()) for name, of_workers in taken.items()}


# ---- each worker's activities in a step as a table


#: Columns, and the instructions that each counts.
_COLUMNS: Mapping[str, Sequence[str]] = {
    "LOAD": ("load",),
    "COMPUTE": ("forward", "backward", "backward input", "backward weight", "optimizer"),
    "RECEIVE": ("receive activation", "receive gradient"),
    "SEND": ("send activation", "send gradient"),
    "SUM": ("sync gradient",),
    "VOTE": ("vote",),
}
COLUMN_OF = {name: column for column, names in _COLUMNS.items() for name in names}

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
        for depth, name, span in nested(spans[worker]):
            if depth == 0:
                steps += 1
                taken_us["STEP"] += span["dur"]
            elif depth == 1:
                taken_us[COLUMN_OF.get(name, "OTHER")] += span["dur"]
        between_us = taken_us["STEP"] - sum(us for key, us in taken_us.items() if key != "STEP")
        taken_us["OTHER"] += max(0.0, between_us)
        cells = [f"{us / 1000 / max(1, steps):.1f}" for us in taken_us.values()]
        if on_devices:
            of_device = nested(spans[worker[0], worker[1] + DEVICE_THREADS])
            busy_us = sum(span["dur"] for depth, _, span in of_device if depth == 0)
            cells.insert(len(_COLUMNS), f"{busy_us / 1000 / max(1, steps):.1f}")
        rows.append([f"{nodes[worker[0]]}/{worker[1]}", *cells, title.partition(": ")[2]])
    columns = [*_COLUMNS, *(["GPU"] if on_devices else []), "OTHER", "STEP"]
    return table(["WORKER", *columns, "STAGE"], rows, width=width)


def nested(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Yield one worker's spans by time, each after its depth (0: a step) and name without number.

    The spans are adjacent or nested.
    """
    ends: list[float] = []
    for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
        while ends and ends[-1] <= span["ts"]:
            ends.pop()
        name, _, number = span["name"].rpartition(" ")
        yield len(ends), name if number.isdigit() else span["name"], span
        ends.append(span["ts"] + span["dur"])
