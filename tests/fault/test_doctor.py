"""`oobleck doctor` finds each fault of hosts and of what lies between them: seeded in real network
and mount namespaces, small file systems and limits, all at once, and nothing where there is none.

Clocks are shifted where a process asks for the time: no namespace has a calendar of its own.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.client import Record
from bench.support.netcluster import NetCluster
from bench.support.network import unusable
from bench.support.preloaded import Preloaded

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = ("n1", "n2", "n3", "n4", "n5", "n6", "n7")


class Faults:
    """What is seeded before the daemons start, in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared, self.texts = folder / "shared", folder / "texts"
        self.lacking = folder / "lacking"
        (self.shared / "saved").mkdir(parents=True)
        for place in (self.texts, self.lacking):
            place.mkdir()
            (place / "a.txt").write_text("all have this\n" * 100)
        (folder / "other.txt").write_text("another text\n" * 100)
        for place in ("full", "covered"):
            (folder / place).mkdir()
        old = folder / "old" / "oobleck_cluster-0.0.1.dist-info"
        old.mkdir(parents=True)
        (old / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: oobleck-cluster\nVersion: 0.0.1\n"
        )

    def around(self, credentials: Path) -> dict[str, list[str]]:
        """By host: what runs a daemon with faults that its process alone sees."""
        nothing = {name: self._shell(name) for name in ("head", "n6", "n7")}
        return nothing | {
            "n1": self._shell(
                "n1",
                f"mount -t tmpfs tmpfs {self.lacking}",
                "export NCCL_SOCKET_IFNAME=aside0",
            ),
            "n2": self._shell(
                "n2",
                f"mount -t tmpfs -o size=1m tmpfs {self.folder}/full",
                f"dd if=/dev/zero of={self.folder}/full/rest bs=1k count=1000 status=none",
                f"export TMPDIR={self.folder}/full PYTHONPATH={self.folder}/old:$PYTHONPATH",
                f"cd {self.folder}",  # what is installed from a folder has its version there
                address="127.0.1.1",
            ),
            "n3": self._shell(
                "n3",
                f"mount --bind {credentials} {credentials}",
                f"mount -o remount,bind,ro {credentials}",
                run="prlimit --nofile=300:300 --",
            ),
            "n4": self._shell(
                "n4",
                f"mount -t tmpfs tmpfs {self.shared}",
                f"mkdir {self.shared}/saved",
                "mount -t tmpfs tmpfs /sys/class",
                "mkdir -p /sys/class/infiniband/mlx5_0/ports/1",
                "echo '1: DOWN' > /sys/class/infiniband/mlx5_0/ports/1/state",
                run="prlimit --memlock=65536:65536 --",
            ),
            "n5": self._shell("n5", f"mount --bind {self.folder}/other.txt {self.texts}/a.txt"),
        }

    def _shell(self, name: str, *lines: str, address: str = "", run: str = "") -> list[str]:
        """In the folder of mounts and the name of a host of its own, with its address by that
        name, or another one."""
        hosts = self.folder / f"hosts-{name}"
        own = "$(ip -o -4 addr show eth0 | sed 's|.*inet \\([0-9.]*\\)/.*|\\1|')"
        script = [
            *("set -e", f"hostname host-{name}"),
            f"echo {address or own} host-{name} > {hosts}",
            f"mount --bind {hosts} /etc/hosts",
            *lines,
            f'exec {run} "$@"',
        ]
        return ["unshare", "--mount", "--uts", "sh", "-c", "\n".join(script), "sh"]


def between(cluster: NetCluster) -> None:
    """Faults of the network."""
    net = cluster.net

    def ip(host: str, *command: str) -> None:
        subprocess.run([*net.on(host), "ip", *command], check=True, capture_output=True)

    for host in ("n1", "n2"):
        ip(host, "link", "add", "aside0", "type", "veth", "peer", "aside1")
        ip(host, "addr", "add", "198.19.0.1/24", "dev", "aside0")
        ip(host, "link", "set", "aside0", "up")
        ip(host, "link", "set", "aside1", "up")
    # Of n2 packets to n5 leave from another address, by the same wire.
    ip("n2", "route", "add", net.address("n5"), "dev", "eth0", "src", "198.19.0.1")
    net.part(["n1"], ["n2"])
    for other in ("n1", "n2", "n3", "n4", "n5"):
        ports = ("ipproto", "tcp", "dport", "1024-65534", "blackhole")
        net.route("rule", "add", "from", net.address(other), "to", net.address("n6"), *ports)
    # What n4 sends to other nodes may be no larger; to the head it may, or it would not be heard.
    for other in ("n1", "n2", "n3", "n5"):
        way = ("from", net.address("n4"), "to", net.address(other), "table", "104")
        net.route("rule", "add", *way)
        route = (net.address(other), "dev", net.port(other), "mtu", "1400", "table", "104")
        net.route("route", "add", *route)
    net.slow("n5", 2_000_000)


@pytest.fixture(scope="module")
def findings(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[list[Record]]:
    """Of a cluster with all of these faults."""
    if reason := unusable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("doctor")
    faults = Faults(folder)
    credentials = folder / "state" / "pki" / "nodes" / "n3"
    with NetCluster(
        len(NODES),
        state_dir=folder / "state",
        state_mb=4096,
        preloaded=preloaded,
        around=faults.around(credentials),
        node_options={"n5": ("--memory-per-worker", "100TiB")},
    ) as cluster:
        between(cluster)
        cluster.set_clock("n1", 40.0)
        cluster.kill_node("n7")
        cluster.wait(lambda: "n7" not in cluster.live(), "n7 to be lost", poll_s=0.1)
        told = cluster.oobleck(
            *("doctor", "--json", "--checkpoints", str(faults.shared / "saved")),
            *("--data", str(faults.texts), "--data", str(faults.lacking)),
            check=False,
        )
        assert told.returncode == 1, told.stderr
        left = [path.name for path in faults.shared.rglob(".oobleck*")]
        assert left == []
        yield json.loads(told.stdout)["findings"]


FAULTS = {
    "no way between two nodes": ("ports", "fail", "n1", "n2"),
    "blocked ports": ("ports", "fail", "n6", ""),
    "large packets get lost": ("mtu", "fail", "n4", ""),
    "a slow link": ("bandwidth", "slow", "n5", ""),
    "a wrong clock": ("clock", "warn", "n1", ""),
    "a name that leads to loopback": ("names", "warn", "n2", ""),
    "another interface for some": ("routes", "warn", "n2", ""),
    "NCCL's choice": ("interface", "fail", "n1", ""),
    "another version": ("versions", "warn", "n2", ""),
    "a full disk": ("room", "fail", "n2", ""),
    "a folder that cannot be written": ("folders", "fail", "n3", ""),
    "few open files": ("files", "fail", "n3", ""),
    "little locked memory": ("locked memory", "fail", "n4", ""),
    "an adapter that is down": ("adapters", "warn", "n4", ""),
    "a folder that is not shared": ("shared", "fail", "n4", ""),
    "other data": ("data", "fail", "n5", ""),
    "no data": ("data", "fail", "n1", ""),
    "too little memory": ("memory", "fail", "n5", ""),
    "a journal in memory": ("durable", "warn", "(head)", ""),
    "a lost node": ("agent", "fail", "n7", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(findings: list[Record], fault: str) -> None:
    keys = ("check", "level", "node", "other")
    found = [finding for finding in findings if tuple(map(finding.get, keys)) == FAULTS[fault]]
    assert found, [f for f in findings if f["level"] != "pass"]
    assert all(finding["fix"] for finding in found)


def test_nothing_else_is_found(findings: list[Record]) -> None:
    """But what follows from the faults, and how fast this machine is just then."""
    keys = ("check", "level", "node", "other")
    bad = {tuple(map(finding.get, keys)) for finding in findings if finding["level"] != "pass"}
    follows = {("durable", "warn", "n4", "")}  # its folder is in memory too
    own = ("durable", "disk", "latency", "bandwidth")
    assert {one for one in bad - {*FAULTS.values()} - follows if one[0] not in own} == set()
