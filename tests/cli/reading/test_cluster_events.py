"""`oobleck events` without a job: what happened to the cluster, also before a restart."""

import json
import re
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from oobleck.cli.client import MasterClient
from oobleck.master.storage.cluster_log import MOST_EVENTS, ClusterLog
from support.commands import end, refused, run, start_agent
from support.masters import MasterProcess
from support.secured import Secured
from support.waiting import until

JOB = """\
name: demo
model: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}
data: {text: ["*.txt"]}
training: {steps: 20, global_batch: 4, seed: 5}
"""
#: Every event is replaced by a snapshot as soon as it is acted on.
COMPACTS = ("--compact-bytes", "1")


@pytest.fixture
def master(tmp_path: Path) -> Iterator[MasterProcess]:
    running = MasterProcess(tmp_path / "state", *COMPACTS)
    yield running
    running.close()


def told(*arguments: str) -> list[str]:
    """The sentences, without their times."""
    done = run("events", *arguments)
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  \S", line) for line in lines), lines
    return [line[21:] for line in lines]


def test_nodes_jobs_and_starts_of_the_master(master: MasterProcess, tmp_path: Path) -> None:
    agents = {name: start_agent(master.address, name) for name in ("n1", "n2")}
    where = ("--master", master.address)

    def ends_with(line: str) -> bool:
        return line in told(*where, "-o", "wide")[-1]

    try:
        with MasterClient(master.address) as client:
            until(lambda: len(client.nodes()) == len(agents), "the agents register")
            (tmp_path / "data.txt").write_text("some text " * 100)
            (tmp_path / "job.yaml").write_text(JOB)
            assert run("submit", str(tmp_path / "job.yaml"), *where).returncode == 0
            until(lambda: client.job("demo-1").state == "succeeded", "the job's end")
            client.drain("n1", reason="a new fan", force=False)
            until(lambda: ends_with("node n1 is drained"), "the drain")
            client.undrain("n1")
        agents["n2"].send_signal(signal.SIGKILL)
        until(lambda: ends_with("node n2 lost"), "the loss")
        master.restart()
        lines = told(*where, "-o", "wide")
    finally:
        for agent in agents.values():
            end(agent)
    assert lines[:2] == ["the master started", "the master began term 1: the journal is new"]
    assert set(lines[2:4]) == {"node n1 joined", "node n2 joined"}
    assert lines[4:9] == [
        "demo-1 submitted",
        "demo-1 succeeded",
        "node n1 is to be drained: a new fan",
        "node n1 is drained",
        "node n1 may take part again",
    ]
    assert re.match(r"node n2 lost: .+", lines[9])
    assert lines[10:] == ["the master started"]


def test_forms_times_and_what_comes_later(master: MasterProcess) -> None:
    where = ("--master", master.address)
    records = [json.loads(line) for line in run("events", *where, "--json").stdout.splitlines()]
    assert [record["event"] for record in records] == ["master_started", "term_began"]
    assert all(one["id"] < other["id"] for one, other in pairwise(records))
    assert len(told(*where, "--since", "1h")) == len(records)
    assert told(*where, "--since", "2999-01-01") == []
    for flag in ("--incidents", "--policies"):
        assert "name it" in refused(run("events", flag, *where), 2)
    with MasterClient(master.address) as client:
        following = client.events("", follow=True)
        assert [json.loads(next(following).json) for _ in records] == records
        agent = start_agent(master.address, "n1")
        try:
            assert json.loads(next(following).json)["event"] == "node_joined"
        finally:
            end(agent)


def test_tokens_and_certificates(tmp_path: Path) -> None:
    secured = Secured(tmp_path, *COMPACTS)
    try:
        token = secured.token("--role", "viewer", "--name", "eve")
        folder = str(tmp_path / "eve")
        asked = ("--master", secured.address, "--token-file", str(token))
        joined = run("pki", "join", "eve", *asked, "--credentials", folder)
        assert joined.returncode == 0, joined
        assert secured.oobleck("pki", "revoke", "eve", "--role", "viewer").returncode == 0
        secured.restart()
        shown = ("--master", secured.address, "--credentials", str(secured.operator))
        lines = told(*shown, "-o", "wide")
    finally:
        end(secured.process)
    made, got, revoked, again = lines[2:]
    id = re.fullmatch(
        r"token ([0-9a-f]{12}) for viewer eve was made by operator/\w+, good until .{19}", made
    )
    assert id, made
    expected = rf"viewer eve got a certificate for token {id[1]}, good until .{{19}}"
    assert re.fullmatch(expected, got), got
    assert revoked == "the certificates of viewer eve were revoked"
    assert again == "the master started"


def test_the_newest_events_are_kept() -> None:
    log = ClusterLog()
    for number in range(MOST_EVENTS + 10):
        log.add(2 * number, {"event": "node_joined"}, 0.0)
    assert len(log.lines) == MOST_EVENTS
    last = 2 * (MOST_EVENTS + 9)
    assert [number for number, _ in log.read(last - 5, last - 1)] == [last - 4, last - 2]
    assert len(log.read(0, last)) == MOST_EVENTS
    assert ClusterLog(log.lines).lines == log.lines
