"""`oobleck chaos --ssh`: real processes are struck over ssh, and come back by themselves."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import asyncssh
import psutil
import pytest

from bench.support.network import Network
from oobleck.cli.chaos.striker import HostStriker
from oobleck.cli.ssh.hosts import Access, parse_hosts
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb
from support.commands import refused, run
from support.openssh import skip_without_ssh, sshd
from support.ssh_hosts import PYTHON, SshHosts
from support.struck import agent_with_worker
from support.waiting import all_gone, is_stopped, until


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshHosts]:
    with SshHosts(tmp_path_factory.mktemp("ssh"), ["n1"]) as found:
        yield found


def striker(hosts: SshHosts, stop_for_s: float = 600.0) -> HostStriker:
    known, key = hosts.known_hosts, hosts.identity
    access = Access(identity=key, known_hosts=known, python=PYTHON, directory="~")
    lines = {host.name: host for host in parse_hosts(hosts.line("n1"))}
    others = {"stop_for_s": stop_for_s, "restart_agent": None, "restart_master": None}
    return HostStriker("127.0.0.1:1", lines, access, **others)


def test_what_is_stopped_goes_on_by_itself_or_when_the_drill_ends(
    hosts: SshHosts, node: pb.NodeInfo
) -> None:
    drill, worker = striker(hosts), node.workers[0].pid
    drill.check([node], ["stop-node", "kill-worker"])
    told = drill.strike("stop-node", node)
    assert told == f"n1 (pid {worker}, {node.pid} on 127.0.0.1:{hosts.ports['n1']})"
    assert drill.has_stopped
    until(lambda: is_stopped(worker) and is_stopped(node.pid), "both to stop")
    drill.undo()
    assert not drill.has_stopped
    until(lambda: not is_stopped(worker) and not is_stopped(node.pid), "both to go on")

    # Nobody is there any more who could let it go on.
    striker(hosts, stop_for_s=0.1).strike("stop-agent", node)
    until(lambda: not is_stopped(node.pid), "the agent to go on")


def test_what_is_killed_is_the_nodes_own(hosts: SshHosts, node: pb.NodeInfo) -> None:
    drill, worker = striker(hosts), psutil.Process(node.workers[0].pid)
    stranger = pb.NodeInfo(node="n1", state="live", pid=node.pid)
    stranger.workers.add(slot=0, pid=psutil.Process().pid)
    assert drill.strike("kill-worker", stranger) is None, "no process of that agent"
    lost = pb.NodeInfo(node="n1", state="lost", pid=node.pid)
    assert drill.strike("kill-agent", lost) is None
    other = pb.NodeInfo(node="n1", state="live", pid=worker.pid)
    with pytest.raises(CommandFailed, match=f"n1 .*pid {worker.pid} there is no agent; does the"):
        drill.strike("kill-agent", other)
    assert drill.strike("kill-node", node) is not None
    all_gone([worker, psutil.Process(node.pid)])


def test_hosts_that_cannot_be_struck_are_told_before_anything_is(
    hosts: SshHosts, node: pb.NodeInfo, tmp_path: Path, master: str
) -> None:
    hosts.refuse("n1")
    with pytest.raises(CommandFailed, match=r"n1 .*: its ssh port is closed"):
        striker(hosts).check([node], ["stop-agent"])
    hosts.serve("n1", asyncssh.generate_private_key("ssh-ed25519"))
    with pytest.raises(CommandFailed, match=r"n1 .*: its host key HAS CHANGED"):
        striker(hosts).check([node], ["stop-agent"])
    file = tmp_path / "hosts.txt"
    file.write_text("10.0.0.3\n10.0.0.3\n")
    asked = ("chaos", "x-1", "--master", master, "--ssh", str(file))
    assert "line 2: line 1 is named 10.0.0.3 too" in refused(run(*asked), 2)


def test_a_network_is_cut_and_comes_back(tmp_path: Path) -> None:
    skip_without_ssh()
    key = asyncssh.generate_private_key("ssh-ed25519")
    key.write_private_key(str(tmp_path / "key"))
    key.write_public_key(str(tmp_path / "key.pub"))
    with ExitStack() as stack:
        net = stack.enter_context(Network(["n1"]))
        stack.enter_context(sshd(net, "n1", tmp_path, tmp_path))
        known, address = tmp_path / "known", net.address("n1")

        def scanned() -> bool:
            scan = ["ssh-keyscan", "-t", "ed25519", address]
            done = subprocess.run(scan, capture_output=True, check=False)
            known.write_bytes(done.stdout)
            return b"ssh-ed25519" in done.stdout

        until(scanned, "the server")
        node = stack.enter_context(agent_with_worker(net.on("n1")))
        access = Access(
            identity=tmp_path / "key", known_hosts=known, python=sys.executable, directory="~"
        )
        lines = {host.name: host for host in parse_hosts(f"root@{address} name=n1\n")}
        others = {"stop_for_s": 3.0, "restart_agent": None, "restart_master": None}
        drill = HostStriker("127.0.0.1:1", lines, access, **others)
        drill.check([node], ["unplug"])
        assert drill.strike("unplug", node) is not None
        until(lambda: not reachable(address), "the cut")
        until(lambda: reachable(address), "the network again")
        drill.check([node], ["unplug"])


def reachable(address: str) -> bool:
    with suppress(OSError), socket.create_connection((address, 22), 0.3):
        return True
    return False
