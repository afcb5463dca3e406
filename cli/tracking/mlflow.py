"""Copy of a job for MLflow: one run in its file store (`mlruns`), which only grows.

The layout of that store has been stable since MLflow 1 and is frozen, so it is written without the
package mlflow; MLflow's own calls scan the whole run for each number.

The files get their lines first, then `oobleck.json` in the run's folder records the length of each.
However the writing process ended, the next one truncates every file to that length and continues.
If a file is shorter, as after a power loss, the run is written from the beginning: the master has
all records.
"""

import hashlib
import os
import re
import shutil
from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import msgspec
import yaml

from oobleck.cli.tracking import values
from oobleck.cli.tracking.feed import Item, Written
from oobleck.cli.tracking.folder import open_locked

#: The store, in the directory that all jobs share.
STORE = "mlflow"
_EVENTS = "artifacts/events.txt"
#: Name of a file that will replace another.
_NEW = ".new"
#: Number of the last events in a run's description; the file has all of them.
_TOLD = 20
#: Most lines that wait to be written together.
_MOST_WAITING = 10_000
#: MLflow's numbers for the states of a run.
_RUNNING = 1
_ENDS = {"succeeded": 3, "failed": 4, "cancelled": 5}
#: Characters that MLflow forbids in names of metrics.
_UNNAMED = re.compile(r"[^\w.\- ]")
_LONGEST_NAME = 60
#: Digits of a name's hash, if its file needs another name.
_DIGITS = 8


class _Progress(msgspec.Struct, kw_only=True):
    """Position of a copy, kept in the run's folder."""

    step: int = 0
    evaluation: int = 0
    event: int = 0
    status: int = _RUNNING
    #: In milliseconds; 0: unknown yet.
    start: int = 0
    end: int = 0
    #: Length of each file.
    sizes: dict[str, int] = msgspec.field(default_factory=dict)


class MLflow:
    def __init__(self, folder: Path, job_id: str) -> None:
        """Open or make the run. Raise CommandFailed or OSError."""
        self._lock = open_locked(folder / job_id / "mlflow.lock")
        self._name = job_id
        # Hashed, because MLflow's ids allow no full stops, and jobs' ids do.
        self._id = hashlib.sha256(job_id.encode()).hexdigest()[:32]
        self._experiment = _make_experiment(folder / STORE, job_id.rpartition("-")[0])
        self._run = self._experiment / self._id
        self._progress = _recover(self._run)
        self._waiting: dict[str, list[str]] = defaultdict(list)
        self._count = 0
        self._made = False
        self._last = deque(_lines(self._run / _EVENTS), maxlen=_TOLD)

    @property
    def written(self) -> Written:
        at = self._progress
        return Written(step=at.step, evaluation=at.evaluation, event=at.event)

    def write(self, item: Item) -> None:
        record, progress = item.record, self._progress
        time = round(1000 * record["time"])
        progress.start = progress.start or time
        match item.kind:
            case "step":
                self._metrics(time, record["step"], values.of_step(record))
                progress.step = record["step"]
            case "evaluation":
                self._metrics(time, record["step"], values.of_evaluation(record))
                progress.evaluation = record["step"]
            case "event":
                self._event(time, item)
        if self._count >= _MOST_WAITING:
            self.flush()

    def flush(self) -> None:
        if not self._waiting and self._made:
            return
        progress = self._progress
        if not self._made:
            for name in ("metrics", "params", "tags", "artifacts"):
                (self._run / name).mkdir(parents=True, exist_ok=True)
        for name, lines in self._waiting.items():
            path = self._run / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write("".join(lines).encode())
                progress.sizes[name] = file.tell()
        self._replace("oobleck.json", msgspec.json.encode(progress))
        if _EVENTS in self._waiting or not self._made:
            self._describe()
        self._waiting.clear()
        self._count, self._made = 0, True

    def close(self) -> None:
        self._lock.close()

    def _metrics(self, time: int, step: int, numbers: dict[str, float]) -> None:
        for name, number in numbers.items():
            self._add(f"metrics/{_file_name(name)}", f"{time} {number} {step}\n")

    def _event(self, time: int, item: Item) -> None:
        line = f"{values.of_event(item.record)} (after step {item.step})"
        self._add(_EVENTS, line + "\n")
        self._last.append(line)
        self._progress.event = item.record["id"]
        if status := _ENDS.get(item.record["event"]):
            self._progress.status, self._progress.end = status, time

    def _add(self, name: str, line: str) -> None:
        self._waiting[name].append(line)
        self._count += 1

    def _describe(self) -> None:
        """Write the description that MLflow shows beside the numbers."""
        progress = self._progress
        self._replace("tags/mlflow.runName", self._name.encode())
        note = "".join(f"    {line}\n" for line in self._last)
        self._replace("tags/mlflow.note.content", note.encode())
        self._replace(
            "meta.yaml",
            _yaml(
                {
                    "artifact_uri": (self._run / "artifacts").absolute().as_uri(),
                    "end_time": progress.end or None,
                    "entry_point_name": "",
                    "experiment_id": self._experiment.name,
                    "lifecycle_stage": "active",
                    "run_id": self._id,
                    "run_name": self._name,
                    "run_uuid": self._id,
                    "source_name": "",
                    "source_type": 4,
                    "source_version": "",
                    "start_time": progress.start,
                    "status": progress.status,
                    "tags": [],
                    "user_id": "",
                }
            ),
        )

    def _replace(self, name: str, content: bytes) -> None:
        # MLflow takes every file beside a tag for a tag, including one left by a killed process.
        _replace(self._run / name, content, self._run / _NEW)


def _make_experiment(store: Path, name: str) -> Path:
    """Make the experiment's folder, one for all jobs of a name, and return it.

    Other processes may make the same one meanwhile.
    """
    number = str(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7]))
    folder = store / number
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "meta.yaml").exists():
        about = {
            "artifact_location": folder.absolute().as_uri(),
            "creation_time": 0,
            "experiment_id": number,
            "last_update_time": 0,
            "lifecycle_stage": "active",
            "name": name,
        }
        _replace(folder / "meta.yaml", _yaml(about), folder / f"{_NEW}.{os.getpid()}")
    return folder


def _recover(run: Path) -> _Progress:
    """Truncate each file to its recorded length, and return the recorded position.

    If one is shorter, or the record is missing or damaged, delete the run and return the beginning.
    """
    try:
        progress = msgspec.json.decode((run / "oobleck.json").read_bytes(), type=_Progress)
        if all((run / name).stat().st_size >= size for name, size in progress.sizes.items()):
            for path in [*run.glob("metrics/**/*"), run / _EVENTS]:
                if path.is_file():
                    os.truncate(path, progress.sizes.get(str(path.relative_to(run)), 0))
            return progress
    except (FileNotFoundError, msgspec.DecodeError):
        pass
    shutil.rmtree(run, ignore_errors=True)
    return _Progress()


def _file_name(metric: str) -> str:
    """Return the name of a metric's file, which is always inside the folder.

    A name that must be changed gets a part of its hash, so that no two metrics share a file.
    """
    parts = (_UNNAMED.sub("_", part).strip(". ") for part in metric.split("/", 2))
    name = "/".join(part[:_LONGEST_NAME] or "_" for part in parts)
    if name == metric:
        return name
    return f"{name}-{hashlib.sha256(metric.encode()).hexdigest()[:_DIGITS]}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _yaml(content: dict[str, Any]) -> bytes:
    return yaml.safe_dump(content).encode()


def _replace(path: Path, content: bytes, new: Path) -> None:
    """Replace the file atomically, by way of the file `new`.

    A concurrent reader finds the old or the new content.
    """
    new.write_bytes(content)
    new.replace(path)
