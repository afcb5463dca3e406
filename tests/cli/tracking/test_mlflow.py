"""`oobleck track --to mlflow`: what MLflow's own reader finds of a job, wherever writing ended."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from mlflow.entities import Run
from mlflow.store.tracking.file_store import FileStore

from oobleck.cli.tracking.feed import Item, Written
from oobleck.cli.tracking.mlflow import STORE, MLflow
from oobleck.host.command import CommandFailed


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
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


def behind(items: list[Item], at: Written) -> Iterator[Item]:
    for item in items:
        mark = item.record["id"] if item.kind == "event" else item.record["step"]
        if mark > getattr(at, item.kind):
            yield item


def write(folder: Path, items: list[Item]) -> None:
    tracker = MLflow(folder, "a.b-1")
    for item in behind(items, tracker.written):
        tracker.write(item)
        tracker.flush()
    tracker.flush()
    tracker.close()


def found(folder: Path) -> tuple[FileStore, Run]:
    """The one run that there is, as MLflow reads it."""
    store = FileStore(str(folder / STORE))
    (experiment,) = store.search_experiments(filter_string="name = 'a.b'")
    (run,) = store.search_runs([experiment.experiment_id], "", 3)
    return store, run


def history(folder: Path, name: str) -> list[tuple[int, float]]:
    store, run = found(folder)
    return [(told.step, told.value) for told in store.get_metric_history(run.info.run_id, name)]


def content(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def lines(folder: Path) -> dict[str, bytes]:
    """Without what names the folder itself."""
    return {name: text for name, text in content(folder).items() if not name.endswith("meta.yaml")}


def test_what_mlflow_reads(tmp_path: Path) -> None:
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


def test_no_two_metrics_have_one_file(tmp_path: Path) -> None:
    names = {"a b!": 1.0, "a b?": 2.0, "a b_": 3.0, "x" * 60 + "1": 4.0, "x" * 60 + "2": 5.0}
    record = {"step": 3, "metrics": names, "time": 1003.5}
    write(tmp_path, [step(3), Item("evaluation", record, 3)])
    _, run = found(tmp_path)
    told = {name: value for name, value in run.data.metrics.items() if "/metrics/" in name}
    assert sorted(told.values()) == sorted(names.values())
    assert told["evaluation/metrics/a b_"] == 3.0, "a name that will do stays"


def test_a_writer_that_dies_before_a_file_is_in_place_leaves_no_tag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaces, left = Path.replace, 0

    def dies(path: Path, target: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedError
        return replaces(path, target)

    for writes in count():
        left, torn = writes, tmp_path / str(writes)
        tracker = MLflow(torn, "a.b-1")
        monkeypatch.setattr(Path, "replace", dies)
        done = ends_whole(tracker)
        monkeypatch.setattr(Path, "replace", replaces)
        tags = {path.name for path in torn.glob(f"{STORE}/*/*/tags/*")}
        assert tags <= {"mlflow.runName", "mlflow.note.content"}
        if done:
            break
    assert writes > 5


def test_files_that_were_cut_or_written_to_become_the_same(tmp_path: Path) -> None:
    write(tmp_path, ITEMS)
    whole = content(tmp_path)
    for name in whole:
        if name.endswith(("meta.yaml", "mlflow.lock")) or "/tags/" in name:
            continue
        path = tmp_path / name
        for torn in (b"", whole[name][:-3], whole[name] + b"100"):
            path.write_bytes(torn)
            write(tmp_path, ITEMS)
            assert content(tmp_path) == whole, name


def ends_whole(tracker: MLflow) -> bool:
    try:
        for item in ITEMS:
            tracker.write(item)
            tracker.flush()
    except InterruptedError:
        return False
    finally:
        tracker.close()
    return True


def test_a_writer_that_dies_between_any_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "whole", ITEMS)
    opens, left = Path.open, 0

    def dies(path: Path, *arguments: Any, **options: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise InterruptedError
        return opens(path, *arguments, **options)

    for writes in count():
        left, torn = writes, tmp_path / str(writes)
        tracker = MLflow(torn, "a.b-1")
        monkeypatch.setattr(Path, "open", dies)
        done = ends_whole(tracker)
        monkeypatch.setattr(Path, "open", opens)
        write(torn, ITEMS)
        assert lines(torn) == lines(tmp_path / "whole")
        if done:
            break
    assert writes > 10
    assert history(torn, "train/loss") == [(1, 0.5), (3, 0.5)]


def test_a_run_has_one_writer(tmp_path: Path) -> None:
    tracker = MLflow(tmp_path, "a.b-1")
    with pytest.raises(CommandFailed, match="is being written by another process"):
        MLflow(tmp_path, "a.b-1")
    tracker.close()
