"""Restarts of agents, a few at a time, while training goes on.

The master drains each node first, which costs no step, and refuses if a job cannot spare it. The
next node follows once this one takes part again. The first node that does not ends the roll. A node
that an operator had drained before stays drained, with its reason.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from oobleck.cli.client import MasterClient
from oobleck.cli.output.text import ENDED, GONE, about
from oobleck.cli.ssh.hosts import HostFailed
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb

REASON = "oobleck up --rolling restarts its agent"
#: Longest time until a node is drained, and until it takes part again.
DRAINED_S = 600.0
BACK_S = 900.0
#: Longest wait for a job to release a node once no other node is about to return: the job may still
#: be taking in the last one.
KEPT_S = 15.0
_POLL_S = 0.5
#: States of nodes that are taken out, and of those without work.
_OUT = ("draining", "drained")
_IDLE = ("drained", "quarantined", *GONE)


class Rolling:
    """Turns of the nodes whose agents are to be restarted."""

    def __init__(self, master: MasterClient, at_a_time: int, *, force: bool) -> None:
        """Begin. `force`: drain nodes that a job cannot spare, too."""
        self._master = master
        self._force = force
        #: Nodes that are drained for their turn, and do not take part again yet.
        self._restarting = set[str]()
        self._turns = asyncio.Semaphore(at_a_time)
        #: Node that ended the roll; empty: it goes on.
        self._ended_at = ""

    @asynccontextmanager
    async def turn(self, name: str, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Wait for the node's turn, and drain it; after the block wait until it takes part again.
        Raise HostFailed."""
        say("waiting for its turn")
        async with self._turns:
            if self._ended_at:
                raise HostFailed(
                    f"not restarted, because the roll ended at {self._ended_at}; mend that, and "
                    "call again"
                )
            try:
                job_id = await self._trained_by(name)
                async with self._drained(name, say):
                    self._restarting.add(name)
                    yield
                say("waiting until it takes part")
                await self._await_part(name, job_id)
            except (HostFailed, CommandFailed) as failed:
                self._ended_at = name
                raise HostFailed(str(failed)) from failed
            finally:
                self._restarting.discard(name)

    @asynccontextmanager
    async def _drained(self, name: str, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Keep the node drained during the block. A node that was drained before stays drained."""
        info = await self._node(name)
        ours = info.state not in (*_OUT, *_IDLE)
        say("draining")
        try:
            if ours:
                (info,) = await asyncio.to_thread(
                    self._master.drain, name, reason=REASON, force=self._force
                )
            await self._await_drained(info, is_forced=ours and self._force)
            yield
        finally:
            if ours:
                await asyncio.to_thread(self._master.undrain, name)

    async def _await_drained(self, info: pb.NodeInfo, *, is_forced: bool) -> None:
        """Wait until the node has no work. Raise HostFailed, soon if a job needs the node and no
        other one is about to return."""
        until = time.monotonic() + DRAINED_S
        kept_until = None
        while info.state not in _IDLE:
            now = time.monotonic()
            if not info.kept or is_forced or self._restarting:
                kept_until = None
            elif kept_until is None:
                kept_until = now + KEPT_S
            elif now > kept_until:
                raise HostFailed(f"it cannot be drained: {info.reason}")
            if now > until:
                raise HostFailed(f"it is not drained after {about(DRAINED_S)}: {info.reason}")
            await asyncio.sleep(_POLL_S)
            info = await self._node(info.node)

    async def _trained_by(self, name: str) -> str:
        """Return the job in whose plan the node is; empty: none."""
        info = await self._node(name)
        return info.job_id if info.generation else ""

    async def _await_part(self, name: str, job_id: str) -> None:
        """Wait until the node is in the job's plan again, is taken out, or the job has ended."""
        until = time.monotonic() + BACK_S
        while job_id:
            info = await self._node(name)
            if info.state == "live" and info.job_id == job_id and info.generation:
                return
            if info.state in _OUT:
                return
            jobs = await asyncio.to_thread(self._master.jobs)
            if not any(job.job_id == job_id and job.state not in ENDED for job in jobs):
                return
            if time.monotonic() > until:
                why = f": {info.reason}" if info.reason else ""
                waited = about(BACK_S)
                raise HostFailed(
                    f"its agent is up, but takes no part in {job_id} after {waited}{why}"
                )
            await asyncio.sleep(_POLL_S)

    async def _node(self, name: str) -> pb.NodeInfo:
        nodes = await asyncio.to_thread(self._master.nodes)
        found = next((node for node in nodes if node.node == name), None)
        if found is None:
            raise HostFailed("the master has forgotten it; call again")
        return found
