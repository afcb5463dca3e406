"""`oobleck config`: the form of job files.

No master is asked. No file that a job names is read, except for a config that gives a model's size.
"""

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
    """Print JOB.yaml (- for standard input) with every key: defaults, and all sizes of a model that
    a preset or config names. The result is a job file for the same job.
    """
    from oobleck.cli.output.form import document
    from oobleck.core.job.file import format_job

    tree = _readable(json.loads(format_job(read_form(job_file, overrides))))
    click.echo(document(tree, "json" if output == "json" else "yaml"))


@config.command(
    epilog="Exit codes: 0 every file is a valid job file, 2 some are not, with a line for each on "
    "standard error."
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
            code = options.USAGE
        else:
            click.echo(f"{path}: ok" if str(path) != "-" else "ok")
    return code


def _readable(tree: Any) -> Any:
    """Return the job's tree with arguments as mappings.

    It omits keys that only a check of the user's code fills in.
    """
    if not isinstance(tree, dict):
        return tree
    return {
        key: json.loads(value or "{}") if key == "arguments" else _readable(value)
        for key, value in tree.items()
        if (key, value) != ("described", "")
    }
