"""What of an agent's environment its workers get."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from oobleck.agent.config import passed_on, read_patterns
from support.waiting import PATIENCE_S, until

AGENT = [sys.executable, "-m", "oobleck.agent"]


def test_workers_get_what_they_need_and_no_more() -> None:
    needed = dict.fromkeys(
        (
            *("PATH", "HOME", "LC_ALL", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NCCL_DEBUG"),
            *("RDMAV_FORK_SAFE", "CC", "NVSHMEM_DEBUG", "UCC_TLS", "STORAGE_EMULATOR_HOST"),
        ),
        "x",
    )
    foreign = dict.fromkeys(
        ("OOBLECK_JOIN_TOKEN", "HF_TOKEN", "GITHUB_TOKEN", "DB_PASSWORD", "SSH_AUTH_SOCK"), "x"
    )
    assert passed_on(needed | foreign) == needed


def test_operators_name_what_else_workers_get() -> None:
    more = read_patterns(["HF_TOKEN, MY_*", "JAVA_HOME"])
    environment = dict.fromkeys(("HF_TOKEN", "MY_A", "MY_B", "JAVA_HOME", "JAVA_OPTS"), "x")
    assert set(passed_on(environment, more)) == set(environment) - {"JAVA_OPTS"}


@pytest.mark.parametrize("text", ["", "A,", "*", "A B", "A=1", "*_TOKEN"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="give names of variables"):
        read_patterns([text])


def test_what_workers_are_forked_from_does_not_have_the_agents_secrets(tmp_path: Path) -> None:
    log = tmp_path / "log"
    secrets = {"DB_PASSWORD": "hush", "PLUGIN_MODE": "fast"}
    with log.open("w") as output:
        agent = subprocess.Popen(
            [*AGENT, "--master", "127.0.0.1:1", "--pass-env", "PLUGIN_*"],
            stderr=output,
            env={**os.environ, **secrets},
        )
    try:
        process = psutil.Process(agent.pid)
        until(lambda: bool(process.children()), "its warm process")
        (warm,) = process.children()
        until(lambda: "oobleck.worker.warm" in warm.cmdline(), "its command")
        environment = warm.environ()
        assert "DB_PASSWORD" not in environment
        assert environment["PLUGIN_MODE"] == "fast"
        assert environment["PATH"] == os.environ["PATH"]
    finally:
        agent.terminate()
        assert agent.wait(PATIENCE_S) == 0
    assert "not passed to workers; --pass-env NAME names those that they need" in log.read_text()
    assert "the master is called in the clear" in log.read_text()
    told = "runs as root" in log.read_text()
    assert told == (os.geteuid() == 0), "who is root is told"
