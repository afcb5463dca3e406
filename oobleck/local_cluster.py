"""A whole cluster on this machine for notebooks and tests: `oobleck local` in the background.

The daemons and their watch are those of `oobleck local`. If this process ends in any way, so do all
that it started. Must not know the daemons' work.
"""

import atexit
import logging
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from oobleck.cli.chaos.injector import kill, victims
from oobleck.cli.cluster.cluster import Cluster
from oobleck.cli.cluster.local import check_room
from oobleck.client import Client
from oobleck.errors import NotFound, Refused, error_of
from oobleck.host.command import CommandFailed

log = logging.getLogger(__name__)


@contextmanager
def local(
    nodes: int = 5, workers_per_node: int = 1, state_dir: str | Path | None = None
) -> Iterator["LocalCluster"]:
    """Run a master and `nodes` agents, named n1 and so on. Raises Error.

    `state_dir`: journal, metrics and logs, kept for the next start; without it they are in a folder
    that is removed with the cluster. The cluster also ends with the thread that started it.
    """
    if min(nodes, workers_per_node) < 1:
        raise Refused("no local cluster: nodes and workers_per_node: give at least 1")
    with ExitStack() as stack:
        if state_dir is None:
            folder = tempfile.TemporaryDirectory(prefix="oobleck-", ignore_cleanup_errors=True)
            state_dir = stack.enter_context(folder)
        daemons = Cluster(Path(state_dir), tell=log.info, restart=True)
        stack.callback(daemons.stop)
        # A notebook may never leave the block.
        atexit.register(stack.close)
        stack.callback(atexit.unregister, stack.close)
        try:
            memory = check_room(nodes, workers_per_node, oversubscribe=False)
            each = memory // (nodes * workers_per_node)
            daemons.start("127.0.0.1:0", nodes, workers_per_node, each, None)
            daemons.wait_until_ready()
        except CommandFailed as failed:
            text = f"no local cluster: {failed.format_message()}"
            raise error_of(text, failed.exit_code) from failed
        stack.enter_context(_watched(daemons))
        yield LocalCluster(daemons, Path(state_dir), stack.enter_context(Client(daemons.endpoint)))


@contextmanager
def _watched(daemons: Cluster) -> Iterator[None]:
    """Restart agents that die, in a thread, until the end of the block."""
    over = threading.Event()

    def watch() -> None:
        with suppress(CommandFailed):  # all have ended
            daemons.watch(over)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class LocalCluster:
    """Running cluster, made by `local`."""

    def __init__(self, daemons: Cluster, state_dir: Path, client: Client) -> None:
        self._daemons = daemons
        #: Address of the master, for other operators and for the command.
        self.master = daemons.address
        self.state_dir = state_dir
        #: Operator of the cluster.
        self.client = client

    @property
    def nodes(self) -> dict[str, int]:
        """Running agents' process ids, by name."""
        agents = [agent for agent in self._daemons.agents if agent.alive]
        return {agent.name.removeprefix("agent "): agent.pid for agent in agents}

    def kill(self, node: str) -> None:
        """Send SIGKILL to the node's agent and all its workers, as if its machine had died. The
        agent is restarted after two seconds. Raises NotFound."""
        found = [agent for agent in self._daemons.agents if agent.name == f"agent {node}"]
        if not found or not found[0].alive:
            running = ", ".join(sorted(self.nodes)) or "none"
            raise NotFound(f"no node {node!r} runs here; running: {running}")
        kill(victims("kill-node", found[0].pid))
        found[0].process.wait()
