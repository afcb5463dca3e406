"""The processes of a node on this machine, as the master and the process table tell of them."""

import contextlib
import os
import signal
import socket
from collections.abc import Sequence

import psutil

from oobleck.cli import options
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
            "finds here; run it there, or name the nodes of this machine with --nodes",
            options.USAGE,
        )


def is_here(node: pb.NodeInfo) -> bool:
    """Whether the agent's process is one of this machine, and an agent."""
    if node.hostname != socket.gethostname():
        return False
    with contextlib.suppress(psutil.Error):
        return any(
            "oobleck" in word and "agent" in word for word in psutil.Process(node.pid).cmdline()
        )
    return False


def victim(kind: str, node: pb.NodeInfo) -> int | None:
    """The process that a fault of `kind` strikes; None: the node has none at the moment."""
    match kind:
        case "kill-agent" | "stop-agent":
            return node.pid
        case "kill-warm":
            return _parent_of_worker(node)
        case _:
            return next(
                (worker.pid for worker in node.workers if _is_under(worker.pid, node)), None
            )


def _is_under(pid: int, node: pb.NodeInfo) -> bool:
    """Whether the process is still the agent's: pids are used again."""
    with contextlib.suppress(psutil.Error):
        return node.pid in [parent.pid for parent in psutil.Process(pid).parents()]
    return False


def _parent_of_worker(node: pb.NodeInfo) -> int | None:
    with contextlib.suppress(psutil.Error):
        for worker in node.workers:
            if _is_under(worker.pid, node):
                return psutil.Process(worker.pid).ppid()
    return None


def send(pid: int, signum: signal.Signals) -> bool:
    """Whether there was such a process. Raises CommandFailed where it is somebody else's."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    except PermissionError as error:
        raise CommandFailed(
            f"pid {pid} belongs to another user; run the drill as the user of the agents"
        ) from error
    return True
