"""A Slurm cluster of Debian's packages on this machine: munged, slurmctld, a slurmd for each node.

All of its files are in one folder, all of its ports in a network namespace. Needs root, as slurmd
does.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.support.client import BIN
from bench.support.network import Network, unusable

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "scontrol", "scancel", "srun")
#: Debian puts daemons there, which not every shell looks into.
PATH = f"{BIN}:{os.environ['PATH']}:/usr/sbin:/sbin"
DEADLINE_S = 240.0
_HOST = "head"

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=20
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# As an administrator may have it: what ends all tasks soon after the first one.
WaitTime=2
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=2 PreemptMode=OFF
"""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"


def missing() -> str:
    """Why there can be no cluster; empty: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"{', '.join(absent)} is not installed (slurmctld, slurmd, slurm-client, munge)"
    return unusable()


class Slurm:
    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.names = [f"Node_{number}" for number in range(1, nodes + 1)]
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        configuration = folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(configuration)}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name in ("state", *(f"spool-{node}" for node in self.names)):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        host = socket.gethostname()
        text = CONFIGURATION.format(host=host, folder=self.folder)
        for port, name in enumerate(self.names, 7001):
            text += NODE.format(name=name, host=host, port=port)
        (self.folder / "slurm.conf").write_text(text)
        with ExitStack() as stack:
            network = stack.enter_context(Network([_HOST]))
            self._on = network.on(_HOST)
            stack.callback(self._end)
            files = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "seed")]
            self.start("munged", "-F", "-f", f"--socket={self.folder}/munge.socket", *files)
            self.until((self.folder / "munge.socket").exists, "munged")
            self.start("slurmctld", "-D")
            for name in self.names:
                self.start_node(name)
            self.until(lambda: self.idle() == set(self.names), "all nodes")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _end(self) -> None:
        with suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self.until(lambda: not self.run("squeue", "--noheader"), "the end of all jobs")
        for daemon in reversed(list(self.daemons.values())):
            daemon.terminate()
            with suppress(subprocess.TimeoutExpired):
                daemon.wait(20)
            daemon.kill()
            daemon.wait()

    def start(self, program: str, *options: str, name: str = "") -> None:
        """A daemon, which is known by the name or as the program."""
        found = shutil.which(program, path=PATH)
        assert found is not None
        with (self.folder / f"{name or program}.out").open("ab") as output:
            self.daemons[name or program] = subprocess.Popen(
                [*self._on, found, *options], env=self.environment, stdout=output, stderr=output
            )

    def start_node(self, name: str) -> None:
        self.start("slurmd", "-D", "-N", name, name=name)

    def kill_node(self, name: str) -> None:
        """Its slurmd; what that has started goes on."""
        self.daemons[name].kill()
        self.daemons[name].wait()

    def command(
        self, *words: str, cwd: Path | None = None, more: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """It runs where the cluster is."""
        return subprocess.run(
            [*self._on, *words],
            env={**self.environment, **(more or {})},
            cwd=cwd,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def run(self, *words: str, cwd: Path | None = None) -> str:
        done = self.command(*words, cwd=cwd)
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def idle(self) -> set[str]:
        lines = self.run("sinfo", "--Node", "--noheader", "--partition=low", "--format=%N %t")
        return {name for name, state in map(str.split, lines.splitlines()) if state == "idle"}

    def job(self, number: str) -> dict[str, str]:
        """What is known of it, by scontrol's names."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(pair.split("=", 1) for pair in shown.split() if "=" in pair)

    def at_once(self, number: str) -> None:
        """Have a job that was requeued start soon: Slurm has it wait for two minutes. A node
        refuses it within the second in which it was ended there."""
        self.until(lambda: self.job(number)["JobState"] == "PENDING", f"{number} is pending")
        self.run("scontrol", "update", f"JobId={number}", "StartTime=now+4")
        self.until(lambda: self.job(number)["JobState"] == "RUNNING", f"{number} runs")

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Look again and again until it holds. A command that fails meanwhile is asked again."""
        deadline = time.monotonic() + DEADLINE_S
        told = ""
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
                told = ""
            except AssertionError as error:
                told = f": {error}"
            time.sleep(0.3)
        raise AssertionError(f"waited in vain for {what}{told}")
