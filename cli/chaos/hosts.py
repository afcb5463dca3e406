"""Strikes on nodes of other machines, over ssh; the master is struck where the drill runs."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from oobleck.cli import options
from oobleck.cli.chaos.striker import Striker
from oobleck.cli.ssh.connection import Access, HostFailed, connected
from oobleck.cli.ssh.hosts import Host
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb

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
            raise CommandFailed("; ".join(problems), options.USAGE)

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
        async with connected(self._hosts[node], self._access) as there:
            return await there.call(action, script=_SCRIPT, **arguments)
