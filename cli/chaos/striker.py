"""Strikes of a drill, on this machine or over ssh, and their undoing.

`injector` acts on processes, here or on another machine; the master is struck where the drill runs.
A striker does not know when to strike, nor what becomes of the job.
"""

import asyncio
import contextlib
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psutil

from oobleck.cli.chaos import injector
from oobleck.cli.jobs.checks import is_here
from oobleck.cli.ssh.hosts import Access, Host, HostFailed
from oobleck.host.command import USAGE, CommandFailed
from oobleck.proto import control_pb2 as pb


class Striker:
    """Striker of the nodes and the master of this machine."""

    def __init__(
        self,
        address: str,
        *,
        stop_for_s: float,
        restart_agent: str | None,
        restart_master: str | None,
    ) -> None:
        """Strike the cluster whose master has `address`. The two commands restart a killed agent
        and a killed master."""
        self._address = address
        self.stop_for_s = stop_for_s
        self._restart_agent = restart_agent
        self._restart_master = restart_master
        #: Node (empty: this machine), process that undoes a fault there, and when it has done so.
        self._healers: list[tuple[str, int, float]] = []

    @property
    def has_stopped(self) -> bool:
        """True while anything is stopped."""
        return any(until > time.monotonic() for _, _, until in self._healers)

    def strike(self, kind: str, node: pb.NodeInfo | None) -> str | None:
        """Strike, and return for the operator what was struck. Return None if there is nothing to
        strike at the moment.

        Raises CommandFailed where the process belongs to somebody else.
        """
        if kind == "garbage":
            host, _, port = self._address.rpartition(":")
            let_in = injector.garbage(host.strip("[]"), int(port))
            return f"at {self._address}" if let_in else None
        if kind.endswith("-master"):
            return self._strike_master(kind)
        if node is None or node.state != "live":
            return None
        workers = [worker.pid for worker in node.workers if worker.pid]
        asked = {"kind": kind, "agent": node.pid, "workers": workers, "for_s": self.stop_for_s}
        done = self._act(node.node, "strike", **asked)
        return self._note(node.node, done["struck"], done["healer"])

    def _strike_master(self, kind: str) -> str | None:
        pid = master_pid(self._address)
        pids = [] if pid is None else [pid]
        with refusals():
            struck, healer = (
                (injector.kill(pids), 0)
                if kind == "kill-master"
                else injector.stop(pids, self.stop_for_s)
            )
        return self._note("", struck, healer)

    def _note(self, node: str, struck: Sequence[int], healer: int) -> str | None:
        if healer:
            self._healers.append((node, healer, time.monotonic() + self.stop_for_s))
        place = self._place(node) if node else ""
        pids = f"(pid {', '.join(map(str, struck))}{place})"
        return f"{node} {pids}".lstrip() if struck else None

    def _place(self, node: str) -> str:
        """Return the words that name the host of a node's processes; none here."""
        return ""

    def _act(self, node: str, action: str, **arguments: Any) -> dict[str, Any]:
        """Have the injector act where the node is (empty: here). Raises CommandFailed."""
        with refusals():
            return injector.act(action, **arguments)

    def undo(self) -> None:
        """Continue all stopped processes now."""
        for node, healer, until in self._healers:
            if until > time.monotonic():
                # If the host is unreachable, its healer acts by itself later.
                with contextlib.suppress(CommandFailed):
                    self._act(node, "heal", healer=healer)
        self._healers.clear()

    def restart(self, kind: str, node: str) -> str | None:
        """Start what was killed again, and return the command that does it. None: it needs no
        command."""
        match kind:
            case "kill-agent" | "kill-node":
                assert self._restart_agent is not None, "asked for with the kind"
                command = self._restart_agent.replace("{node}", shlex.quote(node))
            case "kill-master":
                assert self._restart_master is not None, "asked for with the kind"
                command = self._restart_master
            case _:
                return None
        started = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        threading.Thread(target=started.wait, daemon=True).start()
        return command


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Raise what the injector refuses as CommandFailed."""
    try:
        yield
    except injector.Refused as refused:
        raise CommandFailed(str(refused)) from refused


def check_here(nodes: Sequence[pb.NodeInfo]) -> None:
    """Check that the processes of all nodes are on this machine. Raises CommandFailed."""
    away = [node for node in nodes if not is_here(node)]
    if away:
        names = ", ".join(node.node for node in away)
        hosts = ", ".join(sorted({node.hostname for node in away}))
        raise CommandFailed(
            f"{names}: not on this machine ({hosts}), and a drill strikes only processes that it "
            "finds here; run it there, name the nodes of this machine with --nodes, or their hosts "
            "with --ssh HOSTS.txt",
            USAGE,
        )


def check_master_here(kind: str, address: str) -> None:
    """Check that the master is a process of this machine, and the user's. Raises CommandFailed."""
    if master_pid(address) is None:
        raise CommandFailed(
            f"--kinds {kind}: the master at {address} is no process of this machine, or another "
            "user's; run the drill on its machine as its user, or leave the kind out",
            USAGE,
        )


def master_pid(address: str) -> int | None:
    """Find the master's process, if it is one of this machine that the user may look into."""
    port = int(address.rpartition(":")[2])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if not any("oobleck" in word and "master" in word for word in words):
                continue
            sockets = process.net_connections(kind="tcp")
            if any(s.status == psutil.CONN_LISTEN and s.laddr[1] == port for s in sockets):
                return process.pid
    return None


# ---- other machines


#: Package and file of the program that each host runs.
_SCRIPT = ("oobleck.cli.chaos", "injector.py")


class HostStriker(Striker):
    """Striker of nodes that ssh reaches."""

    def __init__(
        self, address: str, hosts: Mapping[str, Host], access: Access, **others: Any
    ) -> None:
        """Strike at `hosts`, given by the node's name. `others` are the options of any striker."""
        super().__init__(address, **others)
        self._hosts = hosts
        self._access = access

    def check(self, nodes: Sequence[pb.NodeInfo], kinds: Sequence[str]) -> None:
        """Check that every host can be struck. Raises CommandFailed, which lists each host that
        cannot be, and why."""

        async def look(node: pb.NodeInfo) -> str:
            try:
                await self._call(node.node, "look", agent=node.pid, kinds=[*kinds])
            except HostFailed as failed:
                return f"{node.node} ({self._hosts[node.node]}): {failed}"
            return ""

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*map(look, nodes))

        if problems := [found for found in asyncio.run(all_of_them()) if found]:
            raise CommandFailed("; ".join(problems), USAGE)

    def _place(self, node: str) -> str:
        return f" on {self._hosts[node]}"

    def _act(self, node: str, action: str, **arguments: Any) -> dict[str, Any]:
        if not node:
            return super()._act(node, action, **arguments)
        try:
            return asyncio.run(self._call(node, action, **arguments))
        except HostFailed as failed:
            raise CommandFailed(f"{node} ({self._hosts[node]}): {failed}") from failed

    async def _call(self, node: str, action: str, **arguments: object) -> dict[str, Any]:
        from oobleck.cli.ssh.connection import connected

        async with connected(self._hosts[node], self._access) as connection:
            return await connection.call(action, script=_SCRIPT, **arguments)
