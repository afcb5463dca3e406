"""Checks of whether nodes are on this machine, by the master's and the process table's data."""

import contextlib
from collections.abc import Sequence

import psutil

from oobleck.host.address import own_hostname
from oobleck.proto import control_pb2 as pb


def is_here(node: pb.NodeInfo) -> bool:
    """Return whether the node's agent is a process of this machine."""
    if node.hostname != own_hostname():
        return False
    with contextlib.suppress(psutil.Error):
        return any(
            "oobleck" in word and "agent" in word for word in psutil.Process(node.pid).cmdline()
        )
    return False


def all_here(nodes: Sequence[pb.NodeInfo]) -> bool:
    """Return whether all nodes are on this machine, and so share its files.

    False if there are none.
    """
    there = [node for node in nodes if node.state != "lost"]
    return bool(there) and all(map(is_here, there))
