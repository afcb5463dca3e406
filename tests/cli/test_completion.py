"""What a shell completes: commands, options, and names that the master knows."""

import shutil
import subprocess

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from bench.support.client import BIN
from oobleck.cli.main import COMMANDS, oobleck
from oobleck.proto import control_pb2 as pb
from support.operators_master import answering

ANSWERS = {
    "ListJobs": lambda request: pb.ListJobsReply(
        jobs=[pb.JobStatus(job_id=name, state="running") for name in ("demo-1", "demo-2", "x-3")]
    ),
    "ListNodes": lambda request: pb.ListNodesReply(
        nodes=[pb.NodeInfo(node=name, state="live") for name in ("n1", "n2", "gpu")]
    ),
}


def completed(*words: str) -> list[str]:
    """What the last of `words` may become."""
    asked = ShellComplete(oobleck, {}, "oobleck", "_OOBLECK_COMPLETE")
    return [item.value for item in asked.get_completions([*words[:-1]], words[-1])]


def test_names_of_jobs_and_nodes_come_from_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(**ANSWERS) as address:
        monkeypatch.setenv("OOBLECK_MASTER", address)
        assert completed("status", "de") == ["demo-1", "demo-2"]
        assert completed("node", "drain", "n") == ["n1", "n2"]
        assert completed("logs", "demo-1", "--node", "g") == ["gpu"]
        monkeypatch.setenv("OOBLECK_MASTER", "127.0.0.1:1")
        # The master that the line names counts.
        assert completed("cancel", "--master", address, "x") == ["x-3"]


def test_without_a_master_there_are_commands_and_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1:1", "no address"):
        monkeypatch.setenv("OOBLECK_MASTER", address)
        assert completed("status", "") == []
    assert completed("com") == ["completion"]
    assert set(completed("")) == set(COMMANDS)
    assert "--since" in completed("logs", "--si")


def test_a_wrong_word_before_prints_no_error_into_the_line() -> None:
    assert "drain" in completed("node", "dran", "")
    assert set(completed("jobz", "")) == set(COMMANDS)
    for words in (("jobs", "demo-1"), ("checkpoint", "lst"), ("checkpoint", "demo-1", "now")):
        completed(*words, "")


def printed(shell: str) -> str:
    return CliRunner().invoke(oobleck, ["completion", shell], prog_name="oobleck").stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_takes_what_is_printed(shell: str) -> None:
    done = printed(shell)
    assert "_OOBLECK_COMPLETE=" in done
    if shutil.which(shell):
        checked = subprocess.run([shell, "-n"], input=done, text=True, check=False)
        assert checked.returncode == 0


def test_bash_completes_a_command() -> None:
    """The whole way, of what bash is given."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash here")
    script = (
        f"{printed('bash')}\n"
        "COMP_WORDS=(oobleck chec); COMP_CWORD=1\n"
        f'_oobleck_completion {BIN}/oobleck; echo "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run([bash, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("check checkpoint\n", "")
