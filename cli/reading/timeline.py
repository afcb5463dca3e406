"""`oobleck timeline`: where the time of a job's next steps goes."""

import json
from pathlib import Path

import click

from oobleck.cli import options
from oobleck.cli.completion import job_argument
from oobleck.host.ipc.endpoint import Endpoint

#: What a master records at most.
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
    """Record the next steps of the running job JOB on all its workers, and show where their time
    goes. With OUT.json all that was recorded is written there, a track per worker."""
    from oobleck.cli.jobs.timeline import check_folder, record, summary, write
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.output.text import dump_line
    from oobleck.cli.output.timeline import steps_table

    if output is not None:
        check_folder(output)  # before anything is waited for
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
