"""A master that lets in nobody without a certificate, and its operator."""

import json
import os
import subprocess
from pathlib import Path

from bench.support.ports import choose_address
from support.commands import run
from support.masters import MasterProcess


class Secured(MasterProcess):
    """A master that wants certificates, on a loopback address all the same unless told another."""

    def __init__(self, folder: Path, *options: str, host: str = "127.0.0.1") -> None:
        self.folder = folder
        self.pki = folder / "state" / "pki"
        assert run("pki", "init", "--dir", str(self.pki), "--name", "10.1.2.3").returncode == 0
        self.operator = self.pki / "operator"
        address = choose_address().replace("127.0.0.1", host)
        super().__init__(folder / "state", *options, listen=address, spans=())

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
