"""deploy/slurm/oobleck.sbatch on a real Slurm: what it outlives, and how it is drained and goes on.

The nodes are slurmds on this machine. What takes minutes is for `make soak`.
"""

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.folders import ROOT
from support.slurm import Slurm, missing

SCRIPT = ROOT / "deploy" / "slurm" / "oobleck.sbatch"
NODES = 4
ALL = {f"node-{number}" for number in range(1, NODES + 1)}


def test_the_script_is_one_to_bash() -> None:
    done = subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing() -> None:
    done = subprocess.run(["shellcheck", str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("address", "pattern", "given", "rack"),
    [
        ("top.leaf3.node-1", "switch.switch.node", None, "leaf3"),
        ("top.leaf3.node-1", "switch.switch.node", "mine", "mine"),
        ("node-1", "node", None, ""),
    ],
)
def test_an_agents_rack_is_the_leaf_switch(
    tmp_path: Path, address: str, pattern: str, given: str | None, rack: str
) -> None:
    for name, does in (("oobleck", ""), ("oobleck-agent", 'echo "[$OOBLECK_RACK]"')):
        command = tmp_path / name
        command.write_text(f"#!/bin/sh\n{does}\n")
        command.chmod(0o755)
    text = SCRIPT.read_text()
    body = text[text.index("run_agent() {") : text.index("export -f run_agent")]
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "STATE": str(tmp_path),
        "OOBLECK_MASTER": "h:1",
        "SLURMD_NODENAME": "node-1",
        "SLURM_TOPOLOGY_ADDR": address,
        "AGENT_OPTIONS": "",
        "SLURM_TOPOLOGY_ADDR_PATTERN": pattern,
        **({} if given is None else {"OOBLECK_RACK": given}),
    }
    script = f"set -u; watch_head() {{ :; }}\n{body}\nrun_agent"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (0, f"[{rack}]\n"), done.stderr


class Submitted:
    """A job of the script's."""

    def __init__(self, slurm: Slurm, home: Path, spec: dict[str, Any]) -> None:
        self.slurm = slurm
        self.home = home
        (home / "job.yaml").write_text(json.dumps(spec))
        (home / "oobleck-state" / "env").unlink(missing_ok=True)
        options = ("--parsable", "--cpus-per-task=1", "--time=60", "--output=slurm.out")
        self.number = slurm.run("sbatch", *options, str(SCRIPT), "job.yaml", cwd=home).strip()

    def oobleck(self, words: str) -> str:
        """As somebody who has read the file that the script leaves."""
        return self.slurm.run("bash", "-c", f". oobleck-state/env && {words}", cwd=self.home)

    def job(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.oobleck("oobleck jobs --json"))[-1]
        return found

    def live(self) -> set[str]:
        nodes = json.loads(self.oobleck("oobleck nodes --json"))
        return {node["node"] for node in nodes if node["state"] == "live"}

    def trains_on(self, beyond: int = 0) -> int:
        """A step that is committed later than now, and behind `beyond`."""
        beyond = max(beyond, self.job()["committed_step"]) + 20
        self.slurm.until(lambda: self.job()["committed_step"] > beyond, f"step {beyond}")
        return int(self.job()["committed_step"])

    def saved(self) -> int:
        """The step of the newest checkpoint."""
        return max(int(path.name.split("-")[1]) for path in (self.home / "saved").glob("step-*"))

    def state(self) -> str:
        return self.slurm.job(self.number)["JobState"]


def agent_of(node: str) -> psutil.Process:
    """The program, below the shell that is the task."""
    found = [one for one in psutil.process_iter() if is_agent(one, node)]
    assert len(found) == 1, f"agents of {node}: {found}"
    return found[0]


def is_agent(process: psutil.Process, node: str = "") -> bool:
    words = cmdline(process)
    return any(word.endswith("/oobleck-agent") for word in words) and (not node or node in words)


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def kill_node(slurm: Slurm, name: str) -> None:
    """Its slurmd, and all that it has started there."""
    slurm.kill_node(name)
    agent = name.lower().replace("_", "-")
    for process in list(psutil.process_iter()):
        words = " ".join(cmdline(process))
        if words.startswith("slurmstepd: ["):
            below = process.children(recursive=True)
            if any(is_agent(one, agent) for one in below) or (
                name == slurm.names[0] and ".batch]" in words
            ):
                for one in (process, *below):
                    with suppress(psutil.NoSuchProcess):
                        one.kill()


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if reason := missing():
        pytest.skip(reason)
    with Slurm(tmp_path / "slurm", NODES) as cluster:
        cluster.environment |= {"OMP_NUM_THREADS": "1", "OOBLECK_HEAD_LOST_S": "20"}
        yield cluster


@pytest.mark.soak
@pytest.mark.cluster
@pytest.mark.timeout(1500)
def test_a_job_on_slurm_outlives_tasks_nodes_and_the_job_of_slurm_itself(
    slurm: Slurm, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "corpus.txt").write_text("drain the nodes and go on " * 400)
    spec = {
        "name": "tiny",
        "model": {"kind": "gpt", "layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
        "data": {"text": ["corpus.txt"]},
        "training": {"steps": 1_000_000, "global_batch": 16, "microbatch": 1},
        "checkpoint": {"path": "saved", "every": 200},
        "profile": "estimate",
    }
    submitted = Submitted(slurm, home, spec)
    slurm.until(lambda: submitted.live() == ALL, "all nodes")
    submitted.trains_on()

    # An agent that dies is started again.
    first = agent_of("node-2")
    first.kill()
    slurm.until(lambda: agent_of("node-2") != first and submitted.live() == ALL, "node-2 again")
    submitted.trains_on()

    # A task that dies, though the configuration would end the others two seconds later.
    agent = agent_of("node-4")
    ended_at = time.monotonic()
    for process in (agent.parent(), agent):
        assert process is not None
        process.kill()
    slurm.until(lambda: submitted.live() == ALL - {"node-4"}, "node-4 lost")
    slurm.until(lambda: time.monotonic() > ended_at + 6, "WaitTime")
    assert submitted.live() == ALL - {"node-4"}

    # A node that dies, until Slurm knows.
    kill_node(slurm, "Node_3")
    slurm.until(lambda: submitted.live() == {"node-1", "node-2"}, "node-3 lost")
    states = ("sinfo", "--Node", "--noheader", "--nodes=Node_3", "--format=%t")
    slurm.until(lambda: slurm.run(*states).startswith("down"), "Node_3 down")
    assert submitted.state() == "RUNNING"
    before = submitted.trains_on()
    slurm.start_node("Node_3")

    # All are told to end: they drain, a checkpoint is saved, and the job is queued again.
    slurm.run("scancel", "--signal=TERM", submitted.number)
    slurm.until(lambda: slurm.job(submitted.number)["Restarts"] == "1", "the requeue")
    saved = submitted.saved()
    assert saved >= before
    slurm.at_once(submitted.number)
    slurm.until(lambda: submitted.live() == ALL, "all nodes again")
    before = submitted.trains_on(saved)
    assert submitted.job()["job_id"] == "tiny-1"

    # The first node dies, and the master and the script with it: Slurm keeps the job, with nobody
    # to plan, until an agent's task says so.
    kill_node(slurm, "Node_1")
    slurm.until(lambda: slurm.job(submitted.number)["Restarts"] == "2", "the requeue by a task")
    slurm.start_node("Node_1")
    slurm.at_once(submitted.number)
    slurm.until(lambda: submitted.live() == ALL, "all nodes after the first one's death")
    before = submitted.trains_on(submitted.saved())

    # Preemption drains it too.
    (home / "high.sbatch").write_text("#!/bin/bash\nsleep 1\n")
    options = ("--parsable", "--partition=high", f"--nodes={NODES}", "--exclusive")
    high = slurm.run("sbatch", *options, "high.sbatch", cwd=home).strip()
    slurm.until(lambda: slurm.job(high)["JobState"] == "COMPLETED", "the job that preempts")
    assert slurm.job(submitted.number)["Restarts"] == "3"
    saved = submitted.saved()
    assert saved >= before
    slurm.at_once(submitted.number)
    slurm.until(lambda: submitted.live() == ALL, "all nodes once more")
    submitted.trains_on(saved)
    submitted.oobleck("oobleck cancel tiny-1")
    slurm.until(lambda: submitted.state() == "FAILED", "the end of what was cancelled")

    steps = [
        json.loads(line)["step"]
        for line in (home / "oobleck-state/jobs/tiny-1/metrics.jsonl").read_text().splitlines()
    ]
    assert steps == list(range(1, len(steps) + 1)), "each step once, whatever was lost"

    # The same folder takes the next job, whose end is the end of all.
    spec["training"] = {"steps": 30, "global_batch": 16, "microbatch": 1}
    del spec["checkpoint"]
    last = Submitted(slurm, home, spec)
    slurm.until(lambda: last.state() == "COMPLETED", "the end")
    assert not [
        one for one in psutil.process_iter() if is_agent(one) and str(home) in str(cmdline(one))
    ]
    assert not list((home / "oobleck-state" / "tokens").rglob("*")) or all(
        path.stat().st_mode & 0o077 == 0 for path in (home / "oobleck-state" / "tokens").rglob("*")
    )
