"""Commands that show the cluster's state: status, nodes, jobs."""

from typing import TYPE_CHECKING

import click

from oobleck.cli import options
from oobleck.cli.completion import job_argument
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output.form import Form


@click.command(cls=options.WatchCommand)
@job_argument(required=False)
@options.master_option
@options.watch_option
@options.form_options("One JSON object: the job's status, or {nodes, jobs, head} of the cluster.")
def status(job_id: str | None, master: Endpoint, watch_s: float | None, form: "Form") -> None:
    """Show one job in full (state and reason, step, loss, pipelines, how many nodes it can still
    lose), or without JOB all nodes and jobs.
    """
    from oobleck.cli.output import text
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.reading.watch import Answer, show

    wide = form == "wide"

    def of_job(connection: "MasterClient") -> Answer:
        job = connection.job(job_id or "")
        return Answer(
            data=text.plain(job),
            text=lambda: text.job_text(job, None if wide else terminal_width()),
            last=job.state in text.ENDED,
        )

    def of_cluster(connection: "MasterClient") -> Answer:
        nodes, jobs = connection.nodes(), connection.jobs()

        def tables() -> str:
            width = terminal_width()
            listed = text.nodes_table(nodes, width=width, wide=wide)
            return f"{listed}\n\n{text.jobs_table(jobs, width=width, wide=wide)}"

        head = text.plain(connection.head) if connection.head is not None else None
        both = {
            "nodes": [*map(text.plain, nodes)],
            "jobs": [*map(text.plain, jobs)],
            "head": head,
        }
        return Answer(data=both, text=tables)

    show(master, of_cluster if job_id is None else of_job, form, watch_s)


@click.command(cls=options.WatchCommand)
@options.master_option
@options.watch_option
@options.form_options("A JSON array of nodes.")
def nodes(master: Endpoint, watch_s: float | None, form: "Form") -> None:
    """List the nodes that the master knows: live, disconnected or lost."""
    from oobleck.cli.output import text
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.reading.watch import Answer, show

    def ask(connection: "MasterClient") -> Answer:
        found = connection.nodes()

        def listed() -> str:
            table = text.nodes_table(found, width=terminal_width(), wide=form == "wide")
            note = text.versions_note(found)
            return f"{table}\n\n{note}" if note else table

        return Answer(data=[*map(text.plain, found)], text=listed)

    show(master, ask, form, watch_s)


@click.command(cls=options.WatchCommand)
@options.master_option
@options.watch_option
@options.form_options("A JSON array of jobs.")
def jobs(master: Endpoint, watch_s: float | None, form: "Form") -> None:
    """List all jobs, oldest first."""
    from oobleck.cli.output import text
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.reading.watch import Answer, show

    def ask(connection: "MasterClient") -> Answer:
        found = connection.jobs()
        return Answer(
            data=[*map(text.plain, found)],
            text=lambda: text.jobs_table(found, width=terminal_width(), wide=form == "wide"),
        )

    show(master, ask, form, watch_s)
