"""`oobleck-agent` as users start it: its errors, its end with its parent, a master that freezes."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import psutil
import pytest

from oobleck.agent.__main__ import (
    default_name,
    read_code,
    read_faults,
)
from oobleck.agent.connection.heads import local_address
from oobleck.agent.gpus import default_memory
from oobleck.host.gpu.devices import Gpu
from oobleck.planner.profile.memory import GPU_CONTEXT_BYTES, gpu_reserve_bytes
from support.commands import end, start_agent, start_master
from support.forked import run_forked
from support.waiting import PATIENCE_S, all_gone, is_stopped, until

AGENT = [sys.executable, "-m", "oobleck.agent"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (
            ["--master", "host:1", "--device", "cuda", "--gpus", "0,1"],
            "no GPU can be used here (0: torch",
        ),
        (["--master", "host:1", "--gpus", "0"], "give --device cuda too"),
        (["--master", "host:1", "--interface", "nosuch0"], "this host has no such interface"),
        (["--master", "host:1", "--hca", "nosuch0"], "this host has no adapter 'nosuch0'"),
        (["--master", "host"], "write it as HOST:PORT"),
        (["--master", "host:99999"], "write it as HOST:PORT"),
        (["--master", "http://host:1"], "write it as HOST:PORT"),
        (["--master", "host:1", "--address", "8.8.8.8"], "no worker can listen there"),
        (["--master", "host:1", "--address", "no.such.host.invalid"], "does not resolve"),
        (["--master", "host:1", "--address", "0.0.0.0"], "nobody can connect to it"),
        (["--master", "host:1", "--workers", "100000"], "a node has at most 1024"),
        (["--master", "host:1", "--memory-per-worker", "9999999999PiB"], "more than any host has"),
        (["--master", "host:1", "--name", "A B"], "node name 'A B' is not allowed"),
        (["--master", "host:1", "--rack", "r 1"], "--rack or OOBLECK_RACK: rack 'r 1' is not"),
        (["--master", "host:1", "--workers", "0"], "at least one worker"),
        (["--master", "host:1", "--workers-per-node", "0"], "at least one worker"),
        (["--master", "host:1", "--memory-per-worker", "lots"], "--memory-per-worker: 'lots'"),
        (["--master", "host:1", "--fault-plan", __file__], "give a JSON list of faults"),
        (["--master", "host:1", "--fault-plan", "/dev/zero"], "the file is not a regular file"),
        (["--master", "127.0.0.1:1", "--metrics-listen", "9461"], "is not HOST:PORT"),
        ([], "Missing option '--master'"),
    ],
    ids=lambda value: " ".join(map(os.path.basename, value)) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line(arguments: list[str], part: str) -> None:
    result = run_forked("oobleck-agent", *arguments)
    assert result.returncode == 2
    (line,) = result.stderr.strip().split("\n")
    assert line.startswith("oobleck-agent: ")
    assert part in line


@pytest.mark.parametrize(
    ("hostname", "name"),
    [("gpu-07.example.org", "gpu-07.example.org"), ("My_Host!", "my_host"), ("---", "node")],
)
def test_default_name_is_allowed(hostname: str, name: str) -> None:
    assert default_name(hostname) == name


def test_code_is_loaded_only_if_the_agent_says_so_or_its_user_alone_submits_jobs() -> None:
    assert read_code((), None, any_by_default=True) == (("*",), True)
    assert read_code((), None, any_by_default=False) == ((), False)
    assert read_code(("mine",), False, any_by_default=True) == (("mine",), False)
    mine = str(Path.home() / "mine")
    assert read_code(("~/mine",), True, any_by_default=False) == ((mine,), True)


def test_a_host_whose_name_is_no_text_registers_by_one_that_is() -> None:
    code = (
        "import socket; socket.sethostname(b'gr\\xfcn'); "
        "from oobleck.host.address import own_hostname; print(own_hostname())"
    )
    command = ["unshare", "--uts", sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert told.stdout == "gr\\udcfcn\n"


def test_a_fault_plan_of_any_size_is_not_read(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(ValueError, match="the file has 1048577 bytes, more than 1048576"):
        read_faults(plan)


def test_local_address_is_the_one_that_reaches_the_master() -> None:
    assert local_address(["127.0.0.1:4600"]) == "127.0.0.1"
    assert local_address(["[::1]:4600"]) == "::1"


def test_it_keeps_trying_and_says_why_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        agent = start_agent(address, "n1", errors=subprocess.PIPE)
        with open_errors(agent) as errors:
            assert "Connection refused" in wait_for_line(errors, "no session")
            time.sleep(2.0)  # for further tries
            probe.listen()
            probe.settimeout(PATIENCE_S)
            connection, _ = probe.accept()
            agent.send_signal(signal.SIGTERM)
            assert agent.wait(PATIENCE_S) == 0
            connection.close()
            assert "Connection refused" not in errors.read()


def test_it_ends_with_its_parent() -> None:
    code = (
        "import subprocess, sys, time; "
        "p = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL); "
        "print(p.pid, flush=True); time.sleep(600)"
    )
    command = [*AGENT, "--master", "127.0.0.1:1", "--exit-with-parent"]
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    agent = psutil.Process(int(parent.stdout.readline()))
    until(agent.children, "its warm process")
    (warm,) = agent.children()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    all_gone([agent, warm])


def test_a_stopped_warm_process_ends_with_a_killed_agent() -> None:
    """The product's own, with torch loaded: nothing in it can run, so the kernel must end it."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
    agent = subprocess.Popen(
        [*AGENT, "--master", address, "--name", "n1"],
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process = psutil.Process(agent.pid)
        until(process.children, "the warm process")
        (warm,) = process.children()
        until(lambda: handles(warm.pid, signal.SIGCHLD), "its readiness to fork")
        warm.send_signal(signal.SIGSTOP)
        until(lambda: is_stopped(warm.pid), "its stop")
    finally:
        agent.kill()
        agent.wait()
    all_gone([warm])


def handles(pid: int, signum: signal.Signals) -> bool:
    """Whether the process has a handler of its own for the signal."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return caught is not None and bool(int(caught[1], 16) >> signum - 1 & 1)


def test_a_frozen_master_is_noticed_and_found_again(tmp_path: Path) -> None:
    master, address = start_master(tmp_path)
    agent = start_agent(address, "n1", errors=subprocess.PIPE)
    with open_errors(agent) as errors:
        wait_for_line(errors, "session began")
        master.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        wait_for_line(errors, "no session")
        assert time.monotonic() - began < 30, "without its own time-outs gRPC takes 45 s"
        master.send_signal(signal.SIGCONT)
        wait_for_line(errors, "session began")
        agent.send_signal(signal.SIGTERM)
        assert agent.wait(PATIENCE_S) == 0
    end(master)


def open_errors(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stderr is not None
    return process.stderr


def wait_for_line(stream: IO[str], pattern: str) -> str:
    for line in stream:
        if re.search(pattern, line):
            return line
    raise AssertionError(f"the agent ended before {pattern!r}")


@pytest.mark.parametrize(
    ("workers", "gpus", "expected"),
    [(2, 2, (80 << 30) - gpu_reserve_bytes(2)), (4, 2, (40 << 30) - gpu_reserve_bytes(4))],
)
def test_plans_do_not_count_on_all_of_a_gpus_memory(workers: int, gpus: int, expected: int) -> None:
    found = [Gpu(name="H100", uuid=str(number), memory_bytes=80 << 30) for number in range(gpus)]
    assert default_memory(workers, found, GPU_CONTEXT_BYTES) == expected
    measured = GPU_CONTEXT_BYTES // 2
    assert default_memory(workers, found, measured) == expected + GPU_CONTEXT_BYTES - measured


def test_of_a_small_gpu_half_is_left_for_plans() -> None:
    small = [Gpu(name="T", uuid="0", memory_bytes=3 << 30)]
    assert default_memory(1, small, GPU_CONTEXT_BYTES) == 3 << 29
