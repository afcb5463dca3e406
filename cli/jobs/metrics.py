"""`oobleck metrics`: results of each committed step of a job, or of each evaluation."""

import json
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import click

from oobleck.cli import options
from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.follow import follow_metrics
from oobleck.cli.options import job_argument, master_option
from oobleck.cli.output.metrics import csv_cells, csv_keys, csv_line, head, plot, row
from oobleck.cli.output.text import Form, entry, is_data
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.proto import control_pb2 as pb

#: Rows of a table without --from.
_ROWS = 20
#: Columns of a plot without a terminal.
_WIDTH = 80

_EPILOG = """\b
Examples:
  oobleck metrics demo-1                        the last steps, and a plot of the loss
  oobleck metrics demo-1 -f                     each step as it is committed
  oobleck metrics demo-1 --csv > loss.csv       all of them, for a spreadsheet
  oobleck metrics demo-1 --json --from 1001     a JSON object per line"""


@click.command(epilog=_EPILOG)
@job_argument()
@options.follow_option("Continue with new steps until the job ends.")
@click.option(
    "--from",
    "from_step",
    type=click.IntRange(min=1, max=2**63 - 1),
    metavar="STEP",
    help=f"Begin with this step.  [default: the last {_ROWS} in a table, else the first]",
)
@click.option("--evaluations", is_flag=True, help="The evaluations on held-out data instead.")
@click.option("--csv", "as_csv", is_flag=True, help="Comma-separated values below a header.")
@click.option("--plot", "plotted", is_flag=True, help="Plot the loss even without a terminal.")
@master_option
@options.form_options("One JSON object per line, as in the job's metrics.jsonl.")
def metrics(
    job_id: str,
    follow: bool,
    from_step: int | None,
    evaluations: bool,
    as_csv: bool,
    plotted: bool,
    master: Endpoint,
    form: Form,
) -> None:
    """Show the results of each committed step of a job, in order and exactly once.

    They are the loss, the norm of the gradient, tokens and seconds.
    """
    if as_csv and is_data(form):
        raise click.UsageError(f"--csv and --{form} exclude each other; leave one out")
    if plotted and (as_csv or is_data(form) or follow):
        raise click.UsageError("--plot requires the table; leave out --csv, --json and -f")
    plotted = plotted or (sys.stdout.isatty() and not follow)
    with MasterClient(master) as connection:
        done = connection.job(job_id).recorded_step
        first = from_step or 1
        if from_step is None and not (as_csv or is_data(form) or plotted or evaluations):
            first = max(1, done - _ROWS + 1)
        lines = (
            follow_metrics(connection, job_id, from_step=first, evaluations=evaluations)
            if follow
            else connection.metrics(job_id, follow=False, from_step=first, evaluations=evaluations)
        )
        records: Iterator[dict[str, Any]] = map(json.loads, lines)
        if not evaluations and not as_csv:
            records = _with_lost(records, lambda: connection.job(job_id), first)
        if is_data(form):
            printed_any = _print_data(records, form)
        elif as_csv:
            printed_any = _print_csv(records, evaluations=evaluations)
        else:
            most = _ROWS if from_step is None and not follow else None
            wide = form == "wide"
            printed_any = _print_table(
                records, most, evaluations=evaluations, wide=wide, plotted=plotted
            )
    if not printed_any:
        what = "evaluation" if evaluations else "step"
        since = "" if from_step is None else f" from step {from_step} on"
        click.echo(f"{job_id} has no {what}{since} so far", err=True)


def _with_lost(
    records: Iterable[dict[str, Any]], job: Callable[[], pb.JobStatus], first: int
) -> Iterator[dict[str, Any]]:
    """Yield the records, with lost ones at their place: `lost` (first and last step) and `why`.
    `job` asks the master for the job."""
    following = first
    for record in records:
        if record["step"] > following:
            yield from _lost(job(), range(following, record["step"]))
        yield record
        following = record["step"] + 1
    status = job()
    yield from _lost(status, range(following, status.steps + 1))


def _lost(job: pb.JobStatus, steps: range) -> Iterator[dict[str, Any]]:
    for lost in job.lost_records:
        if lost.first_step in steps or lost.last_step in steps:
            yield {"lost": [lost.first_step, lost.last_step], "why": lost.why}


def _print_data(records: Iterable[dict[str, Any]], form: Form) -> bool:
    """Print the records; return whether there were any, as `_print_csv` and `_print_table` do."""
    printed_any = False
    for record in records:
        printed_any = True
        click.echo(entry(record, form))
    return printed_any


def _print_csv(records: Iterable[dict[str, Any]], *, evaluations: bool) -> bool:
    keys: list[str] = []
    for record in records:
        if not keys:
            keys = csv_keys(record, evaluations=evaluations)
            click.echo(csv_line(keys))
        click.echo(csv_line(csv_cells(record, keys)))
    return bool(keys)


def _print_table(
    records: Iterable[dict[str, Any]],
    most: int | None,
    *,
    evaluations: bool,
    wide: bool,
    plotted: bool,
) -> bool:
    """Print the last `most` rows; None: all, as they arrive. Return whether there were any."""
    last: deque[dict[str, Any]] = deque(maxlen=most)
    losses: list[tuple[int, float]] = []
    printed_any = False
    for record in records:
        if most is not None:
            last.append(record)
        else:
            if not printed_any:
                click.echo(head(evaluations=evaluations, wide=wide))
            click.echo(row(record, evaluations=evaluations, wide=wide))
        printed_any = True
        if plotted and record.get("loss") is not None:
            losses.append((record["step"], record["loss"]))
    if last:
        rows = (row(record, evaluations=evaluations, wide=wide) for record in last)
        click.echo("\n".join([head(evaluations=evaluations, wide=wide), *rows]))
    if losses:
        width = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else _WIDTH
        click.echo("\n" + plot(losses, width=width))
    return printed_any
