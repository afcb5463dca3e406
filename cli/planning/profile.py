"""`oobleck profile`: measure a job's model on real devices, or record a timeline of a job.

Owns where it is measured (by a master's agents, or by a cluster on this machine that ends with the
command) and what is shown. Workers know what is measured.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oobleck.cli.cluster.cluster import Cluster
from oobleck.cli.cluster.local import check_room, interrupts
from oobleck.cli.jobs.checks import all_here, check_inputs
from oobleck.cli.jobs.job_file import folder_of, read_job
from oobleck.cli.jobs.own_code import sent_text
from oobleck.cli.jobs.packing import packed
from oobleck.cli.options import (
    credential_options,
    endpoint,
    json_option,
    pack_option,
    set_option,
)
from oobleck.cli.reading.timeline import record, summary, write
from oobleck.core.units import count, format_bytes
from oobleck.host.command import FAILED, USAGE, CommandFailed
from oobleck.host.display import inline, printable
from oobleck.host.ipc.endpoint import DEFAULT_MASTER, Endpoint

if TYPE_CHECKING:
    from oobleck.cli.client import MasterClient
    from oobleck.core.profile import LayerProfile, Profile

#: Nodes of a cluster on this machine: two, so that there is a link to measure.
_LOCAL_NODES = 2
#: Most steps of a timeline; viewers cannot show larger files.
_MOST_STEPS = 100

EPILOG = """\b
Progress goes to standard error; standard output has a table, or the profile with --json.
\b
Exit codes: 0 done, 1 it could not be measured or written, 2 wrong usage or a refused job,
4 the master is unreachable, 130 Ctrl-C (the measurement is cancelled)."""


@click.command(epilog=EPILOG)
@click.argument(
    "job_file",
    metavar="[JOB.yaml]",
    required=False,
    type=click.Path(dir_okay=False, path_type=Path),
)
@set_option
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="P.json",
    help="Write the profile to this file, for 'oobleck plan --profile' and a job's profile.",
)
@click.option(
    "--master",
    envvar="OOBLECK_MASTER",
    show_envvar=True,
    metavar="HOST:PORT",
    callback=endpoint,
    help="Measure with the agents of this master.  [default: --local]",
)
@credential_options
@click.option(
    "--local",
    "here",
    is_flag=True,
    help="Measure on this machine, with two workers, without a master.",
)
@click.option(
    "--timeline",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT.json",
    help="Measure nothing, but record how a running job's next steps spend their time: a Chrome "
    "trace with one track per worker, for ui.perfetto.dev or chrome://tracing.",
)
@click.option("--job", "job_id", metavar="ID", help="The running job of the timeline.")
@click.option(
    "--steps",
    type=click.IntRange(min=1, max=_MOST_STEPS),
    metavar="K",
    help="Steps in the timeline.  [default: 1]",
)
@pack_option
@json_option("The profile as one JSON object.")
def profile(
    job_file: Path | None,
    overrides: tuple[str, ...],
    output: Path | None,
    master: Endpoint | None,
    here: bool,
    timeline: Path | None,
    job_id: str | None,
    steps: int | None,
    pack: bool,
    as_json: bool,
) -> int:
    """Measure seconds and bytes per layer of the model of JOB.yaml, and the links.

    With a master, all its free nodes measure, once earlier jobs are done, and it keeps the profile
    for jobs with that model. Without one, two workers on this machine measure. With --timeline and
    --job: record steps of a running job instead.
    """
    _check_usage(job_file, job_id, timeline, steps)
    if timeline is not None and job_id is not None:
        _check_output("--timeline", timeline)
        if master is None:
            ctx = click.get_current_context()
            master = endpoint(ctx, ctx.command.params[0], DEFAULT_MASTER)
        assert master is not None, "an address is given"
        trace = record(master, job_id, steps or 1)
        write(trace, timeline)
        _say(summary(json.loads(trace)))
        _say(f"written to {timeline}; open it at ui.perfetto.dev")
        return 0
    assert job_file is not None, "the usage is checked"
    job = dataclasses.replace(read_job(job_file, overrides), profile="measure")
    if output is not None:
        _check_output("--output", output)
    if here:
        master = None
    if master is None:
        check_inputs(job)
    with interrupts(), _measuring_master(master) as found:
        # Import gRPC only after starting the daemons: a fork beside its threads is unsafe.
        from oobleck.cli.client import MasterClient
        from oobleck.cli.jobs.follow import AWAY_S

        with MasterClient(found) as connection:
            if master is None:  # the master does not return
                text = _measure(connection, sent_text(connection, job), patience_s=0.0)
            else:
                nodes = connection.nodes()
                if all_here(nodes):
                    check_inputs(job)
                with packed(job, folder_of(job_file), nodes, pack=pack, say=_say) as sent:
                    sent_job = sent_text(connection, sent)
                text = _measure(connection, sent_job, patience_s=AWAY_S)
    if missing := json.loads(text).get("measured", {}).get("missing"):
        _say(f"warning: the measurement is incomplete: {'; '.join(missing)}")
    if output is not None:
        _write(output, text)
    click.echo(text.rstrip() if as_json else printable(_table(text)))
    return 0


def _check_usage(
    job_file: Path | None, job_id: str | None, timeline: Path | None, steps: int | None
) -> None:
    """Raise UsageError unless the arguments are those of a measurement or of a timeline."""
    if timeline is None and (job_id is not None or steps is not None):
        raise click.UsageError("--job and --steps require --timeline OUT.json")
    if timeline is not None and (job_id is None or job_file is not None):
        raise click.UsageError(
            "a timeline needs a running job: oobleck profile --timeline OUT.json --job ID"
        )
    if timeline is None and job_file is None:
        raise click.UsageError("Missing argument 'JOB.yaml'.")


@contextlib.contextmanager
def _measuring_master(master: Endpoint | None) -> Iterator[Endpoint]:
    """Yield `master`, or that of a cluster that ends with this context."""
    if master is not None:
        yield master
        return
    memory = check_room(_LOCAL_NODES, 1, oversubscribe=False)
    with tempfile.TemporaryDirectory(prefix="oobleck-profile-") as folder:
        cluster = Cluster(Path(folder), tell=lambda line: None)
        _say("starting two workers on this machine")
        try:
            cluster.start("127.0.0.1:0", _LOCAL_NODES, 1, memory, None)
            cluster.wait_until_ready()
            yield cluster.endpoint
        finally:
            cluster.stop()


def _check_output(option: str, output: Path) -> None:
    """Check before the measurement that the file can be written. Raise CommandFailed."""
    if not output.absolute().parent.is_dir():
        raise CommandFailed(f"{option} {output}: its folder does not exist; make it first", USAGE)
    existed = os.path.lexists(output)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        os.close(os.open(output, flags, 0o666))
        if not existed:
            output.unlink()
    except OSError as error:
        raise CommandFailed(
            f"{option} {output}: {error.strerror}; name a file that can be written", USAGE
        ) from error


def _write(output: Path, text: str) -> None:
    try:
        output.write_text(text)
    except OSError as error:
        click.echo(text.rstrip())
        raise CommandFailed(
            f"--output {output}: {error.strerror}; the profile is on standard output", FAILED
        ) from error
    _say(f"written to {output}")


def _measure(connection: "MasterClient", job: str, *, patience_s: float) -> str:
    """Return the profile's text. `job`: the job's text. If this ends earlier, the measurement is
    cancelled."""
    job_id = connection.submit(job, secrets.token_hex(16), profile_only=True).job_id
    done = False
    try:
        text = _await_profile(connection, job_id, patience_s)
        done = True
    finally:
        if not done:
            with contextlib.suppress(CommandFailed):
                connection.cancel(job_id)
    return text


def _await_profile(connection: "MasterClient", job_id: str, patience_s: float) -> str:
    """Print the job's states until it has ended; return the profile.

    An absent master is waited for.
    """
    from oobleck.cli.jobs.follow import follow_status
    from oobleck.cli.output.text import ENDED

    shown = ""
    for status in follow_status(connection, job_id, _say, patience_s=patience_s):
        line = f"{status.state}: {status.reason}" if status.reason else status.state
        if line != shown:
            shown = line
            _say(line)
        if status.state in ENDED and status.state != "succeeded":
            raise CommandFailed(line, FAILED)
    return connection.profile(job_id).profile


def _say(line: str) -> None:
    click.echo(inline(line), err=True)
    sys.stderr.flush()


def _table(text: str) -> str:
    """Format a column for each kind of layer, then the links."""
    from oobleck.cli.output.table import table
    from oobleck.core.profile import parse_profile

    found = parse_profile(text)
    notes = json.loads(text).get("measured", {})
    kinds = (found.layers[0], found.layers[1], found.layers[-1])
    heads = ("LAYER", "embedding", count(len(found.layers) - 2, "block"), "head")
    rows = zip(_LABELS, *map(_cells, kinds), strict=True)
    return "\n".join([table(heads, rows), "", *_machines(found, notes)])


#: Labels of the values from `_cells`.
_LABELS = (
    *("forward", "backward", "of that, its input", "update"),
    *("parameters", "state", "activations", "output"),
)


def _cells(layer: "LayerProfile") -> list[str]:
    """Return times, then sizes."""
    times = (layer.forward_s, layer.backward_s, layer.backward_input_s, layer.update_s)
    sizes = (
        layer.parameter_bytes,
        layer.state_bytes,
        layer.activation_bytes,
        layer.output_bytes,
    )
    return [
        *(f"{by_gpus[1] * 1e3:.3f} ms" if by_gpus else "-" for by_gpus in times),
        *map(format_bytes, sizes),
    ]


def _machines(found: "Profile", notes: dict[str, Any]) -> list[str]:
    """Format links, memory, and the measured devices."""
    links = found.links
    return [
        f"inside a node   {links.intra_node_bytes_per_s / 1e9:.2f} GB/s "
        f"({notes.get('intra_node_link', '?')})",
        f"between nodes   {links.inter_node_bytes_per_s / 1e9:.2f} GB/s "
        f"({notes.get('inter_node_link', '?')})",
        f"latency         {links.latency_s * 1e6:.0f} us",
        f"usable memory   {format_bytes(found.gpu_memory_bytes)} per worker",
        f"measured on     {', '.join(notes.get('devices', ['?']))}, "
        f"{count(int(notes.get('workers', 0)), 'worker')} at once",
    ]
