"""Submitting, watching and ending jobs: the real command and master, workers that pretend."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oobleck.proto import control_pb2 as pb
from support.commands import refused, run
from support.operators_master import answering
from support.waiting import until


def test_a_job_from_submit_to_its_end(cluster: str, job_file: Callable[..., Path]) -> None:
    master = ("--master", cluster)
    result = run("submit", str(job_file()), *master, "--follow", "--set", "training.steps=30")
    assert result.returncode == 0, result
    assert result.stderr == ""
    lines = result.stdout.strip().split("\n")
    assert lines[0] == "demo-1"
    assert lines[-1].startswith("succeeded  step 30/30  loss 0.0333")
    assert any("started generation 1: 2 pipelines on 2 nodes" in line for line in lines)

    status = json.loads(run("status", "demo-1", *master, "--json").stdout)
    assert status["state"] == "succeeded"
    assert (status["committed_step"], status["steps"]) == (30, 30)
    assert [p["nodes"] for p in status["plan"]["pipelines"]] == [["n1"], ["n2"]]
    text = run("status", "demo-1", *master).stdout
    assert "step        30 of 30" in text
    assert "n1 [0..3]" in text

    (job,) = json.loads(run("jobs", *master, "--json").stdout)
    assert job == status
    nodes = json.loads(run("nodes", *master, "--json").stdout)
    assert [(node["node"], node["state"]) for node in nodes] == [("n1", "live"), ("n2", "live")]
    both = json.loads(run("status", *master, "--json").stdout)
    assert set(both) == {"nodes", "jobs", "head"}
    assert both["head"]["held"] == []
    table = run("nodes", *master).stdout.split("\n")
    assert table[0].split()[:3] == ["NODE", "STATE", "WORKERS"]
    assert [line.split()[:2] for line in table[1:3]] == [["n1", "live"], ["n2", "live"]]

    records = [
        json.loads(line) for line in run("events", "demo-1", *master, "--json").stdout.splitlines()
    ]
    on_disk = Path(status["directory"], "events.jsonl").read_text().splitlines()
    assert records == [json.loads(line) for line in on_disk]
    readable = run("events", "demo-1", *master).stdout.splitlines()
    failures = run("events", "demo-1", "--incidents", *master)
    assert (failures.returncode, failures.stdout) == (0, "")
    assert failures.stderr.startswith("no incident of demo-1 is closed")
    answers = run("events", "demo-1", "--policies", *master)
    assert (answers.returncode, answers.stdout) == (0, "")
    assert answers.stderr.startswith("demo-1 has had no plan after its first one")
    wrong = run("events", "demo-1", "--policies", "-f", *master)
    assert (wrong.returncode, "excludes -f" in wrong.stderr) == (2, True)
    assert len(readable) == len(records)
    assert readable[-1].endswith("  succeeded")

    check_metrics(master, Path(status["directory"], "metrics.jsonl"))

    def has_said(node: str) -> bool:
        said = run("logs", "demo-1", "--node", node, *master).stdout
        return said == f"{node}/0  worker {node}/0 faults=2\n"

    until(lambda: all(map(has_said, ("n1", "n2"))), "what workers write, after all else")
    line = refused(run("logs", "demo-1", "--node", "nope", *master), 3)
    assert line == "oobleck: no such node in this job: nope; it has n1, n2"
    line = refused(run("logs", "demo-1", "--rank", "2", *master), 3)
    assert line == "oobleck: no rank 2: the job's plan has 2 workers"
    refused(run("logs", "demo-1", "--rank", "99999999999", *master), 2)
    (entry,) = run("logs", "demo-1", "--rank", "0", *master, "--json").stdout.splitlines()
    line = json.loads(entry)
    assert line.pop("time") > "2026"
    assert line == {"node": "n1", "slot": 0, "line": "worker n1/0 faults=2"}


def check_metrics(master: tuple[str, str], path: Path) -> None:
    """Of the job demo-1, which has ended with step 30; each form has what the file has."""
    on_disk = [json.loads(line) for line in path.read_text().splitlines()]
    for following in ((), ("--follow",)):
        told = run("metrics", "demo-1", "--json", *following, *master).stdout
        assert [json.loads(line) for line in told.splitlines()] == on_disk
        told = run("metrics", "demo-1", "--json", "--from", "29", *following, *master).stdout
        assert [json.loads(line) for line in told.splitlines()] == on_disk[28:]
    rows = list(csv.DictReader(run("metrics", "demo-1", "--csv", *master).stdout.splitlines()))
    assert [float(row["loss"]) for row in rows] == [record["loss"] for record in on_disk]
    assert list(rows[0])[:3] == ["step", "loss", "grad_norm"]
    assert {row["skipped"] for row in rows} == {"false"}

    table = run("metrics", "demo-1", *master).stdout.splitlines()
    assert table[0].split()[:2] == ["STEP", "LOSS"]
    assert [int(line.split()[0]) for line in table[1:]] == list(range(11, 31))
    assert table[-1].split()[1] == f"{on_disk[-1]['loss']:.4f}"
    table = run("metrics", "demo-1", "--from", "2", *master).stdout.splitlines()
    assert [int(line.split()[0]) for line in table[1:]] == list(range(2, 31))
    _, _, drawn = run("metrics", "demo-1", "--plot", *master).stdout.partition("\n\n")
    assert drawn.splitlines()[-1].split() == ["1", "30"]

    nothing = run("metrics", "demo-1", "--from", "31", "--json", *master)
    assert (nothing.returncode, nothing.stdout) == (0, "")
    assert nothing.stderr == "demo-1 has no step from step 31 on so far\n"
    nothing = run("metrics", "demo-1", "--evaluations", *master)
    assert (nothing.returncode, nothing.stderr) == (0, "demo-1 has no evaluation so far\n")
    assert "known jobs: demo-1" in refused(run("metrics", "nope-1", *master), 3)
    refused(run("metrics", "demo-1", "--csv", "--json", *master), 2)
    refused(run("metrics", "demo-1", "--from", "0", *master), 2)
    refused(run("metrics", "demo-1", "-f", "--plot", *master), 2)


def test_following_a_job_that_fails(cluster: str, job_file: Callable[..., Path]) -> None:
    result = run("submit", str(job_file("fails")), "--follow", "--master", cluster)
    assert result.returncode == 1
    why = "the job's own error on worker "
    assert result.stderr.startswith(f"oobleck: fails-1 failed: {why}")
    assert (result.stdout + result.stderr).count("the data is missing") == 1, result


def test_ctrl_c_leaves_the_job_and_says_how_to_end_it(
    cluster: str, job_file: Callable[..., Path]
) -> None:
    path = str(job_file())
    command = [sys.executable, "-m", "oobleck.cli.main", "submit", path, "--follow"]
    process = subprocess.Popen(
        [*command, "--set", "training.steps=100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OOBLECK_MASTER": cluster},
    )
    assert process.stdout is not None
    told = iter(process.stdout.readline, "")
    assert any("running" in line for line in told), process.communicate()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "oobleck cancel demo-1" in errors
    assert "Traceback" not in errors
    master = ("--master", cluster)
    assert json.loads(run("status", "demo-1", "--json", *master).stdout)["state"] == "running"

    follower = subprocess.Popen(
        [sys.executable, "-m", "oobleck.cli.main", "events", "-f", "demo-1", *master],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run("cancel", "demo-1", *master).returncode == 0
    output, _ = follower.communicate(timeout=240)
    assert output.splitlines()[-1].endswith("  cancelled")
    until(lambda: "cancelled" in run("jobs", *master).stdout, "the end in the list", poll_s=0.1)
    assert run("cancel", "demo-1", *master).stdout == "demo-1 cancelled\n"


def test_data_that_only_the_nodes_have(
    cluster: str, job_file: Callable[..., Path], tmp_path: Path
) -> None:
    """The nodes are another machine's by their host's name, as behind a tunnel to the master."""
    sets = ("--set", "data={text: [absent/*.txt], tokenizer: absent.json}")
    result = run("submit", str(job_file()), "--master", cluster, *sets)
    assert (result.returncode, result.stdout) == (0, "demo-1\n"), result


def test_a_job_that_is_too_large_is_taken_with_a_warning(
    cluster: str, job_file: Callable[..., Path]
) -> None:
    path = str(job_file(extra="fault_tolerance: 3\n"))
    result = run("submit", path, "--master", cluster)
    assert (result.returncode, result.stdout) == (0, "demo-1\n"), result
    assert result.stderr.startswith("oobleck: warning: needs 4 nodes: fault_tolerance 3 and ")
    assert result.stderr.endswith(
        "2 are live; add 2 nodes or lower fault_tolerance to 1; the job waits until then\n"
    )


def test_status_shows_what_goes_on_first_and_counts_what_has_ended(
    cluster: str, job_file: Callable[..., Path]
) -> None:
    asked = ("--master", cluster)
    longer = ("--set", "training.steps=100000")  # than the test: neither job ends by itself
    for _ in range(2):
        assert run("submit", str(job_file()), *asked, *longer).returncode == 0
    assert run("cancel", "demo-1", *asked).returncode == 0
    lines = run("status", *asked).stdout.splitlines()
    assert [line.split()[0] for line in lines if line] == ["JOB", "demo-2", "1", "NODE", "n1", "n2"]
    assert lines[3].startswith("1 job ended: 1 cancelled; the last, demo-1, cancelled")
    every = run("status", "--all", *asked).stdout.splitlines()
    assert [line.split()[0] for line in every[:3]] == ["JOB", "demo-2", "demo-1"]


def test_a_job_that_has_ended_is_not_cancelled() -> None:
    ended = pb.JobStatus(job_id="demo-1", state="failed")
    told = "demo-1 had failed before; there is nothing to cancel\n"
    with answering(CancelJob=lambda request: ended, GetJob=lambda request: ended) as address:
        done = run("cancel", "demo-1", "--master", address)
        refused = run("cancel", "demo-1", "--checkpoint", "--master", address)
    assert (done.returncode, done.stdout, done.stderr) == (0, told, "")
    assert refused.returncode == 1
    why = "no checkpoint: demo-1 is failed and cannot take one; there is nothing to cancel\n"
    assert refused.stderr == f"oobleck: {why}"


def test_a_node_that_is_forgotten_while_its_drain_is_waited_for_is_told_of() -> None:
    draining = pb.DrainNodesReply(nodes=[pb.NodeInfo(node="n1", state="draining")])
    with answering(
        DrainNodes=lambda request: draining, ListNodes=lambda request: pb.ListNodesReply()
    ) as address:
        done = run("node", "drain", "n1", "--wait", "--master", address)
    assert done.returncode == 3
    assert done.stderr == "oobleck: node n1 was lost, and the master has forgotten it\n"


def test_a_drain_is_not_waited_for_beyond_its_time_while_the_master_is_away() -> None:
    draining = pb.DrainNodesReply(nodes=[pb.NodeInfo(node="n1", state="draining")])
    with answering(DrainNodes=lambda request: draining) as address:
        done = run("node", "drain", "n1", "--wait", "--timeout", "1ms", "--master", address)
    assert (done.returncode, done.stdout) == (1, "n1 draining\n")
    assert done.stderr == "oobleck: --timeout 0.001s: n1 draining\n"


def test_ctrl_c_leaves_the_drain_and_says_how_to_watch_and_undo_it(tmp_path: Path) -> None:
    draining = pb.DrainNodesReply(
        nodes=[pb.NodeInfo(node="n1", state="draining"), pb.NodeInfo(node="n2", state="drained")]
    )
    with answering(
        DrainNodes=lambda request: draining,
        ListNodes=lambda request: pb.ListNodesReply(nodes=draining.nodes),
    ) as address:
        command = [sys.executable, "-m", "oobleck.cli.main", "node", "drain", "n1", "n2", "--wait"]
        pipe = subprocess.PIPE
        with subprocess.Popen(
            [*command, "--master", address], stdout=pipe, stderr=pipe, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "n1 draining\n"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=240)
    assert process.returncode == 130
    assert told == (
        "oobleck: the drain of n1, n2 goes on; watch it with 'oobleck nodes --watch', undo it with "
        "'oobleck node undrain n1 n2'\n"
    )


@pytest.mark.parametrize(
    ("line", "begin"),
    [(("checkpoint", "demo-1"), ""), (("cancel", "demo-1", "--checkpoint"), "is not cancelled; ")],
    ids=["checkpoint", "cancel"],
)
def test_ctrl_c_leaves_the_checkpoint_and_says_so(line: tuple[str, ...], begin: str) -> None:
    asked, over = threading.Event(), threading.Event()

    def events(request: object) -> Iterator[pb.EventRecord]:
        asked.set()
        over.wait(240)
        return iter(())

    answers = {
        "GetJob": lambda request: pb.JobStatus(job_id="demo-1", state="running"),
        "SaveCheckpoint": lambda request: pb.SaveCheckpointReply(number=1),
        "Events": events,
    }
    with answering(**answers) as address:
        command = [sys.executable, "-m", "oobleck.cli.main", *line, "--master", address]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
            assert asked.wait(240)
            process.send_signal(signal.SIGINT)
            told = process.communicate(timeout=240)
        over.set()
    still = "demo-1 takes the checkpoint all the same; see 'oobleck checkpoint list demo-1'"
    first = f"demo-1 {begin}" if begin else ""
    assert (process.returncode, told) == (130, ("", f"oobleck: {first}{still}\n"))
