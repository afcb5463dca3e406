"""The master's process: what its flags refuse, and how it ends."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil
import pytest

from oobleck.core.ids import JobId
from oobleck.host.detection import Detection
from oobleck.host.ipc.endpoint import OwnMaster, find_own_master
from oobleck.host.system.environment import Environment
from oobleck.host.system.process import end_signals
from oobleck.master.config import MasterConfig
from oobleck.master.events.jobs import JobSubmitted
from oobleck.master.server import announce
from oobleck.master.storage.journal import Journal
from oobleck.master.storage.ledger import Ledger
from support.forked import run_forked
from support.jobs import job_spec
from support.masters import MasterProcess, master
from support.waiting import PATIENCE_S, all_gone


def refused(*arguments: str, code: int = 2) -> str:
    """Run a master that is to refuse its flags, or what they name; returns its one line."""
    done = run_forked("oobleck-master", *arguments)
    assert done.returncode == code, done
    assert done.stdout == ""
    lines = [line for line in done.stderr.splitlines() if " INFO " not in line]
    assert len(lines) == 1, done.stderr
    return lines[0]


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = refused("--listen", address, "--state-dir", str(tmp_path))
    assert line.startswith(f"oobleck-master: --listen {address} cannot be bound")


@pytest.mark.parametrize("address", ["", "9460"])
def test_no_address_for_metrics(tmp_path: Path, address: str) -> None:
    flags = ("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    line = refused(*flags, "--metrics-listen", address)
    assert line.startswith(f"oobleck-master: --metrics-listen: {address!r} is not HOST:PORT")


def test_a_port_for_metrics_or_health_that_is_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = ("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
        for flag in ("--metrics-listen", "--health-listen"):
            line = refused(*flags, flag, address)
            assert line.startswith(f"oobleck-master: {flag} {address} cannot be bound")
    with contextlib.closing(Journal(tmp_path / "journal.log")) as journal:
        assert list(journal.replay()) == [], "no master has started"


def test_one_port_for_two(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    flags = ("--listen", address, "--state-dir", str(tmp_path))
    line = refused(*flags, "--metrics-listen", address)
    assert line.startswith(f"oobleck-master: --metrics-listen {address} cannot be bound")


def test_a_second_master_of_one_port(tmp_path: Path) -> None:
    with master(tmp_path / "a") as first:
        line = refused("--listen", first.address, "--state-dir", str(tmp_path / "b"))
    assert "Address already in use" in line


def test_a_second_master_of_one_state_directory(tmp_path: Path) -> None:
    with master(tmp_path / "state") as first:
        line = refused("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
        assert f"is in use by another master (pid {first.process.pid})" in line


def test_a_state_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = refused("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "file"))
    assert "cannot be written" in line


def test_a_state_directory_that_no_file_system_takes(tmp_path: Path) -> None:
    line = refused("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / ("x" * 300)))
    assert line.endswith("File name too long; choose another one")


def test_a_journal_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "journal.log"
    path.write_text("no journal " * 100)
    line = refused("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path))
    assert "is not a journal of Oobleck" in line
    assert "move this one away to start anew" in line
    assert path.read_text() == "no journal " * 100


@pytest.mark.parametrize("name", ["journal.log", "jobs/demo-1/metrics.jsonl"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_in_the_place_of_one(tmp_path: Path, name: str, kind: str) -> None:
    """To read a pipe or a device would never end."""
    state = tmp_path / "state"
    config = MasterConfig(listen="127.0.0.1:0", state_dir=state, timing=Detection())
    state.mkdir()
    with contextlib.closing(Journal(state / "journal.log")) as journal:
        ledger = Ledger(config, journal, Environment())
        ledger.journal(JobSubmitted(job_id=JobId("demo-1"), request_id="r", spec=job_spec("demo")))
        assert ledger.commit()
    path = state / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to("/dev/zero")
    code = 2 if name == "journal.log" else 1
    line = refused("--listen", "127.0.0.1:0", "--state-dir", str(state), code=code)
    assert f"{path} is not a regular file" in line
    assert "move" in line


def test_a_state_directory_is_held_though_its_lock_takes_no_text(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.mkfifo(state / "lock")
    with master(state):
        line = refused("--listen", "127.0.0.1:0", "--state-dir", str(state))
    assert "is in use by another master (pid unknown)" in line


def test_no_state_directory() -> None:
    assert "--state-dir: is empty" in refused("--state-dir", "")


@pytest.mark.parametrize(
    ("flag", "value", "wanted"),
    [
        ("--listen", "nowhere", "--listen: 'nowhere' is not HOST:PORT"),
        ("--listen", "127.0.0.1:99999", "is not HOST:PORT"),
        ("--heartbeat-s", "-1", "heartbeat_s: -1.0"),
    ],
)
def test_a_flag_that_makes_no_sense(tmp_path: Path, flag: str, value: str, wanted: str) -> None:
    assert wanted in refused("--state-dir", str(tmp_path), flag, value)


@pytest.mark.parametrize("signum", [signal.SIGTERM, *end_signals()])
def test_a_signal_ends_it_quickly_and_without_a_traceback(
    tmp_path: Path, signum: signal.Signals
) -> None:
    running = MasterProcess(tmp_path / "state")
    running.process.send_signal(signum)
    assert running.process.wait(timeout=PATIENCE_S) == 0
    running.close()
    assert "Traceback" not in running.errors.read_text()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-m', 'oobleck.master', '--exit-with-parent',"
        f" '--listen', '127.0.0.1:0', '--state-dir', {str(tmp_path / 'state')!r}],"
        " stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    parent.stdin.close()
    all_gone([child])


def started(
    folder: Path, stdout: IO[str] | int, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """A module, run to its end in `folder`."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("oobleck.master", "--state-dir", "state", "--listen", "127.0.0.1:0"),
        ("oobleck.master", "--help"),
        ("oobleck.agent", "--help"),
    ],
    ids=" ".join,
)
def test_an_output_that_takes_nothing_is_told_in_a_line(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    with open("/dev/full", "w") as full:
        done = started(tmp_path, full, *arguments)
    lines = [line for line in done.stderr.splitlines() if not re.match(r"\S+Z [A-Z]+ ", line)]
    assert (done.returncode, len(lines)) == (6, 1), done.stderr
    name = arguments[0].replace(".", "-")
    told = f"{name}: standard output cannot be written: No space left on device"
    assert lines[0] == told
    assert ("this master asks nobody who they are" in done.stderr) == ("--listen" in arguments)


def test_a_name_that_another_user_has_taken_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{port.getsockname()[1]}"
        config = MasterConfig(
            listen=address, state_dir=tmp_path, timing=Detection(), pki=tmp_path / "pki"
        )
        with announce(config, address), announce(config, address):
            assert find_own_master(address) == OwnMaster(pki=tmp_path / "pki", private=True)
    (told,) = caplog.records
    assert told.getMessage() == "your own commands do not find this master's credentials"


def test_a_master_that_can_tell_its_address_to_nobody_does_not_end_as_told(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        arguments = ("oobleck.master", "--state-dir", "s", "--listen", "127.0.0.1:0")
        done = started(tmp_path, writer, *arguments)
    finally:
        os.close(writer)
    told = "oobleck-master: standard output cannot be written: Broken pipe"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (6, told), done.stderr
