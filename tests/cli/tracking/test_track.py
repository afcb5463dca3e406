"""`oobleck track`: what TensorBoard's own reader finds of a job, whatever died meanwhile."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from oobleck.cli.tracking.tensorboard import FILE, TensorBoard
from oobleck.cli.tracking.track import Item, Written, claim, evaluation_numbers
from oobleck.host.command import CommandFailed
from support.commands import end, refused, run, start_agent, start_master
from support.waiting import until


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
    step(1),
    step(2, None),
    Item("event", {"id": 1, "time": 1002.5, "event": "submitted"}, 2),
    step(3),
    Item("evaluation", {"step": 3, "loss": 0.25, "perplexity": 1.28, "time": 1003.5}, 3),
    Item("event", {"id": 2, "time": 1004.5, "event": "failed", "reason": "the fans"}, 3),
]


def found(folder: Path) -> EventAccumulator:
    """As TensorBoard reads it."""
    read = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    read.Reload()
    return read


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found(folder).Scalars(tag)]


def texts(folder: Path) -> list[tuple[int, str]]:
    events = found(folder).Tensors("events")
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in events]


def write(folder: Path, items: list[Item]) -> None:
    """Those that are not there yet, by another process's end."""
    tracker = TensorBoard(folder, "demo-1")
    for item in items:
        at = tracker.written
        behind = {
            "step": item.record.get("step", 0) > at.step,
            "evaluation": item.record.get("step", 0) > at.evaluation,
            "event": item.record.get("id", 0) > at.event,
        }
        if behind[item.kind]:
            tracker.write(item)
    tracker.flush()
    tracker.close()


def test_what_tensorboard_reads(tmp_path: Path) -> None:
    write(tmp_path, ITEMS)
    folder = tmp_path / "demo-1"
    assert scalars(folder, "train/loss") == [(1, 0.5), (3, 0.5)]
    assert [at for at, _ in scalars(folder, "train/tokens")] == [1, 2, 3]
    assert scalars(folder, "evaluation/loss") == [(3, 0.25)]
    assert texts(folder) == [(2, "1: submitted"), (3, "2: failed: the fans")]


def test_a_file_that_was_cut_anywhere_becomes_the_same(tmp_path: Path) -> None:
    write(tmp_path, ITEMS)
    path = tmp_path / "demo-1" / FILE
    whole = path.read_bytes()
    # At any byte; or with an end that the disk has room for and no more.
    for torn in (*(whole[:length] for length in range(len(whole))), whole + b"\0" * 64):
        path.write_bytes(torn)
        write(tmp_path, ITEMS)
        assert path.read_bytes() == whole, len(torn)
    tracker = TensorBoard(tmp_path, "demo-1")
    assert tracker.written == Written(step=3, evaluation=3, event=2)
    tracker.close()


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, "demo-1")
    with pytest.raises(CommandFailed, match="is being written by another process"):
        TensorBoard(tmp_path, "demo-1")
    tracker.close()


def test_a_folder_is_of_one_clusters_job(tmp_path: Path) -> None:
    for _ in range(2):
        claim(tmp_path / "demo-1", 1000.25)
    with pytest.raises(
        CommandFailed, match=r"demo-1 belongs to another cluster's job with that id; name"
    ):
        claim(tmp_path / "demo-1", 1000.5)


def test_numbers_of_an_evaluation_have_names() -> None:
    told = {"step": 3, "samples": 8, "loss": 0.5, "perplexity": None, "metrics": {"right": 0.75}}
    assert evaluation_numbers(told) == {"evaluation/loss": 0.5, "evaluation/metrics/right": 0.75}


class Track:
    """A running `oobleck track`."""

    def __init__(self, master: str, folder: Path, log: Path) -> None:
        self._arguments = ("track", "demo-1", "--to", "tensorboard", "--directory", str(folder))
        self._master, self._log, self.path = master, log, folder / "demo-1" / FILE
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "oobleck.cli.main", *self._arguments]
        with self._log.open("a") as log:
            self.process = subprocess.Popen([*command, "--master", self._master], stderr=log)

    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def test_each_step_is_there_once_whatever_dies(
    tmp_path: Path, job_file: Callable[..., Path]
) -> None:
    """The command amid writing, several times, and the master amid that."""
    state, runs = tmp_path / "state", tmp_path / "runs"
    master, address = start_master(state)
    agent = start_agent(address, "n1")
    track = None
    try:
        sets = ("--set", "training.steps=100000")
        path = str(job_file(extra="fault_tolerance: 0\n"))
        assert run("submit", path, *sets, "--master", address).returncode == 0
        track = Track(address, runs, tmp_path / "log")
        for number in range(3):
            before = track.size()
            until(lambda before=before: track.size() > before + 2000, "more in the file")
            track.kill()
            if number == 1:
                master.kill()
                end(master)
                master, _ = start_master(state, address)
            track.start()
        before = track.size()
        until(lambda: track.size() > before + 2000, "more in the file")
        assert run("cancel", "demo-1", "--master", address).returncode == 0
        assert track.process.wait(120) == 0, (tmp_path / "log").read_text()
        track.start()  # of a job that has ended; what came after its end is there
        assert track.process.wait(120) == 0
        check(state / "jobs/demo-1", runs / "demo-1")
    finally:
        if track is not None:
            track.kill()
        end(agent)
        end(master)


def check(job: Path, folder: Path) -> None:
    """`folder` has what the master had when the job had ended, or more."""
    records = read(job / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    found = scalars(folder, "train/loss")
    told = [(r["step"], pytest.approx(r["loss"])) for r in records]
    assert found == told[: len(found)]
    assert len(found) > 10
    events = read(job / "events.jsonl")
    told = texts(folder)
    assert [text.split(": ")[0] for _, text in told] == [str(event["id"]) for event in events]
    assert told[0] == (0, "1: submitted")
    assert told[-1][1] == f"{len(events)}: cancelled"
    assert [at for at, _ in told] == sorted(at for at, _ in told)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_refusals(master: str, tmp_path: Path) -> None:
    asked = ("track", "nope-1", "--to", "tensorboard", "--master", master, "--directory")
    assert "no job 'nope-1'" in refused(run(*asked, str(tmp_path / "x")), 3)
    assert not (tmp_path / "x").exists()
    refused(run("track", "nope-1", "--to", "abacus", "--directory", "x", "--master", master), 2)


def test_a_library_that_is_missing_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, master: str
) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/__init__.py").write_text(
        "raise ModuleNotFoundError('no', name='tensorboard')"
    )
    asked = ("track", "x-1", "--to", "tensorboard", "--directory", "x", "--master", master)
    line = refused(run(*asked, environment={"PYTHONPATH": str(tmp_path)}), 1)
    assert line.endswith("run: pip install tensorboard")
