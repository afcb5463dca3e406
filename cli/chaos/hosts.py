"""Strikes on nodes of other machines, over ssh; the master is struck where the drill runs.

What is stopped or cut off comes back by itself there, so nothing has to be undone from here.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from oobleck.cli import options
from oobleck.cli.chaos.striker import Striker
from oobleck.cli.chaos.strikes import TO_THE_MASTER
from oobleck.cli.ssh.connection import Access, HostFailed, connected
from oobleck.cli.ssh.hosts import Host
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb

#: The text that is run there.
_SCRIPT = ("oobleck.cli.chaos", "remote.py")


class HostStriker(Striker):
    def __init__(
        self, address: str, hosts: Mapping[str, Host], access: Access, **others: Any
    ) -> None:
        """`hosts`: by the node's name. `others`: as of any striker."""
        super().__init__(address, **others)
        self._hosts = hosts
        self._access = access
        #: Host and pid of what heals a strike there, and when it has.
        self._healers: list[tuple[Host, int, float]] = []

    @property
    def has_stopped(self) -> bool:
        now = time.monotonic()
        return super().has_stopped or any(until > now for _, _, until in self._healers)

    def check(self, nodes: Sequence[pb.NodeInfo], kinds: Sequence[str]) -> None:
        """Raises CommandFailed with every host on which it cannot be done, and why."""

        async def look(node: pb.NodeInfo) -> str:
            try:
                await self._call(self._hosts[node.node], "look", agent=node.pid, kinds=[*kinds])
            except HostFailed as failed:
                return f"{node.node} ({self._hosts[node.node]}): {failed}"
            return ""

        async def all_of_them() -> list[str]:
            return await asyncio.gather(*map(look, nodes))

        if problems := [found for found in asyncio.run(all_of_them()) if found]:
            raise CommandFailed("; ".join(problems), options.USAGE)

    def strike(self, kind: str, node: pb.NodeInfo | None) -> str | None:
        """Raises CommandFailed where the host cannot be reached."""
        if kind in TO_THE_MASTER:
            return super().strike(kind, node)
        if node is None or node.state != "live":
            return None
        host = self._hosts[node.node]
        workers = [worker.pid for worker in node.workers if worker.pid]
        asked = {"kind": kind, "agent": node.pid, "workers": workers, "for_s": self.stop_for_s}
        try:
            done = asyncio.run(self._call(host, "strike", **asked))
        except HostFailed as failed:
            raise CommandFailed(f"{node.node} ({host}): {failed}") from failed
        if done["healer"]:
            until = time.monotonic() + self.stop_for_s
            self._healers.append((host, done["healer"], until))
        if not done["struck"]:
            return None
        return f"{node.node} (pid {', '.join(map(str, done['struck']))} on {host})"

    def undo(self) -> None:
        super().undo()
        now = time.monotonic()

        async def heal(host: Host, healer: int) -> None:
            with contextlib.suppress(HostFailed):  # it heals by itself
                await self._call(host, "heal", healer=healer)

        async def all_of_them() -> None:
            left = [(host, pid) for host, pid, until in self._healers if until > now]
            await asyncio.gather(*(heal(host, pid) for host, pid in left))

        asyncio.run(all_of_them())
        self._healers.clear()

    async def _call(self, host: Host, action: str, **arguments: object) -> dict[str, Any]:
        async with connected(host, self._access) as there:
            return await there.call(action, script=_SCRIPT, **arguments)
