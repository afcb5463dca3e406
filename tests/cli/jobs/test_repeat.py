"""A master may be started anew under a command: what it asked happens once, and what it follows
goes on."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from oobleck.cli import client
from support.commands import end, run, start_agent, start_master
from support.waiting import until

_JOB = """\
name: demo
model: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}
data: {text: ["*.txt"]}
training: {steps: 20, global_batch: 4, seed: 20}
"""


def test_a_master_that_dies_with_the_answer_has_one_job(tmp_path: Path) -> None:
    """It has the job in its journal, and is started anew while the command waits."""
    first, address = start_master(tmp_path, crash_at="committed:2")
    second = []

    def start_again() -> None:
        first.wait()
        second.append(start_master(tmp_path, address)[0])

    starting = threading.Thread(target=start_again)
    starting.start()
    try:
        with client.MasterClient(address, ask_again_s=300.0) as master:
            assert master.submit(_JOB, "the-request").job_id == "demo-1"
            starting.join()
            assert len(second) == 1, "the first master has answered"
            assert [job.job_id for job in master.jobs()] == ["demo-1"]
    finally:
        first.kill()
        starting.join()
        for process in (first, *second):
            end(process)


class Follower:
    """A command that goes on until the job ends."""

    def __init__(self, folder: Path, master: str, *arguments: str) -> None:
        self.name = arguments[0]
        self._out, self._errors = folder / f"{self.name}.out", folder / f"{self.name}.err"
        with self._out.open("w") as out, self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-m", "oobleck.cli.main", *arguments, "--master", master],
                stdout=out,
                stderr=errors,
            )

    def has_said(self, text: str) -> bool:
        return text in self._out.read_text()

    def has_warned(self, text: str) -> bool:
        return text in self._errors.read_text()

    def end(self) -> list[str]:
        """What it has said, if all went well."""
        assert self.process.wait(120) == 0, (self.name, self._errors.read_text())
        return self._out.read_text().splitlines()


def test_followers_go_on_with_a_master_that_is_started_anew(
    tmp_path: Path, job_file: Callable[..., Path]
) -> None:
    state = tmp_path / "state"
    master, address = start_master(state)
    agent = start_agent(address, "n1")
    path = str(job_file(extra="fault_tolerance: 0\n"))
    sets = ("--set", "training.steps=100000", "--set", f"checkpoint.path={tmp_path / 'saved'}")
    run("submit", path, *sets, "--master", address)
    events = Follower(tmp_path, address, "events", "-f", "--json", "demo-1")
    logs = Follower(tmp_path, address, "logs", "-f", "--json", "demo-1")
    metrics = Follower(tmp_path, address, "metrics", "-f", "--json", "demo-1")
    followers = [events, logs, metrics]
    try:
        until(lambda: events.has_said('"started"'), "the first plan among the events")
        drain = Follower(tmp_path, address, "node", "drain", "n1", "--wait")
        followers.append(drain)
        saver = Follower(tmp_path, address, "checkpoint", "demo-1")
        followers.append(saver)
        until(lambda: logs.has_said("worker n1/0"), "the worker's output")
        until(lambda: metrics.has_said('"step":5,'), "some steps")
        until(lambda: drain.has_said("kept so far"), "why the node is kept")
        journal = state / "journal.log"
        until(lambda: "CheckpointRequested" in journal.read_text(), "a checkpoint is asked for")
        with client.MasterClient(address) as asking:
            assert asking.jobs()  # by now that it was asked for is answered
        master.kill()
        master.wait()
        with (state / "jobs/demo-1/logs/n1-0.log").open("a") as file:
            file.write("9999-01-01T00:00:00.000000+00:00 told while nobody heard it\n")
        for each in followers:
            until(lambda each=each: each.has_warned("the master is away"), f"{each.name}: away")
        end(master)
        master, _ = start_master(state, address)
        for each in followers:
            until(lambda each=each: each.has_warned("the master is back"), f"{each.name}: back")
        on_disk = state / "jobs/demo-1/metrics.jsonl"
        before = len(on_disk.read_text().splitlines())
        until(lambda: len(on_disk.read_text().splitlines()) > before, "a step of the new master")
        assert run("cancel", "demo-1", "--master", address).returncode == 0
        steps = [json.loads(line) for line in metrics.end()]
        assert [record["step"] for record in steps] == list(range(1, len(steps) + 1))
        # What the agent tells of a job that is cancelled already comes to the file alone.
        lines = [json.loads(line) for line in on_disk.read_text().splitlines()]
        assert steps == lines[: len(steps)]
        assert len(steps) > before
        told = [json.loads(line) for line in events.end()]
        assert [record["id"] for record in told] == list(range(1, len(told) + 1))
        assert told[-1]["event"] == "cancelled"
        lines = [json.loads(line)["line"] for line in logs.end()]
        assert lines == ["worker n1/0 faults=2", "told while nobody heard it"]
        assert drain.end()[-1].startswith("n1 drained")
        assert saver.process.wait(120) == 1
        assert saver.has_warned("demo-1 has cancelled without taking the checkpoint")
    finally:
        for follower in followers:
            follower.process.kill()
            follower.process.wait()
        end(agent)
        end(master)
