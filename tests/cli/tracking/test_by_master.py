"""The job key `track`: what the head node has of a job, whatever dies meanwhile."""

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from oobleck.cli.tracking.track import TRACKERS
from oobleck.core.job import spec
from support.commands import end, refused, run, start_agent, start_master
from support.forked import Forked
from support.waiting import until

SETS = ("--set", "training.steps=100000", "--set", "track=[mlflow]")


def writers(master: Forked | subprocess.Popen[str]) -> list[psutil.Process]:
    """The master's processes that write copies."""
    children = psutil.Process(master.pid).children()
    return [child for child in children if "track" in child.cmdline()]


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_copy_has_each_step_once_whatever_dies(
    tmp_path: Path, job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that writes, then the master; and the master is away when the job ends."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    state = tmp_path / "state"
    runs = state / "tracking"
    master, address = start_master(state)
    agent = start_agent(address, "n1")
    try:
        path = str(job_file(extra="fault_tolerance: 0\n"))
        assert run("submit", path, *SETS, "--master", address).returncode == 0

        def size() -> int:
            found = list(runs.glob("mlflow/*/*/metrics/train/loss"))
            return found[0].stat().st_size if found else 0

        def goes_on() -> None:
            before = size()
            until(lambda: size() > before + 500, "more in the copy")

        goes_on()
        for process in writers(master):
            process.send_signal(signal.SIGKILL)
        goes_on()
        before = writers(master)
        master.kill()
        end(master)
        until(lambda: not any(process.is_running() for process in before), "they end with it")
        master, _ = start_master(state, address)
        goes_on()
        assert run("cancel", "demo-1", "--master", address).returncode == 0
        master.kill()
        end(master)
        master, _ = start_master(state, address)
        until((runs / "demo-1/mlflow.done").exists, "the copy is whole")
        until(lambda: not writers(master), "nobody writes any more")
        check(state / "jobs/demo-1", runs)
    finally:
        end(agent)
        end(master)


def check(job: Path, runs: Path) -> None:
    records = read(job / "metrics.jsonl")
    told = [(record["step"], pytest.approx(record["loss"])) for record in records]
    assert len(told) > 10
    from mlflow.store.tracking.file_store import FileStore  # a second of a core

    store = FileStore(str(runs / "mlflow"))
    (experiment,) = store.search_experiments(filter_string="name = 'demo'")
    (kept,) = store.search_runs([experiment.experiment_id], "", 3)
    assert kept.info.status == "KILLED"
    history = store.get_metric_history(kept.info.run_id, "train/loss")
    logged = [(metric.step, metric.value) for metric in history]
    assert logged == told[: len(logged)]
    assert len(logged) > 10
    (path,) = runs.glob("mlflow/*/*/artifacts/events.txt")
    numbers = [line.split(": ")[0] for line in path.read_text().splitlines()]
    assert numbers == [str(event["id"]) for event in read(job / "events.jsonl")]


def test_a_program_that_the_master_lacks_is_refused_at_once(
    tmp_path: Path, job_file: Callable[..., Path]
) -> None:
    hidden = tmp_path / "path"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "finds = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'wandb' else finds(name)\n"
    )
    lacking = {"PYTHONPATH": str(hidden)}
    master, address = start_master(tmp_path / "state", environment=lacking)
    try:
        sets = ("--set", "track=[mlflow, wandb]")
        line = refused(run("submit", str(job_file()), *sets, "--master", address), 2)
        assert line.endswith(
            "track: wandb is not installed where the master runs; run there: "
            "pip install 'oobleck-cluster[wandb]', or leave wandb out"
        )
    finally:
        end(master)


def test_a_job_may_name_what_the_command_knows() -> None:
    assert set(spec.TRACKERS) == set(TRACKERS)
