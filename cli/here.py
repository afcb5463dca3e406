"""Checks of whether nodes are on this machine, by what the master and the process table tell."""

import contextlib
from collections.abc import Sequence

import psutil

from oobleck.host.address import own_hostname
from oobleck.proto import control_pb2 as pb


def is_here(node: pb.NodeInfo) -> bool:
    """Return whether the agent's process is one of this machine, and an agent."""
    if node.hostname != own_hostname():
        return False
    with contextlib.suppress(psutil.Error):
        return any(
            "oobleck" in word and "agent" in word for word in psutil.Process(node.pid).cmdline()
        )
    return False


def all_here(nodes: Sequence[pb.NodeInfo]) -> bool:
    """Return whether this machine's files are the nodes' too: there are nodes, and their agents are
    all processes of this machine."""
    there = [node for node in nodes if node.state != "lost"]
    return bool(there) and all(map(is_here, there))
