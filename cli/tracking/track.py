"""`oobleck track`: a job's metrics and events for TensorBoard and others, as they arrive."""

import importlib
from pathlib import Path
from typing import Protocol

import click

from oobleck.cli.client import MasterClient
from oobleck.cli.options import job_argument, master_option
from oobleck.cli.tracking.feed import Item, Written, claim, feed
from oobleck.host.command import FAILED, CommandFailed
from oobleck.host.ipc.endpoint import Endpoint

#: Module and class of each tracker.
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
    """Writer of one job for one program, which finds its position in its own files."""

    def __init__(self, folder: Path, job_id: str) -> None:
        """Open or make the files. Raise CommandFailed or OSError; so do the other methods."""

    @property
    def written(self) -> Written: ...

    def write(self, item: Item) -> None: ...

    def flush(self) -> None:
        """Write everything to the files that the program reads."""

    def close(self) -> None: ...


@click.command(epilog=_EPILOG)
@job_argument()
@click.option(
    "--to",
    "name",
    required=True,
    type=click.Choice(list(TRACKERS)),
    help="The program to write for.",
)
@click.option(
    "--directory",
    required=True,
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of the files, which are in a folder named by the job's id.",
)
@master_option
def track(job_id: str, name: str, directory: Path, master: Endpoint) -> None:
    """Write the results of JOB's steps and evaluations, and its events, for another program.

    It runs until the job ends. However it ends, it may be restarted with the same directory: it
    continues after the last record, and writes each step exactly once.
    """
    made = _load(name)
    with MasterClient(master) as connection:
        job = connection.job(job_id)  # before any file is made for an unknown job
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
            text = (
                f"--directory {directory}: {error.strerror or error}; name one that can be written"
            )
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
