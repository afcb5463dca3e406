"""`oobleck track --to mlflow`: the run that MLflow reads, wherever writing ended.

MLflow is loaded where it is used: that takes two seconds of a core, of each process that collects
these tests.
"""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest

from oobleck.cli.tracking.track import Item, Written
from oobleck.host.command import CommandFailed

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.store.tracking.file_store import FileStore

    from oobleck.cli.tracking.mlflow import MLflow


def step(number: int, loss: float | None = 0.5) -> Item:
    record = {
        "step": number,
        "loss": loss,
        "grad_norm": loss,
        "tokens": 64,
        "step_seconds": 0.1,
        "generation": 1,
        "time": 1000.0 + number,
    }
    return Item("step", record, number)


ITEMS = [
    Item("event", {"id": 1, "time": 1000.5, "event": "submitted"}, 0),
    step(1),
    step(2, None),
    step(3),
    Item("evaluation", {"step": 3, "loss": 0.25, "metrics": {"../../r!": 0.5}, "time": 1003.5}, 3),
    Item("event", {"id": 2, "time": 1004.5, "event": "failed", "reason": "the fans"}, 3),
]


@pytest.fixture(autouse=True)
def own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def behind(items: list[Item], at: Written) -> Iterator[Item]:
    for item in items:
        mark = item.record["id"] if item.kind == "event" else item.record["step"]
        if mark > getattr(at, item.kind):
            yield item


def writer(folder: Path) -> "MLflow":
    from oobleck.cli.tracking.mlflow import MLflow

    return MLflow(folder, "a.b-1")


def write(folder: Path, items: list[Item]) -> None:
    tracker = writer(folder)
    try:
        for item in behind(items, tracker.written):
            tracker.write(item)
            tracker.flush()
        tracker.flush()
    finally:
        tracker.close()


def found(folder: Path) -> "tuple[FileStore, Run]":
    """The one run that there is, as MLflow reads it."""
    from mlflow.entities import ViewType
    from mlflow.store.tracking.file_store import FileStore

    store = FileStore(str(folder / "mlflow"))
    (experiment,) = store.search_experiments(filter_string="name = 'a.b'")
    (run,) = store.search_runs([experiment.experiment_id], "", ViewType.ACTIVE_ONLY)
    return store, run


def history(folder: Path, name: str) -> list[tuple[int, float]]:
    store, run = found(folder)
    return [(told.step, told.value) for told in store.get_metric_history(run.info.run_id, name)]


def test_mlflow_reads_the_run(tmp_path: Path) -> None:
    write(tmp_path, ITEMS)
    assert history(tmp_path, "train/loss") == [(1, 0.5), (3, 0.5)]
    assert [at for at, _ in history(tmp_path, "train/tokens")] == [1, 2, 3]
    assert history(tmp_path, "evaluation/loss") == [(3, 0.25)]
    # A name that is made to lead out of the folder stays in it.
    assert history(tmp_path, "evaluation/metrics/_.._r_-8ab41211") == [(3, 0.5)]
    _, run = found(tmp_path)
    assert (run.info.run_name, run.info.status) == ("a.b-1", "FAILED")
    assert (run.info.start_time, run.info.end_time) == (1000500, 1004500)
    told = ["1: submitted (after step 0)", "2: failed: the fans (after step 3)"]
    assert [line.strip() for line in run.data.tags["mlflow.note.content"].splitlines()] == told
    artifacts = Path(urlsplit(run.info.artifact_uri).path)
    assert (artifacts / "events.txt").read_text().splitlines() == told


def test_no_two_metrics_become_one(tmp_path: Path) -> None:
    names = {"a b!": 1.0, "a b?": 2.0, "a b_": 3.0, "x" * 60 + "1": 4.0, "x" * 60 + "2": 5.0}
    record = {"step": 3, "metrics": names, "time": 1003.5}
    write(tmp_path, [step(3), Item("evaluation", record, 3)])
    _, run = found(tmp_path)
    told = {name: value for name, value in run.data.metrics.items() if "/metrics/" in name}
    assert sorted(told.values()) == sorted(names.values())
    assert told["evaluation/metrics/a b_"] == 3.0, "a name that will do stays"


def whole(folder: Path) -> dict[str, Any]:
    """All that a run has, but the folder."""
    store, run = found(folder)
    numbers = {
        name: [(one.timestamp, one.step, one.value) for one in told]
        for name in run.data.metrics
        if (told := store.get_metric_history(run.info.run_id, name))
    }
    events = (Path(urlsplit(run.info.artifact_uri).path) / "events.txt").read_text()
    info = run.info.run_name, run.info.status, run.info.start_time, run.info.end_time
    return {**numbers, "events": events, "info": info, "note": run.data.tags["mlflow.note.content"]}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_writer_that_dies_between_any_two_calls_and_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """`steps`: of the client's calls, or of the store's lines within them."""
    from mlflow import MlflowClient
    from mlflow.store.tracking import file_store

    write(tmp_path / "whole", ITEMS)
    left = 10**6

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def dies(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise InterruptedError
            return call(*arguments, **options)

        return dies

    if steps == 1:
        for name in ("create_run", "log_batch", "log_text", "set_tag", "set_terminated"):
            monkeypatch.setattr(MlflowClient, name, dying(getattr(MlflowClient, name)))
    else:
        monkeypatch.setattr(file_store, "append_to", dying(file_store.append_to))
    for calls in count():
        left, torn = calls, tmp_path / str(calls)
        try:
            write(torn, ITEMS)
            break
        except (InterruptedError, CommandFailed):
            left = 10**6
            write(torn, ITEMS)
        assert whole(torn) == whole(tmp_path / "whole"), calls
    assert calls >= 10


def test_a_run_whose_facts_a_kill_left_empty_is_written_from_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, ITEMS)
    before = whole(tmp_path)
    (facts,) = tmp_path.glob("mlflow/*/*/meta.yaml")
    facts.write_text("")
    write(tmp_path, ITEMS)
    assert whole(tmp_path) == before


def test_a_run_that_was_deleted_is_written_from_the_beginning(tmp_path: Path) -> None:
    write(tmp_path, ITEMS)
    before = whole(tmp_path)
    store, run = found(tmp_path)
    store.delete_run(run.info.run_id)
    write(tmp_path, ITEMS)
    assert whole(tmp_path) == before


def test_the_store_that_the_environment_names_has_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "named" / "mlflow").as_uri())
    write(tmp_path / "directory", ITEMS)
    assert history(tmp_path / "named", "train/loss") == [(1, 0.5), (3, 0.5)]
    assert not (tmp_path / "directory" / "mlflow").exists()


def test_a_server_that_does_not_answer_ends_the_command_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(CommandFailed, match=r"^mlflow: .*MLFLOW_TRACKING_URI"):
        write(tmp_path, ITEMS)


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    tracker = writer(tmp_path)
    with pytest.raises(CommandFailed, match="is being written by another process"):
        writer(tmp_path)
    tracker.close()
