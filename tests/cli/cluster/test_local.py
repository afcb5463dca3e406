"""`oobleck local` with real daemons: what it prints, what it survives, and that nothing stays."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.support.ports import choose_address
from oobleck.cli.client import MasterClient
from oobleck.cli.cluster.cluster import Cluster, restart_pause_s
from oobleck.cli.cluster.local import NODE_BYTES
from oobleck.host.command import CommandFailed
from oobleck.proto.control_pb2 import NodeInfo
from support import stranger
from support.commands import end, refused, run
from support.waiting import PATIENCE_S, all_gone, until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("quick_start")]


JOB = """\
name: theirs
model: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}
data: {text: [/etc/passwd]}
training: {steps: 20, global_batch: 4, seed: 20}
"""


class Local:
    """A running `oobleck local` and all processes below it."""

    def __init__(self, state_dir: Path, *options: str, nodes: int = 2) -> None:
        command = [sys.executable, "-m", "oobleck.cli.main", "local", "--nodes", str(nodes)]
        self.process = subprocess.Popen(
            [*command, "--listen", choose_address(), "--state-dir", str(state_dir), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            umask=0,  # which is to open nothing
        )
        self.lines: list[str] = []
        self.family: set[psutil.Process] = set()

    def until(self, pattern: str) -> re.Match[str]:
        """Read lines up to one that matches."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.lines.append(line.rstrip("\n"))
            if found := re.fullmatch(pattern, self.lines[-1]):
                return found
        raise AssertionError(f"no {pattern!r} in {self.lines}")

    def remember(self) -> set[psutil.Process]:
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.family

    def daemons(self) -> dict[str, int]:
        """Pids by name, from the lines."""
        found = [re.fullmatch(r"(?:agent )?(\w+) (?:\S+ )?pid (\d+)", line) for line in self.lines]
        return {match[1]: int(match[2]) for match in found if match}


@pytest.fixture
def local(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Local]:
    running = Local(tmp_path / "state", *getattr(request, "param", ()))
    yield running
    if running.process.poll() is None:
        running.remember()
    end(running.process)
    all_gone(running.family)


def test_what_it_prints_what_it_starts_again_and_that_ctrl_c_leaves_nothing(
    local: Local, tmp_path: Path
) -> None:
    address = local.until(r"master (\S+) pid \d+")[1]
    local.until("ready")
    assert [re.sub(r"\d{2,}", "#", line) for line in local.lines] == [
        "master #.0.0.1:# pid #",
        "agent n1 pid #",
        "agent n2 pid #",
        re.sub(r"\d{2,}", "#", f"credentials {tmp_path}/state/pki/operator"),
        re.sub(r"\d{2,}", "#", f"state {tmp_path}/state"),
        "ready",
    ]
    until(lambda: len(local.remember()) >= 5, "all processes")
    assert len(local.family) == 5, "master, two agents, two warm processes"
    first = local.daemons()
    assert set(first.values()) < {process.pid for process in local.family}

    # An agent that dies is started again with its flags.
    command = psutil.Process(first["n2"]).cmdline()
    os.kill(first["n2"], signal.SIGKILL)
    local.until(r"agent n2 \(pid \d+\) was killed by SIGKILL; it restarts in 2 s")
    again = int(local.until(r"agent n2 pid (\d+)")[1])
    wait_for_nodes(address, {"n1": first["n1"], "n2": again})
    assert psutil.Process(again).cmdline() == command

    # One that was told to end stays away.
    local.remember()
    os.kill(again, signal.SIGTERM)
    local.until(r"agent n2 \(pid \d+\) ended with exit code 0; to restart it: .*")

    os.killpg(local.process.pid, signal.SIGINT)
    assert local.process.wait(PATIENCE_S) == 0
    all_gone(local.family)
    assert local.process.stderr is not None
    assert local.process.stderr.read() == ""


def test_it_takes_what_its_user_starts_and_nobody_else() -> None:
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        state = Path(open_to_all, "state")
        local = Local(state, nodes=1)
        agent = None
        try:
            address = local.until(r"master (\S+) pid \d+")[1]
            local.until("ready")
            for path in (state, *state.rglob("*")):
                assert path.stat().st_mode & 0o7777 == (0o700 if path.is_dir() else 0o600), path
            # As the page of commands has it, by its user: nothing but the address, if that.
            shown = run("nodes", "--json", environment={"OOBLECK_MASTER": address})
            assert [node["node"] for node in json.loads(shown.stdout)] == ["n1"]
            command = [sys.executable, "-m", "oobleck.agent", "--master", address, "--name", "n9"]
            agent = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)
            wait_for_nodes(address, {"n1": local.daemons()["n1"], "n9": agent.pid})
            flags = psutil.Process(local.daemons()["n1"]).cmdline()
            assert flags[flags.index("--allow-code") + 1] == "*"
            if os.geteuid() != 0:
                pytest.skip("only root can become another user, and see what that one gets")
            look_at_as_stranger(address, state)
        finally:
            local.remember()
            if agent is not None:
                end(agent)
            end(local.process)
            all_gone(local.family)


def look_at_as_stranger(address: str, state: Path) -> None:
    """Another user commands nothing, reads nothing, and is told why and what to do."""
    job = state.parent / "job.yaml"
    job.write_text(JOB)
    done = subprocess.run(
        [sys.executable, stranger.__file__, "65534", address, str(state), str(job)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    told = json.loads(done.stdout)
    for code, error in told["commands"].values():
        assert (code, error.count("\n")) == (5, 1), told
        assert f"denied: the master at {address} requires credentials" in error
        assert "another user's 'oobleck local', start your own and name it with --master" in error
    assert (told["asked"], told["readable"]) == ("", [])


def test_insecure_is_loud_and_lets_jobs_bring_no_code(tmp_path: Path) -> None:
    local = Local(tmp_path / "state", "--insecure", nodes=1)
    try:
        address = local.until(r"master (\S+) pid \d+")[1]
        local.until("ready")
        assert not [line for line in local.lines if "credentials" in line]
        flags = psutil.Process(local.daemons()["n1"]).cmdline()
        assert not {"--allow-code", "--accept-code"} & set(flags)
        with MasterClient(address) as connection:
            assert [node.node for node in connection.nodes()] == ["n1"]
    finally:
        local.remember()
        local.process.send_signal(signal.SIGTERM)
        _, errors = local.process.communicate(timeout=PATIENCE_S)
        all_gone(local.family)
    assert "warning: --insecure: every user of this host" in errors
    refusal = run("local", "--nodes", "1", "--insecure", "--listen", "198.51.100.1:1")
    assert refused(refusal, 2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_an_authority_that_another_user_put_there_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "pki").mkdir()
    os.chown(tmp_path / "pki", 65_534, 65_534)
    state = ("--state-dir", str(tmp_path), "--listen", "127.0.0.1:0")
    line = refused(run("local", "--nodes", "1", *state), 2)
    assert "pki belongs to another user (uid 65534), who could control the cluster" in line


def test_which_code_agents_load_is_said_of_each_flag(tmp_path: Path) -> None:
    def flags(*, private: bool, **given: Any) -> list[str]:
        return Cluster(tmp_path, **given)._code_flags(private=private)

    assert flags(private=True) == ["--allow-code", "*", "--accept-code"]
    assert flags(private=True, accept_code=False) == ["--allow-code", "*"]
    assert flags(private=True, allow_code=("mine",)) == ["--allow-code", "mine", "--accept-code"]
    assert flags(private=False) == []
    assert flags(private=False, accept_code=True) == ["--accept-code"]


def test_kill_9_while_it_starts_leaves_nothing(local: Local) -> None:
    local.until("agent n1 .*")
    local.remember()
    local.process.kill()
    local.process.wait()
    all_gone(local.family)


def test_the_last_daemon_is_started_again_too(tmp_path: Path) -> None:
    """It dies just when the master's end is told."""
    told: list[str] = []

    def hear(line: str) -> None:
        told.append(re.sub(r"\d{2,}", "#", line))
        if line.startswith("master (pid"):
            (agent,) = cluster.agents
            agent.process.kill()
            agent.process.wait()
        if told.count("agent n1 pid #") == 2:
            raise KeyboardInterrupt

    cluster = Cluster(tmp_path / "state", hear, restart=True)
    try:
        cluster.start("127.0.0.1:0", 1, 1, 1 << 30, None)
        cluster.wait_until_ready()
        assert cluster.master is not None
        cluster.master.process.kill()
        with pytest.raises(KeyboardInterrupt):
            cluster.watch(threading.Event())
    finally:
        cluster.stop()
    assert "agent n1 (pid #) was killed by SIGKILL; it restarts in 2 s" in told


def test_who_keeps_dying_is_started_again_later_each_time() -> None:
    assert [restart_pause_s(ends) for ends in (0, 1, 2, 3, 4, 5, 500)] == [2, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("local", [["--no-restart"]], indirect=True)
def test_an_agent_and_the_master_that_die_are_told_and_can_be_started_again(
    local: Local, tmp_path: Path
) -> None:
    address = local.until(r"master (\S+) pid \d+")[1]
    local.until("ready")
    daemons = local.daemons()
    os.kill(daemons["n2"], signal.SIGKILL)
    told = local.until(
        r"agent n2 \(pid \d+\) was killed by SIGKILL; to restart it: (oobleck-agent .*)"
    )
    assert local.process.poll() is None
    assert " --memory-per-worker " in told[1]
    command = [sys.executable, "-m", "oobleck.agent", *shlex.split(told[1])[1:]]
    agent = subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True)
    master = None
    try:
        wait_for_nodes(address, {"n1": daemons["n1"], "n2": agent.pid})

        os.kill(daemons["master"], signal.SIGKILL)
        told = local.until(
            r"master \(pid \d+\) was killed by SIGKILL; training goes on without it; "
            r"to restart it: (oobleck-master .*)"
        )
        assert address in told[1]
        command = [sys.executable, "-m", "oobleck.master", *shlex.split(told[1])[1:]]
        master = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        wait_for_nodes(address, {"n1": daemons["n1"], "n2": agent.pid})
        line = refused(
            run("local", "--nodes", "1", "--state-dir", str(tmp_path / "state"), timeout_s=60), 2
        )
        assert f"is in use by another master (pid {master.pid})" in line

        local.remember()
        local.process.kill()
        local.process.wait()
        all_gone(local.family)
    finally:
        for one in (agent, master):
            if one is not None:
                end(one)


def test_agents_that_all_refuse_end_it_at_once(tmp_path: Path) -> None:
    faults = tmp_path / "faults.json"
    faults.write_text("no list")
    arguments = ("--state-dir", str(tmp_path), "--fault-plan", str(faults))
    result = run("local", "--nodes", "1", "--listen", "127.0.0.1:0", *arguments)
    assert result.returncode == 1
    assert "give a JSON list of faults" in result.stdout
    assert result.stderr.startswith("oobleck: every agent ended before it registered; see ")


def test_an_agent_that_ends_while_the_master_is_asked_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "faults.json").write_text("no list")
    told: list[str] = []
    cluster = Cluster(tmp_path / "state", told.append)
    ask = MasterClient.nodes

    def ask_for_long(client: MasterClient) -> Sequence[NodeInfo]:
        until(lambda: not cluster.agents[0].alive, "the agent's end")
        return ask(client)

    monkeypatch.setattr(MasterClient, "nodes", ask_for_long)
    try:
        cluster.start("127.0.0.1:0", 1, 1, 1 << 30, tmp_path / "faults.json")
        with pytest.raises(CommandFailed, match="every agent ended before it registered"):
            cluster.wait_until_ready()
    finally:
        cluster.stop()
        assert cluster.master is not None
        assert cluster.master.process.stdout is not None
        cluster.master.process.stdout.close()
    assert "give a JSON list of faults" in told[-1]


def wait_for_nodes(address: str, pids: dict[str, int]) -> None:
    """The master knows exactly these nodes as live, with these pids."""

    def live() -> dict[str, int]:
        try:
            with MasterClient(address) as connection:
                nodes = connection.nodes()
        except CommandFailed:
            return {}  # not up yet
        return {node.node: node.pid for node in nodes if node.state == "live"}

    until(lambda: live() == pids, f"the nodes {pids}", poll_s=0.1)


def test_a_cluster_that_memory_cannot_hold_is_refused_with_the_limit() -> None:
    cores = os.cpu_count() or 1
    nodes = min(16 * cores, psutil.virtual_memory().total // NODE_BYTES + 1)
    if 16 * cores == nodes:
        nodes += 1
        assert f"limit: {16 * cores}" in refused(run("local", "--nodes", str(nodes)), 2)
    else:
        assert "MiB are free" in refused(run("local", "--nodes", str(nodes)), 2)


def test_what_the_master_keeps_is_the_master_s_to_refuse(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path), "--listen", "127.0.0.1:0")
    few = run("local", "--nodes", "1", *state, "--keep-jobs", "0")
    assert "--keep-jobs 0: is too few" in refused(few, 2)
    short = run("local", "--nodes", "1", *state, "--forget-nodes-after", "1s")
    assert "--forget-nodes-after: 1 s is too short" in refused(short, 2)


def test_a_master_that_says_nothing_is_told_of_with_where_it_would(tmp_path: Path) -> None:
    """As where the disk of its log is full."""
    state = tmp_path / "state"
    (state / "log").mkdir(parents=True)
    (state / "log" / "master.log").symlink_to("/dev/null")
    (state / "journal.log").write_text("no journal " * 100)
    line = refused(run("local", "--nodes", "1", "--state-dir", str(state)), 2)
    assert "ended with exit code 2" in line
    assert f"{state}/log/master.log is empty" in line
