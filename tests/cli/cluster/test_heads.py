"""Commands, agents and joins find the head at whichever of its addresses it is."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import oobleck
from bench.support.ports import choose_address
from oobleck.cli.client import MasterClient
from oobleck.core.job.file import format_job
from support.commands import end, refused, run
from support.jobs import job_spec
from support.operators_master import answering
from support.secured import Secured
from support.waiting import PATIENCE_S, until


def test_every_command_goes_on_to_the_next_address(master: str) -> None:
    several = f"{choose_address()},{choose_address()},{master}"
    assert run("jobs", "--master", several).returncode == 0
    asked = run("nodes", "--json", environment={"OOBLECK_MASTER": several})
    assert (asked.returncode, asked.stderr) == (0, "")
    with oobleck.Client(several) as client:
        assert client.jobs() == []
        assert client.nodes() == []


def test_what_listens_and_is_no_master_is_passed_over(master: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        several = f"127.0.0.1:{silent.getsockname()[1]},{master}"
        with MasterClient(several) as client:
            assert client.nodes() == []
            assert client.address == master
            job = format_job(job_spec("elsewhere"))
            job_id = client.submit(job, "once").job_id
            assert client.submit(job, "once").job_id == job_id


def test_all_addresses_are_named_where_none_answers() -> None:
    first, second = choose_address(), choose_address()
    line = refused(run("jobs", "--master", f"{first},{second}"), 4)
    assert f"cannot reach a master at {first}, {second} (" in line
    for wrong, why in ((f"{first},", "'' is not HOST:PORT"), (f"{first},x:0", "port 0")):
        assert why in refused(run("jobs", "--master", wrong), 2)
    away = refused(run("jobs", "--master", f"{first},198.51.100.1:1"), 2)
    assert "--master 198.51.100.1:1: is not on this host, so the call needs credentials" in away


def test_a_call_in_progress_is_repeated_at_the_next_address(master: str) -> None:
    """The first head takes the call and ends before it answers."""
    with answering() as away, MasterClient(f"{away},{master}") as client:
        assert client.nodes() == []
        assert client.address == master


@pytest.fixture
def moving(tmp_path: Path) -> Iterator[tuple[Secured, str, str]]:
    """The master, the address that it is at, and the one that it moves to."""
    first, second = choose_address(), choose_address()
    running = Secured(tmp_path, "--heads", f"{first},{second}", host=first.rpartition(":")[0])
    running.restart(first)
    yield running, first, second
    end(running.process)


@pytest.mark.usefixtures("quick_start")
def test_agents_and_joins_follow_the_head(moving: tuple[Secured, str, str], tmp_path: Path) -> None:
    head, first, second = moving
    token, folder, logs = head.token(), tmp_path / "n1", tmp_path / "agent.log"
    started: list[subprocess.Popen[bytes]] = []

    def start(master: str, *more: str) -> None:
        flags = ("--master", master, "--name", "n1", "--credentials", str(folder))
        with logs.open("ab") as log:
            command = [sys.executable, "-m", "oobleck.agent", *flags, *more]
            started.append(subprocess.Popen(command, env=os.environ, stdout=log, stderr=log))

    def node() -> dict:
        (found,) = json.loads(head.oobleck("nodes", "--json").stdout)
        return found

    def there() -> bool:
        return head.states() == {"n1": "live"}

    try:
        start(f"{choose_address()},{first}", "--token-file", str(token))
        until(there, "the agent joins by the address that answers")
        before = node()
        assert (folder / "heads").read_text() == f"{first}\n{second}\n"
        head.restart(second)
        until(lambda: there() and node()["pid"] == before["pid"], "the agent finds the head")
        assert node()["address"] == before["address"]
        started[0].send_signal(signal.SIGINT)
        assert started[0].wait(PATIENCE_S) == 0
        start(first)
        until(lambda: there() and node()["pid"] == started[1].pid, "a restart knows where it is")
        operator = head.token("--role", "operator")
        joined = run(
            *("pki", "join", "ann", "--master", f"{first},{second}", "--token-file", str(operator)),
            *("--credentials", str(tmp_path / "ann")),
        )
        assert joined.returncode == 0, joined
        renewed = run(
            *("pki", "renew", "--master", f"{first},{second}"),
            *("--credentials", str(tmp_path / "ann")),
        )
        assert renewed.returncode == 0, renewed
    finally:
        for process in started:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait(PATIENCE_S)
