"""`oobleck checkpoint`: take a checkpoint, and list, verify or export existing ones.

Listing and verifying read the files on this machine; only taking one asks the master.
"""

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.follow import follow_events
from oobleck.cli.options import form_options, job_argument, json_option, master_option
from oobleck.cli.output import text
from oobleck.cli.output.table import Column, listing, terminal_width
from oobleck.cli.output.text import Form, document, is_data, moment
from oobleck.core.checkpoint import MANIFEST, RECORDS, InvalidCheckpoint, Manifest
from oobleck.core.redact import HIDDEN
from oobleck.core.units import format_bytes
from oobleck.host.command import (
    FAILED,
    INTERRUPTED,
    NO_SUCH_THING,
    USAGE,
    CommandFailed,
    Group,
    nearest,
)
from oobleck.host.display import inline
from oobleck.host.ipc.endpoint import Endpoint
from oobleck.host.storage.checkpoints import (
    Damaged,
    StoredCheckpoint,
    list_checkpoints,
    read_checkpoint,
    read_mark,
    read_records,
    set_aside,
    take_back,
)
from oobleck.host.storage.checkpoints import verify as verify_files
from oobleck.host.storage.folder import Folder, is_remote, open_folder

_EPILOG = """\b
Examples:
  oobleck checkpoint demo-1                     take one now
  oobleck checkpoint list demo-1                list those of a job
  oobleck checkpoint verify /shared/checkpoints
  oobleck checkpoint export /shared/checkpoints -o model

Exit codes: see 'oobleck --help'."""


class _JobFirst(Group):
    """Group of commands whose first word may be a job to take a checkpoint of.

    A word that resembles a command is refused, unless it ends with a digit, as job ids do.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            typing_error = nearest(args[0], self.shown()) and not args[0][-1:].isdigit()
            wrong = typing_error or (args[1:2] and not args[1].startswith("-"))
            if wrong and not ctx.resilient_parsing:
                raise self.no_command(ctx, args)
            args = ["save", *args]
        return super().parse_args(ctx, args)

    def meant(self, args: Sequence[str]) -> list[list[str]]:
        """Return also `JOB` for `take JOB`."""
        return super().meant(args) or ([] if nearest(args[0], self.shown()) else [[*args[1:]]])


@click.group(cls=_JobFirst, epilog=_EPILOG, subcommand_metavar="JOB | COMMAND [ARGS]...")
def checkpoint() -> None:
    """Take a checkpoint of JOB, or list, verify or export checkpoints.

    With JOB: wait until the checkpoint of the current step is published, and print its step and
    path. The job file must name a place for checkpoints (checkpoint.path).
    """


@checkpoint.command(hidden=True)
@job_argument()
@click.option("--no-wait", is_flag=True, help="Do not wait until it is published.")
@master_option
def save(job_id: str, no_wait: bool, master: Endpoint) -> None:
    """Take a checkpoint of JOB when the current step ends; print its step and path."""
    with MasterClient(master) as connection:
        if no_wait:
            connection.save_checkpoint(job_id)
            click.echo(f"{job_id} will take a checkpoint after the next step")
            return
        record = take(connection, job_id)
    click.echo(inline(f"step {record['step']}  {record['path']}"))


def take(connection: MasterClient, job_id: str, interrupted: str = "") -> dict[str, Any]:
    """Take a checkpoint now and return its record. Raise CommandFailed, also after Ctrl-C, whose
    message begins with `interrupted`."""
    number = connection.save_checkpoint(job_id)
    try:
        record = _await_answer(connection, job_id, number)
    except KeyboardInterrupt as error:
        still = (
            f"{job_id} takes the checkpoint all the same; see 'oobleck checkpoint list {job_id}'"
        )
        raise CommandFailed(f"{interrupted}{still}", INTERRUPTED) from error
    if record["event"] == "checkpoint_failed":
        raise CommandFailed(f"{job_id} at step {record['step']}: {record['reason']}", FAILED)
    return record


def _await_answer(connection: MasterClient, job_id: str, number: int) -> dict[str, Any]:
    for line in follow_events(connection, job_id, answered=True):
        record: dict[str, Any] = json.loads(line.json)
        answers = record["event"] in ("checkpoint_saved", "checkpoint_failed")
        if answers and int(record["request"]) >= number:
            return record
    job = connection.job(job_id)
    newest = f"; its newest one is {job.checkpoint}" if job.checkpoint else ""
    raise CommandFailed(f"{job_id} has {job.state} without taking the checkpoint{newest}", FAILED)


@checkpoint.command("list")
@click.argument("target", metavar="PATH|JOB")
@master_option
@form_options("A JSON array of checkpoints, newest first.")
def list_(target: str, master: Endpoint, form: Form) -> None:
    """List the checkpoints in PATH, or of JOB.

    PATH is a directory or URL. The newest is first. Damaged checkpoints are listed too, and the
    remains of running or interrupted saves. 'verify' checks the files.
    """
    folder = _open(_path(target, master))
    try:
        there = list_checkpoints(folder)
    except OSError as error:
        raise _unreadable(folder.url, error) from error
    if is_data(form):
        found = [_plain(item, folder) for item in there.checkpoints]
        bad = [{"name": n, "state": "damaged", "problem": p} for n, p in there.damaged.items()]
        torn = [{"name": name, "state": "torn", "problem": ""} for name in there.torn]
        click.echo(document([*found, *bad, *torn], form))
        return
    wide = form == "wide"
    shown = listing(_columns(folder), there.checkpoints, width=terminal_width(), wide=wide)
    click.echo(shown or "no checkpoints")
    for problem in there.damaged.values():
        click.echo(inline(f"damaged: {problem}"))
    for name in there.torn:
        click.echo(f"not complete: {name}")


@checkpoint.command()
@click.argument("path", metavar="PATH")
@json_option("A JSON array of the files that are damaged.")
def verify(path: str, as_json: bool) -> int:
    """Check the files against their SHA-256.

    PATH is a checkpoint, or a place whose checkpoints are all checked. The exit code is 1 if a file
    is damaged or missing; its name is printed. A damaged checkpoint is set aside: no job resumes
    from it or counts it as kept. One that is whole again is restored.
    """
    whole, damaged = _checkpoints(path, set_aside=True)
    bad = [{"checkpoint": n, "file": MANIFEST, "problem": p} for n, p in damaged.items()]
    for problem in () if as_json else damaged.values():
        click.echo(inline(f"damaged: {problem}"))
    for folder, found in whole:
        problems = verify_files(folder, found.manifest)
        note = _mark(folder, problems)
        for file, error in problems.items():
            bad.append({"checkpoint": found.name, "file": file, "problem": error.what})
        lost = _records_problem(folder, found.manifest)
        if lost:
            bad.append({"checkpoint": found.name, "file": RECORDS, "problem": lost})
        if not as_json:
            files = len(found.manifest.files)
            state = f"{len(problems)} of {files} files damaged" if problems else "ok"
            head = f"{found.name}  step {found.manifest.step}"
            click.echo(inline(f"{head}  {files} files  {state}{note}"))
            for error in problems.values():
                click.echo(inline(f"  {error}"))
            if lost:
                click.echo(inline(f"  {lost}; a job resumes from its state without these records"))
    if as_json:
        click.echo(text.dump(bad))
    return FAILED if bad else 0


def _records_problem(folder: Folder, manifest: Manifest) -> str:
    """Return why the records beside a checkpoint are unusable; empty if they are usable."""
    try:
        if manifest.records is not None:
            read_records(folder, manifest.records)
    except InvalidCheckpoint as error:
        return str(error)
    return ""


def _mark(folder: Folder, problems: Mapping[str, InvalidCheckpoint]) -> str:
    """Set the checkpoint in `folder` aside or restore it, by `problems`; return a remark."""
    lasting = {f: error.what for f, error in problems.items() if isinstance(error, Damaged)}
    try:
        marked = read_mark(folder) is not None
        if lasting and not marked:
            set_aside(folder, lasting, time.time())
            return "; set aside"
        if marked and not problems:
            take_back(folder)
            return "; no longer set aside"
    except OSError as error:
        return f"; cannot be {'set aside' if lasting else 'restored'}: {error.strerror or error}"
    return "; set aside" if marked else ""


@checkpoint.command()
@click.argument("path", metavar="PATH")
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="A new directory for config.json and model.safetensors.",
)
def export(path: str, output: Path) -> None:
    """Export a checkpoint as a Hugging Face model.

    transformers' from_pretrained loads it: config.json and safetensors. A model of your own, which
    transformers does not know, becomes only safetensors, as an nn.Sequential of its layers. PATH is
    a checkpoint, or a place whose newest one is used. Every file is checked against its SHA-256.
    """
    from tqdm import tqdm

    from oobleck.host.storage.export import export as write_model
    from oobleck.host.storage.weight_files import WeightsError

    folder, found, older = _newest(path, output)
    layers = len(found.manifest.files)
    try:
        with tqdm(total=layers, unit="layer", disable=None, leave=False) as bar:
            write_model(folder, found, output, on_layer=bar.update)
    except InvalidCheckpoint as error:
        hint = _instead(older, output)
        raise CommandFailed(f"{found.name}: {error}{hint}", FAILED) from error
    except WeightsError as error:
        raise CommandFailed(f"model.weights: {error}", FAILED) from error
    except ValueError as error:
        raise CommandFailed(f"--output: {error}", USAGE) from error
    except OSError as error:
        text = f"cannot write to {output}: {error.strerror or error}"
        raise CommandFailed(text, FAILED) from error
    click.echo(inline(f"step {found.manifest.step}  {output}"))


def _path(target: str, master: Endpoint) -> str:
    """Return the place that `target` names: a path, or that of a job."""
    if "/" in target or Path(target).exists():
        return target

    with MasterClient(master) as connection:
        job = connection.job(target)
    if not job.checkpoint_path:
        raise CommandFailed(f"job {target} takes no checkpoints", NO_SUCH_THING)
    if HIDDEN in job.checkpoint_path:
        raise CommandFailed(
            f"the checkpoints of {target} are in {job.checkpoint_path}, and the master hides "
            "the secret in that URL; name the URL instead of the job",
            NO_SUCH_THING,
        )
    return str(job.checkpoint_path)


def _open(path: str) -> Folder:
    if not is_remote(path) and not Path(path.removeprefix("file://")).is_dir():
        hint = "'oobleck checkpoint list JOB -o wide' shows the paths of a job's checkpoints"
        raise CommandFailed(f"there is no directory {path}; {hint}", NO_SUCH_THING)
    try:
        return open_folder(path)
    except ValueError as error:
        raise CommandFailed(str(error), USAGE) from error


def _checkpoints(
    path: str, *, set_aside: bool = False
) -> tuple[list[tuple[Folder, StoredCheckpoint]], dict[str, str]]:
    """Return the checkpoint at `path`, or all in it, newest first, with their folders.

    Also return the problems of the others, by name. Raise CommandFailed if there is neither.
    `set_aside`: include checkpoints that were found damaged before.
    """
    folder = _open(path)
    name = path.rstrip("/").rpartition("/")[2]
    try:
        one = read_checkpoint(folder, name)
        if one is not None:
            mark = None if set_aside else read_mark(folder)
            if mark is not None:
                return [], {name: f"{name}: {mark}; it is set aside"}
            return [(folder, one)], {}
        listing = list_checkpoints(folder)
    except InvalidCheckpoint as error:
        return [], {name: str(error)}
    except OSError as error:
        raise _unreadable(path, error) from error
    if not listing.checkpoints and not listing.damaged:
        raise CommandFailed(f"there is no checkpoint in {path}", NO_SUCH_THING)
    found, damaged = listing.checkpoints, dict(listing.damaged)
    if set_aside:
        found = (*found, *listing.set_aside)
        for one in listing.set_aside:
            del damaged[one.name]
    return [(folder.below(one.name), one) for one in found], damaged


def _newest(
    path: str, output: Path
) -> tuple[Folder, StoredCheckpoint, list[tuple[Folder, StoredCheckpoint]]]:
    """Return the newest checkpoint with its folder, and the older ones. Raise CommandFailed if
    there is none, or if a damaged one may be newer."""
    whole, damaged = _checkpoints(path)
    newest = whole[0][1].name if whole else ""
    if later := sorted(name for name in damaged if name > newest):
        raise CommandFailed(f"{damaged[later[-1]]}{_instead(whole, output)}", FAILED)
    return *whole[0], whole[1:]


def _instead(candidates: list[tuple[Folder, StoredCheckpoint]], output: Path) -> str:
    """Return how to export the first of `candidates` that is whole; empty without candidates."""
    for folder, found in candidates:
        if not verify_files(folder, found.manifest):
            command = shlex.join(["oobleck", "checkpoint", "export", folder.url, "-o", str(output)])
            return f"; the newest undamaged one is of step {found.manifest.step}: {command}"
    return "; all others there are damaged" if candidates else ""


def _unreadable(path: str, error: OSError) -> CommandFailed:
    return CommandFailed(f"cannot read {path}: {error.strerror or error}", NO_SUCH_THING)


def _columns(folder: Folder) -> tuple[Column, ...]:
    """Return the columns for a listing of the folder's checkpoints."""
    return (
        Column("STEP", lambda found: found.manifest.step),
        Column("SAVED", lambda found: moment(found.manifest.created)),
        Column("SIZE", _size),
        Column("JOB", lambda found: found.manifest.job, wide=True),
        Column("MODEL", lambda found: found.manifest.model.family, wide=True),
        Column("LAYERS", lambda found: len(found.manifest.files), wide=True),
        Column("NAME", lambda found: found.name),
        Column("PATH", lambda found: _plain(found, folder)["path"], wide=True),
    )


def _plain(found: StoredCheckpoint, folder: Folder) -> dict[str, object]:
    manifest = found.manifest
    return {
        "name": found.name,
        "state": "complete",
        "step": manifest.step,
        "path": f"{folder.url.rstrip('/')}/{found.name}",
        "created": manifest.created,
        "bytes": manifest.bytes,
        "job": manifest.job,
        "model": manifest.model.family,
        "layers": len(manifest.files),
    }


def _size(found: StoredCheckpoint) -> str:
    return format_bytes(found.manifest.bytes)
