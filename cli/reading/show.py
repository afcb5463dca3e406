"""Commands that show the cluster and its jobs: status, nodes, jobs, events, logs."""

import json
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from datetime import time as time_of_day
from typing import TYPE_CHECKING

import click

from oobleck.cli import options
from oobleck.cli.options import job_argument, node_names
from oobleck.core.units import parse_seconds
from oobleck.host.command import NO_SUCH_THING, CommandFailed
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient
    from oobleck.cli.jobs.follow import LogPosition
    from oobleck.cli.output.text import Form
    from oobleck.proto import control_pb2 as pb


@click.command(cls=options.WatchCommand)
@job_argument(required=False)
@options.master_option
@options.watch_option
@options.form_options("One JSON object: the job's status, or {nodes, jobs, head} of the cluster.")
@click.option(
    "-a", "--all", "everything", is_flag=True, help="List ended jobs and all nodes one by one."
)
def status(
    job_id: str | None, everything: bool, master: Endpoint, watch_s: float | None, form: "Form"
) -> None:
    """Show one job in full (state and reason, step, loss, pipelines, how many nodes it can still
    lose), or without JOB the cluster: jobs that have not ended, then the nodes.

    Ended jobs are counted, and so are nodes in order where there are more than a few. --watch of a
    job ends with it.
    """
    if everything and job_id is not None:
        raise click.UsageError("--all lists jobs and nodes; leave it out, or the job")
    from oobleck.cli.output import text
    from oobleck.cli.output.overview import cluster_text
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
            return cluster_text(
                nodes, jobs, width=terminal_width(), wide=wide, everything=everything
            )

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
    """List the nodes that the master knows, and their states."""
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


# ---- oobleck events


#: Time of day without a date, which means its last occurrence.
_CLOCK = re.compile(r"(\d\d?):(\d\d(?::\d\d)?)")


class _Moment(click.ParamType):  # type: ignore[type-arg]  # older releases are not generic at run time
    """Type of an option for an age or a moment, as the master's time stamp: ISO 8601 in UTC."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from oobleck.cli.jobs.follow import log_time

        try:
            return log_time(time.time() - parse_seconds(value))
        except (ValueError, OverflowError, OSError):
            pass  # not an age
        try:
            if clock := _CLOCK.fullmatch(value.strip()):
                return log_time(_latest(f"{clock[1]:0>2}:{clock[2]}", datetime.now()).timestamp())
            return log_time(datetime.fromisoformat(value.strip()).timestamp())
        except (ValueError, OverflowError, OSError):
            text = f"{value!r} is not a time; write 10m (ago), 14:30, or '2026-03-01 14:30'"
            self.fail(text, param, ctx)


def _latest(clock: str, now: datetime) -> datetime:
    """Return when it was last that time of day, in local time: today or yesterday.

    Raise ValueError.
    """
    today = datetime.combine(now.date(), time_of_day.fromisoformat(clock))
    return today if today <= now else today - timedelta(days=1)


_since_option = click.option(
    "--since",
    type=_Moment(),
    metavar="TIME",
    help="Only lines since then: 10m (ago), the last 14:30, or '2026-03-01 14:30'.",
)


@click.command()
@job_argument(required=False)
@options.follow_option("Continue with new events: until the job ends, or without JOB, for ever.")
@_since_option
@click.option(
    "--incidents", is_flag=True, help="Only failures and slow workers, with their consequences."
)
@click.option(
    "--policies",
    is_flag=True,
    help="A line for each recovery policy and rule: how often it answered, and the standstill and "
    "the step that were expected and happened.",
)
@options.master_option
@options.form_options("One JSON object per line, as in the job's events.jsonl.")
def events(
    job_id: str | None,
    follow: bool,
    since: str | None,
    incidents: bool,
    policies: bool,
    master: Endpoint,
    form: "Form",
) -> None:
    """Show the events of a job, oldest first: losses, reconfigurations, the end.

    Without JOB, show the events of the cluster: starts of the master, joins, losses and drains of
    nodes, jobs, tokens and certificates.

    A closed failure is shown in full, with the time at which it began: root cause, first witness,
    seconds per phase, cost. Slow workers are shown once none is slow any more: their pace, and the
    answers.
    """
    from oobleck.cli.client import MasterClient
    from oobleck.cli.jobs.follow import follow_events, log_time
    from oobleck.cli.output.events import cluster_line, event_line, incident_block
    from oobleck.cli.output.table import terminal_width, wants_colour
    from oobleck.cli.output.text import entry, is_data

    if job_id is None and (incidents or policies):
        raise click.UsageError("--incidents and --policies are of one job; name it")
    if policies:
        if follow or incidents or since:
            raise click.UsageError(
                "--policies excludes -f, --since and --incidents; leave them out"
            )
        return _print_policies(job_id or "", master, form)
    coloured = wants_colour()
    printed = 0
    with MasterClient(master) as connection:
        asked = job_id or ""
        records = (
            follow_events(connection, asked) if follow else connection.events(asked, follow=False)
        )
        for record in records:
            event = json.loads(record.json)
            of_incident = event["event"] == "incident"
            if incidents and not of_incident:
                continue
            if since is not None and log_time(event["time"]) < since:
                continue
            printed += 1
            width = None if form == "wide" else terminal_width()
            if is_data(form):
                click.echo(entry(event, form))
            elif job_id is None:
                click.echo(cluster_line(event, width))
            elif of_incident:
                block = incident_block(event, colour=coloured, width=width)
                click.echo(block, color=coloured)
            else:
                click.echo(event_line(event, width))
    if incidents and printed == 0:
        when = " since then" if since is not None else ""
        click.echo(
            f"no incident of {job_id} is closed{when}; 'oobleck status {job_id}' names an open one",
            err=True,
        )


def _print_policies(job_id: str, master: Endpoint, form: "Form") -> None:
    from oobleck.cli.client import MasterClient
    from oobleck.cli.output.table import terminal_width
    from oobleck.cli.output.text import entry, is_data
    from oobleck.cli.view.predicted import predicted, predicted_table

    with MasterClient(master) as connection:
        events = [json.loads(one.json) for one in connection.events(job_id, follow=False)]
        found = predicted(events, map(json.loads, connection.metrics(job_id, follow=False)))
    if is_data(form):
        for one in found:
            click.echo(entry(one.data(), form))
    elif found:
        click.echo(predicted_table(found, width=terminal_width(), wide=form == "wide"))
    else:
        click.echo(f"{job_id} has had no plan after its first one", err=True)


# ---- oobleck logs


#: Maximum of the protocol's field.
MOST_RANK = 2**32 - 1
#: Most lines kept until the last ones are known.
_MOST_TAIL = 100_000

_EPILOG = """\b
Examples:
  oobleck logs demo-1 --tail 20 -f              the last lines, and new ones
  oobleck logs demo-1 --since 10m --grep 'loss|nan'
  oobleck logs demo-1 --since '2026-03-01 04:00' --node n3"""


class _Pattern(click.ParamType):  # type: ignore[type-arg]  # as above
    name = "regex"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> "re.Pattern[str]":
        try:
            return re.compile(value)
        except re.error as error:
            at = "" if error.pos is None else f", at character {error.pos + 1}"
            self.fail(f"{value!r} is not a regular expression: {error.msg}{at}", param, ctx)
        except (RecursionError, OverflowError):
            self.fail("is nested too deeply, or repeats too often; write a simpler one", param, ctx)


@click.command(epilog=_EPILOG)
@job_argument()
@options.follow_option("Continue with new lines until the job ends.")
@click.option(
    "--tail",
    type=click.IntRange(min=0, max=_MOST_TAIL),
    metavar="N",
    help="Only the last N of the existing lines.",
)
@_since_option
@click.option("--grep", type=_Pattern(), metavar="REGEX", help="Only lines that match REGEX.")
@click.option(
    "--node", metavar="NAME", shell_complete=node_names, help="Only the workers of this node."
)
@click.option(
    "--rank",
    type=click.IntRange(min=0, max=MOST_RANK),
    metavar="N",
    help="Only rank N of the current plan.",
)
@click.option("--raw", is_flag=True, help="Keep escapes and control characters of the workers.")
@options.master_option
@options.form_options("One JSON object {node, slot, line, time} per line.")
def logs(
    job_id: str,
    follow: bool,
    tail: int | None,
    since: str | None,
    grep: "re.Pattern[str] | None",
    node: str | None,
    rank: int | None,
    raw: bool,
    master: Endpoint,
    form: "Form",
) -> None:
    """Show the output of a job's workers, after the name of the worker; --wide adds the time.

    Control characters that a terminal would obey, such as escapes, are shown as text.
    """
    from oobleck.cli.client import MasterClient
    from oobleck.cli.jobs.follow import LogPosition, follow_logs
    from oobleck.cli.output import text
    from oobleck.cli.output.text import entry, is_data

    def matching(lines: "Iterable[pb.LogLine]") -> "Iterator[pb.LogLine]":
        return (line for line in lines if grep is None or grep.search(line.line))

    def show(lines: "Iterable[pb.LogLine]") -> None:
        for line in lines:
            if is_data(form):
                click.echo(entry(text.plain(line), form))
                continue
            at = f"{line.time}  " if form == "wide" else ""
            text_line = f"{at}{line.node}/{line.slot}  {line.line}"
            click.echo(text_line if raw else inline(text_line), color=raw or None)

    with MasterClient(master) as connection:
        if node is not None and node not in (known := _nodes_of(connection, job_id)):
            names = ", ".join(known) or "none yet"
            problem = f"no such node in this job: {node}; it has {names}"
            raise CommandFailed(problem, NO_SUCH_THING)
        since = since or ""
        position = LogPosition(time=since)
        if tail is not None or not follow:
            past = connection.logs(job_id, follow=False, node=node, rank=rank, since=since)
            show(_last(matching(_noted(past, position)), tail))
        if follow:
            show(matching(follow_logs(connection, job_id, node=node, rank=rank, behind=position)))


def _noted(lines: "Iterable[pb.LogLine]", position: "LogPosition") -> "Iterator[pb.LogLine]":
    for line in lines:
        if position.is_new(line):
            yield line


def _last(lines: "Iterator[pb.LogLine]", tail: int | None) -> "Iterable[pb.LogLine]":
    """Return all lines, as they arrive, or the last `tail`, with only these in memory."""
    return lines if tail is None else deque(lines, maxlen=tail)


def _nodes_of(master: "MasterClient", job_id: str) -> list[str]:
    """Return all nodes that the job has or had, in order."""
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
                pass  # about no node, or about one of the others
    return sorted(found)
