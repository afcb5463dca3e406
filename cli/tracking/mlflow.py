"""A job for MLflow: one run, written by MLflow's own client. Needs the package mlflow-skinny.

The run is in the tracking server or store that MLFLOW_TRACKING_URI names, else in a file store in
the directory. The job's folder has how far the run is. If a writer ended amid writing, the next one
asks the run for the newest step of each metric. So no number is written twice; MLflow reads the
whole run for that. A run that a kill made unreadable is written from the beginning.
"""

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.exceptions import MlflowException

from oobleck.cli.tracking.track import (
    Item,
    Written,
    evaluation_numbers,
    event_text,
    open_locked,
    step_numbers,
)
from oobleck.host.command import FAILED, CommandFailed

#: Name of the store in the directory that all jobs share.
STORE = "mlflow"
_EVENTS = "events.txt"
#: Tag with the job's id.
_JOB = "oobleck.job"
#: Errors for a missing run, and for a deleted one.
_GONE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
#: Events in a run's description, and the characters of each; MLflow takes 8000 in all.
_DESCRIBED, _LONGEST_LINE = 20, 380
#: Numbers in one call, and numbers that wait to be written together.
_MOST_NUMBERS, _MOST_WAITING = 1000, 10_000
_SETTINGS = {
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",  # MLflow would report its use to its makers otherwise
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_ENDS = {"succeeded": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
#: Characters that MLflow accepts in no metric's name.
_UNNAMED = re.compile(r"[^\w.\- ]")
_LONGEST_NAME = 60
#: Digits of the hash that a changed name gets.
_DIGITS = 8


class _Position(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that the run has. `begun`: it may have more, since a writer was about to write."""

    run: str = ""
    step: int = 0
    evaluation: int = 0
    begun: bool = False


class MLflow:
    def __init__(self, folder: Path, job_id: str) -> None:
        """Open the run of `job_id`, or begin one. Raises CommandFailed, OSError."""
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        store = os.environ.get("MLFLOW_TRACKING_URI") or (folder / STORE).absolute().as_uri()
        self.written = Written()
        self._name = job_id
        self._waiting: list[Metric] = []
        #: The newest step of each metric that is in the run already.
        self._last: dict[str, int] = {}
        self._lines: list[str] = []
        self._new_lines = False
        self._end: tuple[str, int] | None = None
        self._path = folder / job_id / "mlflow.json"
        self._lock = open_locked(folder / job_id / "mlflow.lock")
        try:
            with _explained():
                self._client = MlflowClient(store)
                self._experiment = _experiment(self._client, folder, job_id.rpartition("-")[0])
                self._at = self._resume()
        except BaseException:
            self._lock.close()
            raise

    def _resume(self) -> _Position:
        """Find how far the run is; a position without a run if there is none, or none any more."""
        try:
            at = msgspec.json.decode(self._path.read_bytes(), type=_Position)
            if at.run and _remove_if_cut(self._path.parents[1] / STORE, at.run):
                return _Position()
            self._client.set_tag(at.run, _JOB, self._name)
        except (FileNotFoundError, msgspec.DecodeError):
            return _Position()
        except MlflowException as error:
            if error.error_code not in _GONE:
                raise
            return _Position()
        if at.begun:
            history = self._client.get_metric_history
            for name in self._client.get_run(at.run).data.metrics:
                self._last[name] = max(number.step for number in history(at.run, name))
        with tempfile.TemporaryDirectory() as folder, contextlib.suppress(MlflowException, OSError):
            text = Path(self._client.download_artifacts(at.run, _EVENTS, folder)).read_text()
            self._lines = text.rpartition("\n")[0].splitlines()
        event = int(self._lines[-1].partition(":")[0]) if self._lines else 0
        self.written = Written(step=at.step, evaluation=at.evaluation, event=event)
        return at

    def write(self, item: Item) -> None:
        at, record, step = self.written, item.record, item.step
        time = round(1000 * record["time"])
        if not self._at.run:
            with _explained():
                tags = {_JOB: self._name}
                run = self._client.create_run(self._experiment, time, tags, self._name)
            self._save(_Position(run=str(run.info.run_id)))
        match item.kind:
            case "step":
                self._add(time, step, step_numbers(record))
                at = Written(step=step, evaluation=at.evaluation, event=at.event)
            case "evaluation":
                self._add(time, step, evaluation_numbers(record))
                at = Written(step=at.step, evaluation=step, event=at.event)
            case "event":
                self._lines.append(f"{event_text(record)} (after step {step})")
                self._new_lines = True
                if status := _ENDS.get(record["event"]):
                    self._end = status, time
                at = Written(step=at.step, evaluation=at.evaluation, event=record["id"])
        self.written = at
        if len(self._waiting) >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        if not self._waiting and not self._new_lines:
            return
        self._save(msgspec.structs.replace(self._at, begun=True))
        with _explained():
            for begin in range(0, len(self._waiting), _MOST_NUMBERS):
                some = self._waiting[begin : begin + _MOST_NUMBERS]
                self._client.log_batch(self._at.run, metrics=some)
            if self._new_lines:
                self._describe()
        to = self.written
        self._save(_Position(run=self._at.run, step=to.step, evaluation=to.evaluation))
        self._waiting.clear()
        self._new_lines = False

    def close(self) -> None:
        self._lock.close()

    def _save(self, position: _Position) -> None:
        new = self._path.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(position))
        new.replace(self._path)
        self._at = position

    def _add(self, time: int, step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            name = _metric_name(name)
            if step > self._last.get(name, -1):
                self._waiting.append(Metric(name, number, time, step))

    def _describe(self) -> None:
        """Write how the job ended and its events; the text comes last, since it is the position."""
        lines = self._lines
        if self._end is not None:
            self._client.set_terminated(self._at.run, *self._end)
        note = "".join(f"    {line[:_LONGEST_LINE]}\n" for line in lines[-_DESCRIBED:])
        self._client.set_tag(self._at.run, "mlflow.note.content", note)
        self._client.log_text(self._at.run, "".join(f"{line}\n" for line in lines), _EVENTS)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Raise CommandFailed for MLflow's own errors."""
    try:
        yield
    except MlflowException as error:
        text = f"mlflow: {error}; look at MLFLOW_TRACKING_URI, or delete the run and start again"
        raise CommandFailed(text, FAILED) from error


def _experiment(client: MlflowClient, folder: Path, name: str) -> str:
    """Return the id of the experiment of all jobs of a name; make it if there is none."""
    with (folder / "mlflow.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may want the same one
        if (found := client.get_experiment_by_name(name)) is not None:
            return str(found.experiment_id)
        return str(client.create_experiment(name))


def _remove_if_cut(store: Path, run: str) -> bool:
    """Remove a run from the file store that MLflow cannot read, and return whether it did. MLflow
    empties a run's facts before it writes them anew, and a kill in between leaves them empty."""
    for facts in store.glob(f"*/{run}/meta.yaml"):
        if not facts.stat().st_size:
            shutil.rmtree(facts.parent)
            return True
    return False


def _metric_name(name: str) -> str:
    """Return a name that MLflow takes. A changed one gets a part of its hash behind it, so that no
    two become one."""
    parts = (_UNNAMED.sub("_", part).strip(". ") for part in name.split("/", 2))
    kept = "/".join(part[:_LONGEST_NAME] or "_" for part in parts)
    if kept == name:
        return name
    return f"{kept}-{sha256(name.encode()).hexdigest()[:_DIGITS]}"
