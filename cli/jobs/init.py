"""`oobleck init`: a job file to start from, and the module that it names.

The files are in cli/templates as users get them.
"""

import shlex
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import click

from oobleck.cli import options
from oobleck.host.command import CommandFailed


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
            raise CommandFailed(
                f"{path} exists already; move it, or name another DIR", options.USAGE
            )
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            with path.open("x") as file:
                file.write(text)
    except OSError as error:
        why = error.strerror or str(error)
        raise CommandFailed(
            f"cannot write {path}: {why}; name another DIR", options.USAGE
        ) from error
    for path in texts:
        click.echo(f"wrote {path}")
    click.echo("\nNext:")
    job = shlex.quote(str(folder / "job.yaml"))
    for line in chosen.before:
        click.echo(f"  {line.format(folder=shlex.quote(str(folder)))}")
    click.echo(f"  oobleck check {job}")
    click.echo("  oobleck local --nodes 4    # a cluster on this machine, in a terminal of its own")
    click.echo(f"  oobleck submit {job} --follow")
