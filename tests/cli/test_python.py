"""`import oobleck`: what loads when, and a client of a real master, whose workers only pretend."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import oobleck
from oobleck import client
from oobleck.errors import error_of
from support.commands import end, start_agent, start_master

_LAZY = """
import sys, oobleck
heavy = {"grpc", "torch", "click", "msgspec", "psutil"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
oobleck.Client, oobleck.local
assert "grpc" in sys.modules and "torch" not in sys.modules
assert set(oobleck.__all__) <= set(dir(oobleck))
for name in oobleck.__all__:
    assert getattr(oobleck, name).__name__ == name, name
assert not hasattr(oobleck, "nothing")
"""


def test_nothing_is_loaded_until_it_is_used() -> None:
    done = subprocess.run([sys.executable, "-c", _LAZY], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_exit_code_has_its_exception() -> None:
    kinds = [type(error_of("why", code)) for code in range(7)]
    assert kinds == [
        oobleck.Error,
        oobleck.Error,
        oobleck.Refused,
        oobleck.NotFound,
        oobleck.Unreachable,
        oobleck.Denied,
        oobleck.Error,
    ]


def test_a_job_from_submit_to_its_end(
    cluster: str, job_file: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOBLECK_MASTER", cluster)
    with oobleck.Client() as client:
        job = client.submit(job_file(), set=["training.steps=30"])
        assert job == "demo-1"
        followed = list(client.metrics(job, follow=True, from_step=3))
        assert [record.step for record in followed] == list(range(3, 31))
        assert [record.loss for record in followed] == [1 / step for step in range(3, 31)]
        assert list(client.metrics(job, from_step=3)) == followed
        ended = client.wait(job)
        assert (ended.state, ended.step, ended.steps, ended.ended) == ("succeeded", 30, 30, True)
        assert ended.details["reconfigurations"] == 0
        assert client.jobs() == [ended]
        assert [(node.name, node.state) for node in client.nodes()] == [
            ("n1", "live"),
            ("n2", "live"),
        ]
        events = list(client.events(job, follow=True))
        assert events == list(client.events(job))
        assert events[-1]["event"] == "succeeded"

        text = {"text": [tmp_path / "data.txt"]}
        model = {"kind": "gpt", "layers": 2, "hidden": 8, "heads": 2, "sequence_length": 8}
        described = {"name": "long", "model": model, "data": text}
        long = client.submit({**described, "training": {"steps": 100_000, "global_batch": 4}})
        with pytest.raises(TimeoutError, match=f"{long} is .*; it goes on"):
            client.wait(long, timeout=0.01)
        with pytest.raises(oobleck.Refused, match=r"submit it with checkpoint\.path"):
            client.checkpoint(long)
        assert next(client.metrics(long, follow=True)).step == 1
        assert client.cancel(long).state == "cancelled"
        with pytest.raises(oobleck.JobFailed, match=f"{long} cancelled") as failed:
            client.wait(long)
        assert failed.value.status.state == "cancelled"
        with pytest.raises(oobleck.JobFailed, match="the data is missing"):
            client.wait(client.submit(job_file("fails")))


def test_a_client_waits_for_a_master_that_is_started_anew(
    tmp_path: Path, job_file: Callable[..., Path]
) -> None:
    master, address = start_master(tmp_path / "state")
    agent = start_agent(address, "n1")
    try:
        with oobleck.Client(address) as client:
            job = client.submit(job_file(extra="fault_tolerance: 0\n"), set=["training.steps=300"])
            steps = []
            for record in client.metrics(job, follow=True):
                steps.append(record.step)
                if record.step == 50:
                    master.kill()
                    end(master)
                    master, _ = start_master(tmp_path / "state", address)
            assert steps == list(range(1, 301))
            assert client.wait(job).step == 300
    finally:
        end(agent)
        end(master)


def test_a_wait_for_a_time_ends_though_the_master_is_away(
    tmp_path: Path, job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    master, address = start_master(tmp_path / "state")

    def lose_the_master(seconds: float) -> None:
        master.kill()
        master.wait()

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lose_the_master)
    try:
        with oobleck.Client(address) as client:
            job = client.submit(job_file())  # there is no node for it
            monkeypatch.setattr("oobleck.client.time", clock)
            with pytest.raises(TimeoutError, match=f"the master is away after 1 s; {job} goes on"):
                client.wait(job, timeout=1.0)
    finally:
        end(master)


def test_what_is_refused_and_how(
    master: str, job_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OOBLECK_CREDENTIALS", raising=False)
    with oobleck.Client(master) as client:
        for call in (client.status, client.cancel, client.checkpoint, client.wait):
            with pytest.raises(oobleck.NotFound, match="no job 'nope'"):
                call("nope")
        for stream in (client.metrics, client.events):
            with pytest.raises(oobleck.NotFound, match="no job 'nope'"):
                next(stream("nope"))
        for job in ({"name": "x"}, {"name": {1, 2}}, "no/such/file.yaml"):
            with pytest.raises(oobleck.InvalidJob):
                client.submit(job)
        with pytest.raises(oobleck.InvalidJob, match=r"--set training\.steps=many"):
            client.submit(job_file(), set=["training.steps=many"])
    with oobleck.Client("127.0.0.1:1") as nobody, pytest.raises(oobleck.Unreachable):
        nobody.jobs()
    for address, why in (("10.9.9.9:4600", "needs credentials"), ("127.0.0.1:0", "no master")):
        with pytest.raises(ValueError, match=why) as refused:
            oobleck.Client(address)
        assert isinstance(refused.value, oobleck.Refused)
    with pytest.raises(oobleck.Refused, match="credentials"):
        oobleck.Client(master, credentials=os.devnull)


def make() -> None:
    """A function of a module that could be imported."""


def test_what_a_notebook_hands_over_in_place_of_a_name_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refusal(model: object, **more: object) -> str:
        data = {"text": ["x"]}
        job = {"name": "x", "model": model, "data": data, "training": {}, **more}
        with oobleck.Client("127.0.0.1:1") as client, pytest.raises(oobleck.InvalidJob) as caught:
            client.submit(job)
        return str(caught.value)

    assert (
        f"model.python is the function make, and workers load it by its name; give '{__name__}"
        in (refusal({"python": make}))
    )
    monkeypatch.setattr(make, "__module__", "__main__")
    assert refusal({"python": make}).endswith(
        "write it to a file, such as my_job.py, and give 'my_job:make' as python"
    )
    for nameless in (lambda: None, refusal):
        assert "define it at the top of a file, such as my_job.py" in refusal({"python": nameless})
    written = refusal({"python": "__main__:make"})
    assert "model.python: make is in a notebook or script, which workers cannot import" in written
    assert refusal(make).startswith("the job: model is the function make")
    built = refusal({"python": "m:f", "arguments": {"sizes": [1, object()]}})
    assert built.startswith("the job: model.arguments.sizes[1] is a object; give numbers, texts")
    assert refusal({1: 2}) == "the job: model has the key 1; use text as keys"
    with oobleck.Client("127.0.0.1:1") as client, pytest.raises(oobleck.InvalidJob) as caught:
        client.submit(make)  # type: ignore[arg-type]
    assert (
        str(caught.value)
        == "the job is function; give a job file's path, or its content as a mapping"
    )


def test_numbers_of_numpy_are_numbers_of_a_job(tmp_path: Path) -> None:
    text = tmp_path / "data.txt"
    text.write_text("x" * 100)
    model = {"kind": "gpt", "layers": 2, "hidden": 8, "heads": 2, "sequence_length": 8}
    training = {"steps": np.int64(3), "global_batch": 4, "optimizer": {"lr": np.float32(0.5)}}
    job = client._read(
        {"name": "x", "model": model, "data": {"text": text}, "training": training}, ()
    )
    assert (job.training.steps, job.training.optimizer.lr) == (3, 0.5)


_SUBMITS = """
import oobleck
with oobleck.Client("127.0.0.1:1") as client:
    client.submit({
        "name": "x",
        "model": {"python": "submits_itself:make", "sequence_length": 8},
        "data": {"text": ["x"]},
        "training": {"steps": 1, "global_batch": 4},
    })
"""


def test_a_module_that_submits_the_job_that_imports_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "submits_itself.py").write_text(_SUBMITS)
    done = subprocess.run(
        [sys.executable, "submits_itself.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    last = done.stderr.splitlines()[-1]
    assert "the module that the job names submits a job when it is imported" in last
    assert 'move the call that submits below if __name__ == "__main__"' in last
