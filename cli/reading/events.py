"""`oobleck events`: the events of a job."""

import json
from typing import TYPE_CHECKING

import click

from oobleck.cli import options
from oobleck.cli.completion import job_argument
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.output.form import Form


@click.command()
@job_argument()
@options.follow_option("Continue with new events until the job ends.")
@click.option(
    "--incidents", is_flag=True, help="Only failures and slow workers, with their consequences."
)
@options.master_option
@options.form_options("One JSON object per line, as in the job's events.jsonl.")
def events(job_id: str, follow: bool, incidents: bool, master: Endpoint, form: "Form") -> None:
    """Show the events of a job, oldest first: losses, reconfigurations, the end.

    A closed failure is shown in full: root cause, first witness, seconds per phase, cost. Slow
    workers are shown once none is slow any more: their pace, and the answers.
    """
    from oobleck.cli.client import MasterClient
    from oobleck.cli.jobs.away import follow_events
    from oobleck.cli.output import colour, incident
    from oobleck.cli.output.events import event_line
    from oobleck.cli.output.form import entry, is_data
    from oobleck.cli.output.table import terminal_width

    coloured = colour.is_wanted()
    told = 0
    with MasterClient(master) as connection:
        records = (
            follow_events(connection, job_id) if follow else connection.events(job_id, follow=False)
        )
        for record in records:
            event = json.loads(record.json)
            of_incident = event["event"] == "incident"
            if incidents and not of_incident:
                continue
            told += 1
            width = None if form == "wide" else terminal_width()
            if is_data(form):
                click.echo(entry(event, form))
            elif of_incident:
                block = incident.block(event, colour=coloured, width=width)
                click.echo(block, color=coloured)
            else:
                click.echo(event_line(event, width))
    if incidents and told == 0:
        click.echo(
            f"no incident of {job_id} is closed; 'oobleck status {job_id}' names an open one",
            err=True,
        )
