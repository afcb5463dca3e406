"""`oobleck init`: a job file to begin with, and the module that it names.

What it writes lies in cli/templates, as a user gets it.
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
    """Files to write, each a file of cli/templates, by name in the user's folder."""

    files: dict[str, str]
    #: What the user has to do before the job can be submitted; {folder}: where the files are.
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
    """Write a job file to begin with into DIR (here, by default), and the module that it names.

    Nothing that is there is written over.
    """
    chosen = TEMPLATES[template]
    sources = resources.files("oobleck.cli") / "templates"
    texts = {folder / name: (sources / file).read_text() for name, file in chosen.files.items()}
    for path in texts:
        if path.exists() or path.is_symlink():
            raise CommandFailed(
                f"{path} is there already; move it, or name another DIR", options.USAGE
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
