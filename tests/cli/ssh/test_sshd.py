"""`oobleck up` and `down` by OpenSSH's server, on hosts that are network namespaces."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import asyncssh
import psutil
import pytest

from bench.support.network import Network
from oobleck.cli.ssh.payload import installed_wheel
from support.commands import end, run
from support.folders import ROOT
from support.installed import install, link_libraries
from support.openssh import skip_without_ssh, sshd
from support.reader import Machine, lines_of, shorten
from support.secured import Secured
from support.waiting import all_gone, until

#: Hosts here are of one file system and one list of users.
APART = ("--directory", ".oobleck/up", "--run-as", "root")
#: Of the page's machines.
ADDRESSES = {"10.0.0.1": "head", "10.0.0.3": "n1", "10.0.0.4": "n2"}


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [4, 16])
def test_a_cluster_comes_up_goes_on_and_goes_down(number: int, tmp_path: Path) -> None:
    skip_without_ssh()
    names = [f"n{index}" for index in range(1, number + 1)]
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(tmp_path / "key"))
    key.write_public_key(str(tmp_path / "key.pub"))
    libraries = link_libraries(tmp_path / "libraries")
    wheel = installed_wheel(install(tmp_path / "site-packages"), tmp_path)
    with ExitStack() as stack:
        net = stack.enter_context(Network(names))
        secured = Secured(tmp_path, host=net.operator)
        stack.callback(end, secured.process)
        for name in names:
            stack.enter_context(sshd(net, name, tmp_path, libraries))
        known = tmp_path / "known_hosts"
        scan = ["ssh-keyscan", "-t", "ed25519", *map(net.address, names)]
        until(lambda: _scanned(scan, known) == number, "all servers")
        hosts = tmp_path / "hosts.txt"
        hosts.write_text("".join(f"root@{net.address(name)} name={name}\n" for name in names))

        def call(*arguments: str) -> list[dict[str, object]]:
            ssh = ("--identity", str(tmp_path / "key"), "--known-hosts", str(known), "--json")
            began = time.monotonic()
            done = run(arguments[0], str(hosts), *ssh, *arguments[1:], timeout_s=600)
            print(f"{arguments[0]} of {number}: {time.monotonic() - began:.1f} s")  # noqa: T201
            assert done.returncode in (0, 1), done.stderr
            found: list[dict[str, object]] = json.loads(done.stdout)["hosts"]
            return found

        def up() -> list[dict[str, object]]:
            shown = ("--credentials", str(secured.operator))
            options = ("--wheel", str(wheel), "--master", secured.address, *APART)
            return call("up", *options, *shown)

        first = up()
        assert [host["problem"] for host in first] == [""] * number
        assert secured.states() == dict.fromkeys(names, "live")
        assert [host["done"] for host in up()] == [[]] * number

        agents = {name: _agent(tmp_path / f"home-{name}") for name in names}
        agents["n1"].send_signal(signal.SIGKILL)
        all_gone([agents["n1"]])
        net.unplug("n2")
        told = up()
        assert [host["done"] for host in told] == [["started"]] + [[]] * (number - 1)
        assert [bool(host["problem"]) for host in told] == [False, True] + [False] * (number - 2)
        assert (
            told[1]["problem"]
            == "no answer to ssh in time; check that it is up, and its name or address"
        )
        net.plug("n2")

        agents["n1"] = _agent(tmp_path / "home-n1")
        assert [host["problem"] for host in call("down", "--purge", *APART[:2])] == [""] * number
        all_gone(agents.values())
        assert not list(tmp_path.glob("home-*/.oobleck/up"))


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_who_follows_the_page_gets_a_cluster_that_trains(tmp_path: Path) -> None:
    skip_without_ssh()
    libraries = link_libraries(tmp_path / "libraries")
    wheel = installed_wheel(install(tmp_path / "site-packages"), tmp_path)
    venv = tmp_path / "venv"
    for command in (
        [sys.executable, "-m", "venv", venv],
        [venv / "bin" / "pip", "install", "--quiet", "--no-deps", wheel],
    ):
        subprocess.run(command, check=True)
    with ExitStack() as stack:
        net = stack.enter_context(Network(["head", "n1", "n2"]))
        home = tmp_path / "home-head"
        (home / ".ssh").mkdir(parents=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(home / ".ssh" / "id_ed25519"))
        key.write_public_key(str(tmp_path / "key.pub"))
        for name in ("n1", "n2"):
            stack.enter_context(sshd(net, name, tmp_path, libraries))
        head = Machine(
            ["env", f"PYTHONPATH={libraries}", *net.on("head")],
            home,
            f"{venv / 'bin'}:{os.environ['PATH']}",
        )
        stack.callback(head.close)
        told = {}
        for machine, text in lines_of(ROOT / "docs/deploy/ssh.md", "## The lines"):
            assert machine == "head"
            for address, name in ADDRESSES.items():
                text = text.replace(address, net.address(name))
            if (verb := text.split()[1]) in ("up", "down"):
                ours = " ".join(APART if verb == "up" else APART[:2])
                text = text.replace("hosts.txt", f"hosts.txt {ours}")
            told[verb] = head.type(text)
            if verb == "init":
                shorten(head.folder / "first" / "job.yaml", 3)
        assert "2 hosts, in" in told["up"]
        assert told["nodes"].count("live") == 2
        assert "succeeded" in told["submit"]
        assert "2 hosts, in" in told["down"]
        left = list(tmp_path.glob("home-n*/.oobleck/up/agent.json"))
        assert not left


def _scanned(scan: list[str], known: Path) -> int:
    """How many hosts have told their keys, which are known then."""
    known.write_text(subprocess.run(scan, capture_output=True, text=True, check=False).stdout)
    return len([line for line in known.read_text().splitlines() if " ssh-ed25519 " in line])


def _agent(home: Path) -> psutil.Process:
    return psutil.Process(json.loads((home / ".oobleck/up/agent.json").read_text())["pid"])
