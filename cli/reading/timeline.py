"""`oobleck timeline`: how a job's next steps spend their time."""

import json
from pathlib import Path
from typing import Any

import click

from oobleck.cli import options
from oobleck.cli.completion import job_argument
from oobleck.cli.options import FAILED, USAGE
from oobleck.core.units import count
from oobleck.host.command import CommandFailed
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
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.output.text import dump_line
    from oobleck.cli.output.timeline import steps_table

    if output is not None:
        check_folder(output)  # before the wait for steps
    text = record(master, job_id, steps)
    trace = json.loads(text)
    if output is not None:
        write(text, output)
    if as_json:
        click.echo(dump_line(trace))
        return
    click.echo(summary(trace))
    click.echo(f"\n{steps_table(trace, terminal_width())}\n\nmilliseconds of a step")
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
    phases = sorted({event["name"] for event in events if event.get("cat") == "recovery"})
    within_us = max((c["within_us"] for c in trace["otherData"]["clocks"].values()), default=0.0)
    clocks = f"clocks within {within_us:.0f} us" if within_us else "one clock"
    found = f"{', '.join(steps)} of {count(workers, 'worker')}, {clocks}"
    return f"{found}; change of the plan before it: {', '.join(phases)}" if phases else found
