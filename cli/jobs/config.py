"""`oobleck config`: the form of job files. No master is asked, and no file that a job names is
looked at, but for the config of a model that gives its size."""

import json
from pathlib import Path
from typing import Any

import click

from oobleck.cli import options
from oobleck.cli.jobs.job_file import read_form
from oobleck.host.command import CommandFailed
from oobleck.host.display import one_line

_EPILOG = """\b
Examples:
  oobleck config schema > oobleck.schema.json
  # then, as the first line of a job file, for editors with a YAML language server:
  # yaml-language-server: $schema=oobleck.schema.json"""

_PATH = click.Path(dir_okay=False, path_type=Path)


@click.group(epilog=_EPILOG)
def config() -> None:
    """Show, check and describe job files."""


@config.command()
def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    from oobleck.core.job.schema import job_schema

    click.echo(json.dumps(job_schema(), indent=2))


@config.command()
@click.argument("job_file", metavar="JOB.yaml", type=_PATH)
@options.set_option
@click.option(
    "-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", show_default=True
)
def show(job_file: Path, overrides: tuple[str, ...], output: str) -> None:
    """Print JOB.yaml (- for standard input) with every key written out: defaults, and all numbers
    of a model that is named by a preset or a config. It is a job file again, for the same job."""
    from oobleck.cli.output.form import document
    from oobleck.core.job.file import format_job

    tree = _readable(json.loads(format_job(read_form(job_file, overrides))))
    click.echo(document(tree, "json" if output == "json" else "yaml"))


@config.command(
    epilog="Exit codes: 0 every file has the form of a job, 2 one has not, with a line for each on "
    "standard error."
)
@click.argument("job_files", metavar="JOB.yaml...", nargs=-1, required=True, type=_PATH)
@options.set_option
def validate(job_files: tuple[Path, ...], overrides: tuple[str, ...]) -> int:
    """Check that each JOB.yaml (- for standard input) is a job file: its keys, and what they hold.

    Data, weights and code are not looked for; 'oobleck check' does that.
    """
    code = 0
    for path in job_files:
        try:
            read_form(path, overrides)
        except CommandFailed as error:
            click.echo(f"oobleck: {one_line(error.format_message())}", err=True)
            code = options.USAGE
        else:
            click.echo(f"{path}: ok" if str(path) != "-" else "ok")
    return code


def _readable(tree: Any) -> Any:
    """Arguments as the mapping that their text stands for; without what only a look at the user's
    code fills in."""
    if not isinstance(tree, dict):
        return tree
    return {
        key: json.loads(value or "{}") if key == "arguments" else _readable(value)
        for key, value in tree.items()
        if (key, value) != ("described", "")
    }
