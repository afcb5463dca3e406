"""`oobleck track`: a job's metrics and events for TensorBoard and others, as they come."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click

from oobleck.cli.completion import job_argument
from oobleck.cli.options import FAILED, master_option
from oobleck.host.command import CommandFailed
from oobleck.host.ipc.endpoint import Endpoint

if TYPE_CHECKING:
    from oobleck.cli.tracking.feed import Item, Written

#: Module and class of each.
TRACKERS = {
    "tensorboard": "oobleck.cli.tracking.tensorboard:TensorBoard",
    "wandb": "oobleck.cli.tracking.wandb:WandB",
    "mlflow": "oobleck.cli.tracking.mlflow:MLflow",
}

_EPILOG = """\b
Examples:
  oobleck track demo-1 --to tensorboard --directory runs &
  tensorboard --logdir runs
  oobleck track demo-1 --to wandb --directory runs
  wandb sync runs/demo-1/wandb/offline-run-*
  oobleck track demo-1 --to mlflow --directory runs
  MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri runs/mlflow

Exit codes: see 'oobleck --help'."""


class Tracker(Protocol):
    """Writes one job for one program. What it has written tells it how far it is."""

    def __init__(self, folder: Path, job_id: str) -> None:
        """Raises CommandFailed, OSError; so do the others."""

    @property
    def written(self) -> "Written": ...

    def write(self, item: "Item") -> None: ...

    def flush(self) -> None:
        """Have all that was written where the program looks."""

    def close(self) -> None: ...


@click.command(epilog=_EPILOG)
@job_argument()
@click.option(
    "--to",
    "name",
    required=True,
    type=click.Choice(list(TRACKERS)),
    help="The program that it is for.",
)
@click.option(
    "--directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where its files go, in a folder with the job's id for a name.",
)
@master_option
def track(job_id: str, name: str, directory: Path, master: Endpoint) -> None:
    """Write what JOB's steps and evaluations gave, and what happened to it, for another program.

    Goes on until the job ends. However this command ends, it may be started again with the same
    directory: it goes on behind what is written, and writes each step exactly once.
    """
    from oobleck.cli.client import MasterClient
    from oobleck.cli.tracking.feed import feed
    from oobleck.cli.tracking.folder import claim

    made = _load(name)
    with MasterClient(master) as connection:
        job = connection.job(job_id)  # before anything is made for one that there is not
        try:
            claim(directory / job_id, job.submitted_at)
            tracker = made(directory, job_id)
            try:
                for item in feed(connection, job_id, tracker.written, _warn):
                    if item is not None:
                        tracker.write(item)
                    else:
                        tracker.flush()
                tracker.flush()
            finally:
                tracker.close()
        except OSError as error:
            text = f"--directory {directory}: {error.strerror or error}; name one that takes files"
            raise CommandFailed(text, FAILED) from error


def _load(name: str) -> type[Tracker]:
    module, _, attribute = TRACKERS[name].partition(":")
    try:
        found: type[Tracker] = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != name:
            raise
        text = f"{name} is not installed here; run: pip install {name}"
        raise CommandFailed(text, FAILED) from error
    return found


def _warn(line: str) -> None:
    click.echo(f"oobleck: {line}", err=True)
