"""`oobleck up` and `down` on hosts that run asyncssh's server, each with a home and a port of its
own: what is done there is done by real processes, with a real master."""

import json
import pwd
import shutil
import stat
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import asyncssh
import psutil
import pytest

from bench.support.daemons import descendants
from oobleck.cli.chaos.injector import kill
from oobleck.cli.ssh.payload import installed_wheel
from support.commands import end, refused, run
from support.folders import ROOT
from support.installed import install
from support.secured import Secured
from support.ssh_hosts import PYTHON, SshHosts, is_open, open_python
from support.waiting import all_gone

FILES = {"wheels", "venvs", "state", "agent.json", "agent.log", "lock"}
#: There is one on every machine.
OTHER = "nobody"


class Operator:
    """Who brings hosts up."""

    def __init__(self, folder: Path, hosts: SshHosts, secured: Secured, wheel: Path) -> None:
        self.hosts, self.secured, self.wheel = hosts, secured, wheel
        self._file = folder / "hosts.txt"
        self._ssh = ["--identity", str(hosts.identity), "--known-hosts", str(hosts.known_hosts)]
        self._ssh += ["--python", PYTHON, "--directory", ".oobleck/up", "--json"]

    def _call(
        self, verb: str, names: tuple[str, ...], *options: str
    ) -> dict[str, dict[str, object]]:
        self._file.write_text("".join(map(self.hosts.line, names)))
        done = run(verb, str(self._file), *self._ssh, *options)
        found = json.loads(done.stdout)["hosts"]
        assert done.stderr == ""
        assert done.returncode == (0 if all(host["ok"] for host in found) else 1)
        return {host["name"]: host for host in found}

    def up(self, *names: str, run_as: str = "root") -> dict[str, dict[str, object]]:
        master = ["--master", self.secured.address, "--credentials", str(self.secured.operator)]
        wheel = ["--wheel", str(self.wheel), "--run-as", run_as]
        return self._call("up", names, *wheel, *master)

    def down(self, *names: str, purge: bool = False) -> dict[str, dict[str, object]]:
        return self._call("down", names, *(["--purge"] if purge else []))

    def agent(self, name: str) -> psutil.Process:
        return psutil.Process(json.loads((self.place(name) / "agent.json").read_text())["pid"])

    def place(self, name: str) -> Path:
        return self.hosts.home(name) / ".oobleck" / "up"


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    cluster = Secured(tmp_path_factory.mktemp("secured"))
    yield cluster
    end(cluster.process)


@pytest.fixture(scope="module")
def operator(secured: Secured) -> Iterator[Operator]:
    # Other users of the machine get into none of pytest's folders.
    folder = Path(tempfile.mkdtemp(prefix="oobleck-ssh-"))
    folder.chmod(0o755)
    wheel = installed_wheel(install(folder / "site-packages"), folder)
    names = ["n1", "away", "stranger", "changed", "bare", "old", "full", "apart"]
    with SshHosts(folder, names) as hosts, ExitStack() as stack:
        hosts.refuse("away")
        hosts.forget("stranger")
        hosts.refuse("changed")
        hosts.serve("changed", asyncssh.generate_private_key("ssh-ed25519"))
        (hosts.home("bare") / "bin" / PYTHON).unlink()
        hosts.age("old", "3.9")
        small = hosts.home("full") / ".oobleck"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
        if subprocess.run(mount, capture_output=True, check=False).returncode == 0:
            stack.callback(subprocess.run, ["umount", "-l", str(small)], check=True)
        else:
            hosts.names.remove("full")
        if (python := open_python()) is not None:
            (hosts.home("apart") / "bin" / PYTHON).unlink()
            (hosts.home("apart") / "bin" / PYTHON).symlink_to(python)
        hosts.names.remove("apart")
        yield Operator(folder, hosts, secured, wheel)
        _end_agents(folder)
    shutil.rmtree(folder)


def _end_agents(folder: Path) -> None:
    """Kill those that a failed test has left, and wait for their ends; each names its folder."""
    left = [
        process
        for process in psutil.process_iter(["cmdline"])
        if any(str(folder) in word for word in process.info["cmdline"] or ())
    ]
    trees = [one for process in left for one in descendants(process.pid)]
    kill([process.pid for process in reversed(trees)])
    all_gone(trees)


@pytest.mark.cluster
def test_what_can_be_done_is_done_and_the_rest_is_told(operator: Operator) -> None:
    told = operator.up(*operator.hosts.names)
    problems = {name: str(host["problem"]) for name, host in told.items()}
    done = told["n1"]["done"]
    assert isinstance(done, list)
    assert done[1:] == ["installed", "joined", "started"], problems["n1"]
    assert operator.secured.states() == {"n1": "live"}
    words = operator.agent("n1").cmdline()
    assert not any("oobleck1." in word for word in words)
    assert not [path for path in operator.place("n1").iterdir() if path.name not in FILES]

    port = operator.hosts.ports
    assert problems["away"] == (
        "its ssh port is closed; start sshd there, or give the port as host:port"
    )
    known = operator.hosts.known_hosts
    assert "is unknown; compare it with the host's own" in problems["stranger"]
    assert f"'ssh-keyscan -p {port['stranger']} 127.0.0.1 >> {known}'" in problems["stranger"]
    assert "its host key HAS CHANGED (ssh-ed25519 SHA256:" in problems["changed"]
    assert f"-R '[127.0.0.1]:{port['changed']}'" in problems["changed"]
    assert problems["bare"].startswith(f"'{PYTHON}' cannot be run; install Python")
    assert problems["old"] == (
        f"{PYTHON} is 3.9; at least 3.11 is needed: name another with --python"
    )
    if "full" in problems:
        assert "has room for 64.0 KiB, and " in problems["full"]
        assert "make room there, or name another place with --directory" in problems["full"]
        assert not operator.place("full").exists()


@pytest.mark.cluster
def test_a_second_time_nothing_is_done(operator: Operator) -> None:
    before = operator.agent("n1")
    assert operator.up("n1")["n1"]["done"] == []
    assert operator.agent("n1") == before


@pytest.mark.cluster
def test_down_leaves_nothing(operator: Operator) -> None:
    agent = operator.agent("n1")
    running = [agent, *agent.children(recursive=True)]
    assert operator.down("n1")["n1"]["done"] == ["stopped"]
    all_gone(running)
    assert (operator.place("n1") / "state" / "credentials" / "client.key").exists()
    assert operator.down("n1", purge=True)["n1"]["done"] == ["purged"]
    assert not operator.place("n1").exists()
    assert operator.down("n1", purge=True)["n1"]["done"] == []


@pytest.mark.cluster
def test_where_root_logs_in_agents_run_as_another_user_who_can_change_no_program(
    operator: Operator,
) -> None:
    libraries = Path(sysconfig.get_path("purelib"))
    if open_python() is None or not is_open(ROOT) or not is_open(libraries / "any"):
        pytest.skip("other users of this machine get neither to a Python nor to this checkout")
    told = operator.up("apart", run_as=OTHER)["apart"]
    done = told["done"]
    assert isinstance(done, list)
    assert done[1:] == ["installed", "joined", "started"], told["problem"]
    uid = pwd.getpwnam(OTHER).pw_uid
    agent = operator.agent("apart")
    assert set(agent.uids()) == {uid}
    assert agent.environ()["HOME"] == str(operator.place("apart") / "state")
    key = operator.place("apart") / "state" / "credentials" / "client.key"
    assert (key.stat().st_uid, stat.S_IMODE(key.stat().st_mode)) == (uid, 0o600)
    others = [path for path in operator.place("apart").rglob("*") if path.lstat().st_uid == uid]
    assert {path.relative_to(operator.place("apart")).parts[0] for path in others} == {"state"}
    assert operator.up("apart", run_as=OTHER)["apart"]["done"] == []
    # What that user's jobs wrote is not taken away, nor its certificate taken for root's.
    assert "may contain files of jobs" in str(operator.up("apart")["apart"]["problem"])
    assert set(operator.agent("apart").uids()) == {uid}, "and it goes on"
    assert operator.down("apart", purge=True)["apart"]["done"] == ["stopped", "purged"]
    assert not operator.place("apart").exists()


def test_what_is_wrong_with_a_call_is_told_before_any_host_is_asked(
    tmp_path: Path, secured: Secured
) -> None:
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("10.0.0.3\n")
    show = ("--credentials", str(secured.operator))
    asked = ("up", str(hosts), "--master", secured.address)
    assert "10.0.0.3 cannot reach it" in refused(run(*asked, *show), 2)
    hosts.write_text("localhost\nlocalhost name=n2\n")
    assert f"{hosts}: line 2: localhost is on line 1 too" in refused(run(*asked, *show), 2)
    hosts.write_text("localhost\n")
    assert "'oobleck up' sets it" in refused(run(*asked, *show, "--", "--name", "x"), 2)
    assert "runs from its sources" in refused(run(*asked, *show), 2)
