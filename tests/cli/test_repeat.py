"""A request whose answer is lost is asked again with its id, and happens once."""

import threading
from pathlib import Path

import pytest

from oobleck.cli import client
from support.commands import end, start_master

_JOB = """\
name: demo
model: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}
data: {text: ["*.txt"]}
training: {steps: 20, global_batch: 4, seed: 5}
"""


def test_a_master_that_dies_with_the_answer_has_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the job in its journal, and is started anew while the command waits."""
    monkeypatch.setattr(client, "ASK_AGAIN_S", 300.0)
    first, address = start_master(tmp_path, crash_at="committed:2")
    second = []

    def start_again() -> None:
        first.wait()
        second.append(start_master(tmp_path, address)[0])

    starting = threading.Thread(target=start_again)
    starting.start()
    try:
        with client.Master(address) as master:
            assert master.submit(_JOB, "the-request") == "demo-1"
            starting.join()
            assert len(second) == 1, "the first master has answered"
            assert [job.job_id for job in master.jobs()] == ["demo-1"]
    finally:
        first.kill()
        starting.join()
        for process in (first, *second):
            end(process)
