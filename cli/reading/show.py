"""The commands that only read: status, nodes, jobs, events, logs."""

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from oobleck.cli.options import NO_SUCH_THING, json_option, master_option, wide_option
from oobleck.cli.output.table import terminal_width
from oobleck.host.command import CommandFailed
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient

#: What the protocol's field holds.
MOST_RANK = 2**32 - 1


@click.command()
@click.argument("job_id", metavar="[JOB]", required=False)
@master_option
@wide_option
@json_option("One JSON object: the job's status, or {nodes, jobs} of the cluster.")
def status(job_id: str | None, master: Endpoint, wide: bool, as_json: bool) -> None:
    """Show one job in full (state and reason, step, loss, pipelines, how many nodes it can still
    lose), or without JOB all nodes and jobs."""
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output import text

    with MasterClient(master) as connection:
        if job_id is not None:
            job = connection.job(job_id)
            _warn(connection)
            shown = text.dump(text.plain(job)) if as_json else text.job_text(job, terminal_width())
            click.echo(shown)
            return
        nodes, jobs = connection.nodes(), connection.jobs()
        _warn(connection)
    if as_json:
        both = {"nodes": [*map(text.plain, nodes)], "jobs": [*map(text.plain, jobs)]}
        click.echo(text.dump(both))
    else:
        width = terminal_width()
        click.echo(text.nodes_table(nodes, width=width, wide=wide))
        click.echo()
        click.echo(text.jobs_table(jobs, width=width, wide=wide))


@click.command()
@master_option
@wide_option
@json_option("A JSON array of nodes.")
def nodes(master: Endpoint, wide: bool, as_json: bool) -> None:
    """List the nodes that the master knows: live, disconnected or lost."""
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output import text

    with MasterClient(master) as connection:
        found = connection.nodes()
        _warn(connection)
    if as_json:
        click.echo(text.dump([*map(text.plain, found)]))
        return
    click.echo(text.nodes_table(found, width=terminal_width(), wide=wide))
    if note := text.versions_note(found):
        click.echo(f"\n{note}")


@click.command()
@master_option
@wide_option
@json_option("A JSON array of jobs.")
def jobs(master: Endpoint, wide: bool, as_json: bool) -> None:
    """List all jobs, oldest first."""
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output import text

    with MasterClient(master) as connection:
        found = connection.jobs()
        _warn(connection)
    if as_json:
        click.echo(text.dump([*map(text.plain, found)]))
    else:
        click.echo(text.jobs_table(found, width=terminal_width(), wide=wide))


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on with new events until the job ends.")
@click.option(
    "--incidents", is_flag=True, help="Only failures and slow workers, with all that came of it."
)
@master_option
@json_option("One JSON object per line, as in the job's events.jsonl.")
def events(job_id: str, follow: bool, incidents: bool, master: Endpoint, as_json: bool) -> None:
    """Show what happened to a job, oldest first: losses, reconfigurations, the end. A failure that
    is over is told in full: root cause, who saw it first, seconds per phase, what it cost; and so
    are slow workers, once none is: who was how slow, and what was done about it."""
    from oobleck.cli.client import MasterClient
    from oobleck.cli.jobs.away import follow_events
    from oobleck.cli.output import incident, text
    from oobleck.cli.output.events import event_line

    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
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
            if as_json:
                click.echo(text.dump_line(event))
            elif of_incident:
                click.echo(
                    incident.block(event, colour=colour, width=terminal_width()), color=colour
                )
            else:
                click.echo(event_line(event, terminal_width()))
    if incidents and told == 0:
        click.echo(
            f"no incident of {job_id} is over; 'oobleck status {job_id}' names one that is not",
            err=True,
        )


@click.command()
@click.argument("job_id", metavar="JOB")
@click.option("-f", "--follow", is_flag=True, help="Go on with new lines until the job ends.")
@click.option("--node", metavar="NAME", help="Only the workers of this node.")
@click.option(
    "--rank",
    type=click.IntRange(min=0, max=MOST_RANK),
    metavar="N",
    help="Only rank N of the current plan.",
)
@click.option(
    "--raw", is_flag=True, help="Escapes and control characters as the workers wrote them."
)
@master_option
@json_option("One JSON object {node, slot, line, time} per line.")
def logs(
    job_id: str,
    follow: bool,
    node: str | None,
    rank: int | None,
    raw: bool,
    master: Endpoint,
    as_json: bool,
) -> None:
    """Show what a job's workers print, behind the name of the worker.

    What a terminal would obey, such as an escape, is shown as text.
    """
    from oobleck.cli.client import MasterClient
    from oobleck.cli.jobs.away import follow_logs
    from oobleck.cli.output import text

    with MasterClient(master) as connection:
        if node is not None and node not in (known := _nodes_of(connection, job_id)):
            names = ", ".join(known) or "none yet"
            raise CommandFailed(f"no such node in this job: {node}; it has {names}", NO_SUCH_THING)
        lines = (
            follow_logs(connection, job_id, node=node, rank=rank)
            if follow
            else connection.logs(job_id, follow=False, node=node, rank=rank)
        )
        for entry in lines:
            if as_json:
                click.echo(text.dump_line(text.plain(entry)))
                continue
            line = f"{entry.node}/{entry.slot}  {entry.line}"
            click.echo(line if raw else inline(line), color=raw or None)


def _warn(master: "MasterClient") -> None:
    """Of what ails the master itself; beside the answer, which programs may read."""
    if master.problem:
        click.echo(f"warning: {inline(master.problem)}", err=True)


def _nodes_of(master: "MasterClient", job_id: str) -> list[str]:
    """All nodes that the job has or had, in order."""
    plan = master.job(job_id).plan
    found = {node for pipeline in plan.pipelines for node in pipeline.nodes}
    found |= {node.node for node in master.nodes() if node.job_id == job_id}
    for event in master.events(job_id, follow=False):
        match json.loads(event.json):
            case {"event": "started", "pipelines": pipelines}:
                found |= {stage["node"] for pipeline in pipelines for stage in pipeline}
            case {"event": "node_joined" | "node_lost", "node": str(node)}:
                found.add(node)
            case _:
                pass  # about no node in particular, or about one that is in the others
    return sorted(found)
