"""Wherever a user's code runs, what it raises is the job's error with its place, and an end of the
process is known by the place."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier, Thread

import pytest
import torch

from oobleck.core.job.code import Code, Json
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.host.ipc.marker import Marker
from oobleck.worker.data.samples import Reader
from oobleck.worker.models import own
from oobleck.worker.models.checks.check import check
from oobleck.worker.models.checks.describe import describe
from oobleck.worker.runtime import code
from oobleck.worker.runtime.errors import JobError, NodeError
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state import describe_optimizer
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.step.stage import StageRunner
from support import ending_models

ROWS = RowKeys(seed=0, step=1, positions=(0, 1))
X, TARGETS = torch.zeros(2, ending_models.WIDTH), torch.zeros(2)
#: What is named, by where the code ends the process.
PLACES = {
    "import": "model: its_module",
    "function": "model: support.ending_models:model",
    "layers": "model: support.ending_models:model",
    "builder": "model: layer 1",
    "train": "model: layer 1 (Layer)",
    "layer": "model: layer 1 (Layer)",
    "backward": "model: the backward of layers 0 to 1",
    "loss": "model: the loss",
    "metrics": "model: the metrics",
    "length": "data: support.ending_models:Points",
    "sample": "data: sample 5",
    "optimizer": "optimizer: support.ending_models:Optimizer",
}
RAISED = ("SystemExit", "KeyboardInterrupt", "GeneratorExit")


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ending_models, "_calls", 0)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own.user_model.cache_clear()
    code.allow((code.ANY,))
    yield
    code.allow(())
    own.user_model.cache_clear()


@pytest.fixture
def marker() -> Iterator[Marker]:
    marker = Marker()
    code.mark_in(marker)
    yield marker
    code.mark_in(None)
    marker.close()


def job(where: str, how: str, after: int = 0) -> JobSpec:
    named = json.dumps({"where": where, "how": how, "after": after})
    return parse_job(
        f'name: demo\nmodel: {{python: "support.ending_models:model", arguments: {named}}}\n'
        f'data: {{python: "support.ending_models:Points", arguments: {named}}}\n'
        "training: {steps: 1, global_batch: 4, optimizer: "
        f'{{python: "support.ending_models:Optimizer", lr: 0.1, arguments: {named}}}}}\n'
    )


def described(job: JobSpec) -> JobSpec:
    sample = tuple(map(torch.as_tensor, ending_models.Points()[0]))
    return replace(job, model=replace(job.model, described=describe(job, sample)))  # type: ignore[arg-type]


def backward(job: JobSpec, how: str) -> None:
    # It is described before it ends anything: nothing counts the calls of a backward till then.
    job = described(job)
    state = ModelState(job, torch.device("cpu"))
    for number in range(2):
        state.initialise(number)
    stage = StageRunner(state, range(2), job, torch.device("cpu"))
    stage.forward(0, X[:1], replace(ROWS, positions=(0,)), TARGETS[:1], by_layer=False)
    stage.backward(0)


def ending(where: str, how: str, folder: Path) -> Callable[[], object]:
    """What runs the user's code at that place, as a worker does."""
    wanted = job(where, how)
    spec = wanted.model
    assert isinstance(spec, OwnModelSpec)
    if where == "import":
        (folder / "its_module.py").write_text(
            f"from support.ending_models import end\nend({how!r}, 0)\n"
        )
        given = Code(name="its_module:model", group=None, path=str(folder), arguments=Json("{}"))
        return partial(code.call, given, "model")
    assert wanted.data.code is not None
    match where:
        case "function":
            return partial(own.user_model, spec)
        case "layers":
            return partial(own.builders, spec)
        case "builder":
            return partial(own.build, spec, 1)
        case "train":
            return lambda: own.empty_layer(spec, 0, 1)(X, replace(ROWS, training=False))
        case "layer":
            return lambda: own.empty_layer(spec, 0, 1)(X, ROWS)
        case "backward":
            return partial(backward, wanted, how)
        case "loss":
            return lambda: own.row_losses(spec, X, TARGETS, 2)
        case "metrics":
            return lambda: own.metric_sums(spec, X, TARGETS, 2)
        case "length":
            return partial(Reader, wanted.data.code, wide=False, key="data")
        case "sample":
            return lambda: Reader(wanted.data.code, wide=False, key="data").read(5)  # type: ignore[arg-type]
        case _:
            return partial(describe_optimizer.describe, wanted.training)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("how", RAISED)
def test_whatever_is_raised_is_the_jobs_error_with_place_and_line(
    where: str, how: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError) as raised:
        ending(where, how, tmp_path)()
    told = str(raised.value)
    assert told.startswith(PLACES[where]), told
    text = ": I leave" if how == "SystemExit" else ""
    assert f": {how}{text} (ending_models.py:" in told, told


def ended(run: Callable[[], object]) -> tuple[str, int]:
    """The verdict on a process that does `run`, and how it has ended."""
    marker = Marker()
    pid = os.fork()
    if pid == 0:
        code.mark_in(marker)
        try:
            run()
        finally:
            os._exit(77)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        return marker.verdict(status), status
    finally:
        marker.close()


@pytest.mark.parametrize("where", PLACES)
def test_a_process_that_such_code_ends_is_known_by_the_place(where: str, tmp_path: Path) -> None:
    verdict, status = ended(ending(where, "os._exit", tmp_path))
    assert status == 0
    assert verdict == f"{PLACES[where]}: the user's code ended the process with status 0"


def test_only_an_end_with_a_status_amid_the_users_code_is_the_users(tmp_path: Path) -> None:
    verdict, status = ended(ending("layer", "exit", tmp_path))
    assert (status, verdict[-8:]) == (9, "status 9")
    assert ended(ending("layer", "kill", tmp_path)) == ("", -9)
    # Such as an agent's wish, or the end of it.
    assert ended(lambda: leave_amid_code()) == ("", 3)
    assert ended(lambda: own.row_losses(job("", "").model, X, TARGETS, 2)) == ("", 77)  # type: ignore[arg-type]


def leave_amid_code() -> None:
    entered = Barrier(2)

    def run() -> None:
        with code.running("data: sample 1"):
            entered.wait()
            entered.wait()

    Thread(target=run, daemon=True).start()
    entered.wait()
    code.end_process(3)


def test_of_code_in_several_threads_all_that_still_runs_is_named(marker: Marker) -> None:
    first, second = Barrier(2), Barrier(2)

    def run() -> None:
        with code.running("data: sample 1"):
            first.wait()
            second.wait()

    thread = Thread(target=run)
    thread.start()
    first.wait()
    with code.running("model: layer 1"):
        assert marker.read() == "data: sample 1 or model: layer 1"
        with code.running("model: the loss"):
            assert marker.read() == "data: sample 1 or model: the loss"
    assert marker.read() == "data: sample 1"
    second.wait()
    thread.join()
    assert marker.read() == ""


def test_a_fork_of_the_users_does_not_speak_for_the_process(marker: Marker) -> None:
    with code.running("model: layer 1"):
        if (pid := os.fork()) == 0:
            with code.running("data: sample 1"):
                os._exit(0)
        os.waitpid(pid, 0)
        assert marker.read() == "model: layer 1"


def test_what_says_something_of_the_node_is_not_the_jobs() -> None:
    for error in (torch.OutOfMemoryError("none"), NodeError("no file"), MemoryError()):
        with pytest.raises(type(error)), code.running("model: layer 1"):
            raise error


@pytest.mark.parametrize("where", ["layer", "backward", "loss", "metrics"])
@pytest.mark.parametrize("how", RAISED)
def test_a_check_shows_it_as_a_problem(
    where: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = described(job(where, how, after=1000))
    monkeypatch.setattr(ending_models, "_calls", 1000)
    points = ending_models.Points()
    samples = [torch.stack([points[n][side] for n in range(5)]) for side in (0, 1)]
    samples_of = (samples[0], samples[1])
    assert isinstance(wanted.model, OwnModelSpec)
    found = check(wanted.model, samples_of, seed=0, dtype=torch.float32, steps=1)
    assert any(f"{how}" in str(one) and "(ending_models.py:" in str(one) for one in found), found
