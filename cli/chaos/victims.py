"""The processes of a node, and the master's, on this machine, as the master and the process table
tell of them."""

import contextlib
import os
import signal
from collections.abc import Sequence

import psutil

from oobleck.cli import options
from oobleck.cli.here import is_here
from oobleck.host.command import CommandFailed
from oobleck.proto import control_pb2 as pb


def check_here(nodes: Sequence[pb.NodeInfo]) -> None:
    """Raises CommandFailed unless the processes of all nodes are this machine's."""
    away = [node for node in nodes if not is_here(node)]
    if away:
        names = ", ".join(node.node for node in away)
        hosts = ", ".join(sorted({node.hostname for node in away}))
        raise CommandFailed(
            f"{names}: not on this machine ({hosts}), and a drill strikes only processes that it "
            "finds here; run it there, name the nodes of this machine with --nodes, or their hosts "
            "with --ssh HOSTS.txt",
            options.USAGE,
        )


def victims(kind: str, node: pb.NodeInfo) -> list[int]:
    """The processes that a fault of `kind` strikes, in that order; empty: there are none now."""
    match kind:
        case "kill-agent" | "stop-agent":
            return [node.pid]
        case "kill-node" | "stop-node":
            return process_tree(node.pid)
        case "kill-warm":
            return _parent_of_worker(node)
        case _:
            return [worker.pid for worker in node.workers if _is_under(worker.pid, node)][:1]


def master_pid(address: str) -> int | None:
    """The master's process, as far as it is one of this machine that the user may look into."""
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


def check_master_here(kind: str, address: str) -> None:
    """Raises CommandFailed unless the master is a process of this machine, and the user's."""
    if master_pid(address) is None:
        raise CommandFailed(
            f"--kinds {kind}: the master at {address} is no process of this machine, or another "
            "user's; run the drill on its machine as its user, or leave the kind out",
            options.USAGE,
        )


def process_tree(pid: int) -> list[int]:
    """Return the processes of an agent, workers first and the agent last: it must not get to see
    and tell the end of the others. Empty if the agent is gone."""
    with contextlib.suppress(psutil.Error):
        agent = psutil.Process(pid)
        below = [process.pid for process in agent.children(recursive=True)]
        return [*reversed(below), agent.pid]
    return []


def _is_under(pid: int, node: pb.NodeInfo) -> bool:
    """Return whether the process is still the agent's: pids are used again."""
    with contextlib.suppress(psutil.Error):
        return node.pid in [parent.pid for parent in psutil.Process(pid).parents()]
    return False


def _parent_of_worker(node: pb.NodeInfo) -> list[int]:
    with contextlib.suppress(psutil.Error):
        for worker in node.workers:
            if _is_under(worker.pid, node):
                return [psutil.Process(worker.pid).ppid()]
    return []


def kill(pids: Sequence[int]) -> list[int]:
    """SIGKILL to all of them; those that there were. Raises CommandFailed."""
    # Of several all stop first, so that none gets to see and tell the end of another.
    if len(pids) > 1:
        for pid in pids:
            send(pid, signal.SIGSTOP)
    return [pid for pid in pids if send(pid, signal.SIGKILL)]


def send(pid: int, signum: signal.Signals) -> bool:
    """Send the signal, and return whether there was such a process. Raises CommandFailed where it
    is somebody else's."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise CommandFailed(
            f"pid {pid} belongs to another user; run the drill as the user of the agents"
        ) from error
    return True
