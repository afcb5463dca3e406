"""`oobleck track`: a job's metrics and events for TensorBoard and others, as they arrive.

Owns the records as all trackers get them, their numbers and text, and the folder of copies.
"""

import contextlib
import fcntl
import importlib
import json
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import click

from oobleck.cli.client import MasterClient
from oobleck.cli.jobs.follow import follow_events, follow_metrics, ignore, merged, warn
from oobleck.cli.options import job_argument, master_option
from oobleck.cli.output.events import sentence
from oobleck.host.command import FAILED, CommandFailed
from oobleck.host.ipc.endpoint import Endpoint

# ---- numbers by name, and a line of text


#: Keys that identify an evaluation; they are not results.
_OF_NO_INTEREST = ("step", "time", "generation", "samples", "seconds")


def step_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the step's numbers by name, without those that are not finite."""
    found = {
        "train/loss": record["loss"],
        "train/grad_norm": record["grad_norm"],
        "train/tokens": record["tokens"],
        "train/step_seconds": record["step_seconds"],
        "train/generation": record["generation"],
        "train/skipped_steps": record.get("skipped_steps", 0),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def evaluation_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    results = {key: value for key, value in record.items() if key not in _OF_NO_INTEREST}
    return dict(_numbers("evaluation", results))


def _numbers(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        match value:
            case Mapping():
                yield from _numbers(f"{prefix}/{key}", value)
            case int() | float() if math.isfinite(value):
                yield f"{prefix}/{key}", float(value)
            case _:
                pass  # not a number, so nothing to draw


def event_text(record: Mapping[str, Any]) -> str:
    """Format an event as a line that begins with its number among the job's events."""
    return f"{record['id']}: {sentence(dict(record))}"


# ---- folder of one job's copies, each of which one process writes at a time


#: File in the folder with the job's time of submission, Unix time.
_OWNER = "submitted_at"


def claim(folder: Path, submitted_at: float) -> None:
    """Mark the folder as that of the job submitted at this time.

    Two clusters may each have a job of one id; the copy of one must not continue the other's. Raise
    CommandFailed or OSError.
    """
    path, own = folder / _OWNER, repr(submitted_at)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError), path.open("x") as file:
        file.write(own)
    if path.read_text() != own:
        text = f"{folder} belongs to another cluster's job with that id; name another --directory"
        raise CommandFailed(text, FAILED)


def open_locked(path: Path) -> BinaryIO:
    """Open a file to read and append, locked against other processes. Make its folder. Raise
    CommandFailed or OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+b")  # noqa: SIM115  # for as long as it is locked
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        text = f"{path} is being written by another process; end that, or name another --directory"
        raise CommandFailed(text, FAILED) from error
    return file


# ---- stream of steps, evaluations and events, in order and exactly once, until the job ends


Kind = Literal["step", "evaluation", "event"]
#: Number of steps that are searched for the one before an event.
_RECENT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Position of a copy in a job's records."""

    step: int = 0
    #: Step of the last evaluation, and id of the last event.
    evaluation: int = 0
    event: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """Line of metrics.jsonl, evaluations.jsonl or events.jsonl."""

    kind: Kind
    record: dict[str, Any]
    #: Step that it belongs to; for an event, the last one before it.
    step: int


def feed(
    master: MasterClient, job_id: str, since: Written, tell: Callable[[str], None]
) -> Iterator[Item | None]:
    """Yield the items that are not written yet; None when no more are available now. `tell`:
    reports that the master is away, or back. Raise CommandFailed."""
    due = master.job(job_id).recorded_step
    # Read before any step, so that old steps do not overtake them.
    early = [json.loads(event.json) for event in master.events(job_id, follow=False)]
    known = early[-1]["id"] if early else 0
    early = [record for record in early if record["id"] > since.event]
    steps = follow_metrics(master, job_id, from_step=since.step + 1, tell=tell)
    evaluations = follow_metrics(
        master, job_id, from_step=since.evaluation + 1, evaluations=True, tell=ignore
    )
    events = follow_events(master, job_id, answered=True, tell=ignore)
    streams: dict[Kind, Iterator[dict[str, Any]]] = {
        "step": map(json.loads, steps),
        "evaluation": map(json.loads, evaluations),
        "event": (json.loads(event.json) for event in events),
    }
    are_steps_due = True
    #: The last steps, with their times.
    recent = deque([(0.0, since.step)], maxlen=_RECENT)

    def event_item(record: dict[str, Any]) -> Item:
        before = bisect_right(recent, record["time"], key=lambda step: step[0])
        return Item("event", record, recent[max(0, before - 1)][1])

    for found in merged(streams):
        match found:
            case None:
                # Old steps arrive as fast as they are read, and events are inserted between them.
                if recent[-1][1] >= due or not are_steps_due:
                    yield from map(event_item, early)
                    early = []
                yield None
            case ("step", None):
                are_steps_due = False
            case (_, None):
                pass
            case ("event", record):
                if record["id"] > max(known, since.event):
                    early.append(record)
            case ("step", record):
                while early and early[0]["time"] < record["time"]:
                    yield event_item(early.pop(0))
                recent.append((record["time"], record["step"]))
                yield Item("step", record, record["step"])
            case (kind, record):
                yield Item(kind, record, record["step"])
    yield from map(event_item, early)


# ---- the command


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
                for item in feed(connection, job_id, tracker.written, warn):
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
