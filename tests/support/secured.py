"""A master that lets in nobody without a certificate, and its operator."""

import json
import os
import subprocess
import sys
from pathlib import Path

from support.commands import end, run


class Secured:
    """A master that wants certificates, on a loopback address all the same unless told another."""

    def __init__(self, folder: Path, *options: str, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.pki = folder / "state" / "pki"
        assert run("pki", "init", "--dir", str(self.pki), "--name", "10.1.2.3").returncode == 0
        self.operator = self.pki / "operator"
        self.log = folder / "master.log"
        self.address = f"{host}:0"
        self._options = options
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "oobleck.master", "--listen", self.address]
        with self.log.open("a") as log:
            process = subprocess.Popen(
                [*command, "--state-dir", str(self.folder / "state"), *self._options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), self.log.read_text()
        self.address = line.split()[-1]
        return process

    def restart(self) -> None:
        self.process.kill()
        end(self.process)
        self.process = self._start()

    def oobleck(self, *arguments: str, who: Path | None = None) -> subprocess.CompletedProcess[str]:
        shown = ("--credentials", str(who or self.operator))
        return run(*arguments, "--master", self.address, *shown)

    def token(self, *arguments: str) -> Path:
        """A file with a new one."""
        path = self.folder / f"token-{os.urandom(4).hex()}"
        made = self.oobleck("pki", "token", *arguments, "--out", str(path))
        assert (made.returncode, made.stdout) == (0, f"{path}\n"), made
        return path

    def states(self) -> dict[str, str]:
        nodes = self.oobleck("nodes", "--json")
        return {node["node"]: node["state"] for node in json.loads(nodes.stdout)}
