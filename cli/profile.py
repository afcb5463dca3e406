"""`oobleck profile`: measure a job's model on the real devices, and write the profile file.

Owns where it is measured (by the agents of a master, or by a cluster on this machine that lives
as long as the command) and what is shown. What is measured is the workers' to know.
"""

import contextlib
import dataclasses
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oobleck.cli.children import stop
from oobleck.cli.job import check_data, read_job
from oobleck.cli.local import Cluster, check_room, interrupts
from oobleck.cli.options import FAILED, USAGE, check_address, json_option
from oobleck.cli.submit import is_here
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from oobleck.cli.client import Master
    from oobleck.planner.job import JobSpec
    from oobleck.planner.profile import LayerProfile, Profile

#: Two, so that there is a link to measure.
_LOCAL_NODES = 2

EPILOG = """\b
Progress goes to standard error; standard output has a table, or the profile with --json.
\b
Exit codes: 0 done, 1 it could not be measured, 2 wrong usage or a job that is refused,
4 the master cannot be reached, 130 Ctrl-C (the measurement is called off)."""


def _check_master(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    return None if value is None else check_address(ctx, parameter, value)


@click.command(epilog=EPILOG)
@click.argument("job_file", metavar="JOB.yaml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Replace a value of the job file, such as training.microbatch=4. May be repeated.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="P.json",
    help="Write the profile file there, fit for 'oobleck plan --profile' and a job's profile.",
)
@click.option(
    "--master",
    envvar="OOBLECK_MASTER",
    show_envvar=True,
    metavar="HOST:PORT",
    callback=_check_master,
    help="Let the agents of this master measure.  [default: --local]",
)
@click.option(
    "--local", "here", is_flag=True, help="Measure on this machine, with two workers, no master."
)
@json_option("The profile as one JSON object.")
def profile(
    job_file: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    master: str | None,
    here: bool,
    as_json: bool,
) -> int:
    """Measure seconds and bytes per layer of the model of JOB.yaml, and the links.

    With a master all its free nodes measure, once the jobs before are done, and it keeps the
    profile for jobs of that model. Without one two workers on this machine measure.
    """
    job = dataclasses.replace(read_job(job_file, overrides), profile="measure")
    if output is not None and not output.absolute().parent.is_dir():
        raise CommandFailed(f"--output {output}: there is no such folder; make it first", USAGE)
    if here or master is None or is_here(master):
        check_data(job)
    with interrupts(), _measuring_master(None if here else master) as address:
        # gRPC comes after the daemons have been started: a fork beside its threads is not safe.
        from oobleck.cli.client import Master

        with Master(address) as connection:
            text = _measure(connection, job)
    if output is not None:
        try:
            output.write_text(text)
        except OSError as error:
            raise CommandFailed(f"--output {output}: {error.strerror}", USAGE) from error
        _say(f"written to {output}")
    click.echo(text.rstrip() if as_json else _table(text))
    return 0


@contextlib.contextmanager
def _measuring_master(master: str | None) -> Iterator[str]:
    """The address of `master`, or of one of a cluster that ends with this context."""
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
            yield cluster.address
        finally:
            stop(cluster.master, cluster.agents)


def _measure(connection: "Master", job: "JobSpec") -> str:
    """The profile's text. Whatever ends this before the measurement has ended calls it off."""
    from oobleck.planner.jobfile import format_job

    job_id = connection.submit(format_job(job), secrets.token_hex(16), profile_only=True)
    ended = False
    try:
        told = ""
        for status in connection.watch(job_id):
            line = f"{status.state}: {status.reason}" if status.reason else status.state
            if line != told:
                told = line
                _say(line)
            ended = status.state in ("succeeded", "failed", "cancelled")
            if ended and status.state != "succeeded":
                raise CommandFailed(f"{status.state}: {status.reason}".rstrip(": "), FAILED)
    finally:
        if not ended:
            with contextlib.suppress(CommandFailed):
                connection.cancel(job_id)
    return connection.profile(job_id).profile


def _say(line: str) -> None:
    click.echo(line, err=True)
    sys.stderr.flush()


def _table(text: str) -> str:
    """Each kind of layer once, then the links."""
    from oobleck.cli import text as words
    from oobleck.planner.profilefile import parse_profile

    found = parse_profile(text)
    notes = json.loads(text).get("measured", {})
    blocks = words.count(len(found.layers) - 2, "block")
    titles = ("embedding", blocks, "head")
    kinds = (found.layers[0], found.layers[1], found.layers[-1])
    heads = (
        *("LAYER", "FORWARD ms", "BACKWARD ms", "ITS INPUT ms", "UPDATE ms"),
        *("PARAMETERS", "STATE", "ACTIVATIONS", "OUTPUT"),
    )
    rows = [(title, *_cells(layer)) for title, layer in zip(titles, kinds, strict=True)]
    return "\n".join([words.table(heads, rows), "", *_machines(found, notes)])


def _cells(layer: "LayerProfile") -> list[str]:
    """Milliseconds, then bytes."""
    from oobleck.planner.units import format_bytes

    times = (layer.forward_s, layer.backward_s, layer.backward_input_s, layer.update_s)
    sizes = (
        layer.parameter_bytes,
        layer.state_bytes,
        layer.activation_bytes,
        layer.output_bytes,
    )
    return [
        *(f"{by_gpus[1] * 1e3:.3f}" if by_gpus else "-" for by_gpus in times),
        *map(format_bytes, sizes),
    ]


def _machines(found: "Profile", notes: dict[str, Any]) -> list[str]:
    """Links, memory, and what was measured on."""
    from oobleck.cli import text as words
    from oobleck.planner.units import format_bytes

    links = found.links
    return [
        f"inside a node   {links.intra_node_bytes_per_s / 1e9:.2f} GB/s "
        f"({notes.get('intra_node_link', '?')})",
        f"between nodes   {links.inter_node_bytes_per_s / 1e9:.2f} GB/s "
        f"({notes.get('inter_node_link', '?')})",
        f"latency         {links.latency_s * 1e6:.0f} us",
        f"usable memory   {format_bytes(found.gpu_memory_bytes)} per worker",
        f"measured on     {', '.join(notes.get('devices', ['?']))}, "
        f"{words.count(int(notes.get('workers', 0)), 'worker')} at once",
    ]
