"""Commands on job files, which ask no master: `oobleck init`, `check` and `config`."""

import json
import os
import shlex
from dataclasses import dataclass, replace
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from oobleck.cli import options
from oobleck.cli.jobs.checks import check_checkpoints, check_inputs
from oobleck.cli.jobs.job_file import read_form, read_only, read_profile
from oobleck.cli.jobs.own_code import Found, look_at, refuse, tell
from oobleck.cli.output.table import table, terminal_width
from oobleck.cli.output.text import Form, document, is_data
from oobleck.core.job.description import TreeSketch
from oobleck.core.job.file import format_job, job_schema
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.core.units import format_bytes
from oobleck.host.command import USAGE, CommandFailed, Group
from oobleck.host.display import one_line

# ---- oobleck init


@dataclass(frozen=True, kw_only=True)
class Template:
    """Files to write: a file of cli/templates for each name in the user's folder."""

    files: dict[str, str]
    #: What the user must do before submitting the job; {folder}: where the files are.
    before: tuple[str, ...] = ()


_TEXTS = "mkdir {folder}/corpus    # and put text files into it"
TEMPLATES = {
    "own-model": Template(files={"job.yaml": "own-model.yaml", "my_model.py": "my_model.py"}),
    "huggingface": Template(
        files={"job.yaml": "huggingface.yaml"},
        before=("pip install 'transformers>=5.0'", _TEXTS),
    ),
    "text": Template(files={"job.yaml": "text.yaml"}, before=(_TEXTS,)),
}


@click.command()
@click.option(
    "--template",
    type=click.Choice(list(TEMPLATES)),
    default="own-model",
    show_default=True,
    help="A model of your own, one of transformers, or the built-in GPT on text.",
)
@click.argument(
    "folder", metavar="[DIR]", default=".", type=click.Path(file_okay=False, path_type=Path)
)
def init(template: str, folder: Path) -> None:
    """Write a job file to start from into DIR (default: here), and the module that it names.

    Existing files are not overwritten.
    """
    chosen = TEMPLATES[template]
    sources = resources.files("oobleck.cli") / "templates"
    texts = {folder / name: (sources / file).read_text() for name, file in chosen.files.items()}
    for path in texts:
        if path.exists() or path.is_symlink():
            raise CommandFailed(f"{path} exists already; move it, or name another DIR", USAGE)
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x") as file:
                file.write(text)
    except OSError as error:
        why = error.strerror or str(error)
        raise CommandFailed(f"cannot write {path}: {why}; name another DIR", USAGE) from error
    for path in texts:
        click.echo(f"wrote {path}")
    click.echo("\nNext:")
    job = shlex.quote(str(folder / "job.yaml"))
    for line in chosen.before:
        click.echo(f"  {line.format(folder=shlex.quote(str(folder)))}")
    click.echo(f"  oobleck check {job}")
    if not os.environ.get("OOBLECK_MASTER"):
        click.echo("  oobleck local --nodes 4    # a cluster on this machine, in its own terminal")
    click.echo(f"  oobleck submit {job} --follow")


# ---- oobleck check


EPILOG = """\b
Exit codes: 0 no problem, 2 the job would be refused, with a line on standard error for each
problem."""


@click.command(epilog=EPILOG)
@click.argument("job_file", metavar="JOB.yaml", type=click.Path(dir_okay=False, path_type=Path))
@options.set_option
@options.form_options("Layers and problems as one JSON object.")
def check(job_file: Path, overrides: tuple[str, ...], form: Form) -> int:
    """Check the job that JOB.yaml (- for standard input) describes for problems.

    No master is asked; files are expected on this machine. A model of your own is run for one
    micro-batch, layer by layer, and shown as a table.
    """
    found = look_at(read_only(job_file, overrides), always=True)
    if found.job.model.known:
        found = replace(found, problems=[*found.problems, *check_inputs(found.job)])
        check_checkpoints(found.job)
        read_profile(found.job)
    layers = _layers(found.job)
    if is_data(form):
        problems = [
            {"where": p.where, "sentence": p.sentence, "warning": p.warning} for p in found.problems
        ]
        answer = {"ok": not found.refusals, "layers": layers, "problems": problems}
        click.echo(document(answer, form))
        return USAGE if found.refusals else 0
    _show(found, layers, wide=form == "wide")
    return 0


def _show(found: Found, layers: list[dict[str, Any]], *, wide: bool) -> None:
    if layers:
        compiled = any(layer["compiled"] for layer in layers)
        heads: tuple[str, ...] = ("LAYERS", "CLASS", "PARAMETERS", "KEPT PER ROW", "OUTPUT PER ROW")
        rows = [
            (
                _range(layer["first"], layer["last"]),
                layer["class"],
                f"{layer['parameters']:,}",
                format_bytes(layer["kept_bytes"]),
                ", ".join(layer["output"]),
                *(["yes" if layer["compiled"] else "no"] if compiled else []),
            )
            for layer in layers
        ]
        heads += ("COMPILED",) if compiled else ()
        click.echo(table(heads, rows, width=None if wide else terminal_width()))
    for problem in found.problems:
        if problem.warning:
            tell(f"warning: {problem}")
    refuse(found.refusals)
    click.echo("ok")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _layers(job: JobSpec) -> list[dict[str, Any]]:
    """Return a record for each run of equal layers of a user's model. Empty for other models, and
    if its layers are unknown."""
    model = job.model
    if not isinstance(model, OwnModelSpec) or not model.known:
        return []
    found = []
    for kind, run in groupby(range(model.layer_count), key=model.order.__getitem__):
        numbers, sketch = list(run), model.description.kinds[kind]
        found.append(
            {
                "first": numbers[0],
                "last": numbers[-1],
                "class": sketch.name,
                "parameters": sketch.parameters,
                "kept_bytes": sketch.kept_bytes,
                "output": _shapes(sketch.output),
                "compiled": sketch.compiled is not None,
            }
        )
    return found


def _shapes(output: TreeSketch) -> list[str]:
    return [f"{tensor.dtype}{list(tensor.shape)}" for tensor in output.tensors]


# ---- oobleck config


_EPILOG = """\b
Examples:
  oobleck config schema > oobleck.schema.json
  # then, as the first line of a job file, for editors with a YAML language server:
  # yaml-language-server: $schema=oobleck.schema.json"""

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.group(cls=Group, epilog=_EPILOG)
def config() -> None:
    """Show, check and describe job files."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    click.echo(json.dumps(job_schema(), indent=2))


@config.command(short_help="Print a job file with every key.")
@click.argument("job_file", metavar="JOB.yaml", type=_PATH)
@options.set_option
@click.option(
    "-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True
)
def show(job_file: Path, overrides: tuple[str, ...], output: str) -> None:
    """Print JOB.yaml (- for standard input) with every key: defaults, and all sizes of a model that
    a preset or config names. The result is a job file for the same job.
    """
    tree = _readable(json.loads(format_job(read_form(job_file, overrides))))
    click.echo(document(tree, "json" if output == "json" else "yaml"))


@config.command(
    short_help="Check the keys and values of job files.",
    epilog="Exit codes: 0 every file is a valid job file, 2 some are not, with a line for each on "
    "standard error.",
)
@click.argument("job_files", metavar="JOB.yaml...", nargs=-1, required=True, type=_PATH)
@options.set_option
def validate(job_files: tuple[Path, ...], overrides: tuple[str, ...]) -> int:
    """Check that each JOB.yaml (- for standard input) is a job file: its keys and values.

    Data, weights and code are not checked; 'oobleck check' does that.
    """
    code = 0
    for path in job_files:
        try:
            read_form(path, overrides)
        except CommandFailed as error:
            click.echo(f"oobleck: {one_line(error.format_message())}", err=True)
            code = USAGE
        else:
            click.echo(f"{path}: ok" if str(path) != "-" else "ok")
    return code


def _readable(tree: Any) -> Any:
    """Return the job's tree with arguments as mappings. It omits keys that only a check of the
    user's code fills in."""
    if not isinstance(tree, dict):
        return tree
    return {
        key: json.loads(value or "{}") if key == "arguments" else _readable(value)
        for key, value in tree.items()
        if (key, value) != ("described", "")
    }
