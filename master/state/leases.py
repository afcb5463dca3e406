"""Leases of nodes: how long each may be silent, given the silence of the others. Pure.

A master whose loop was late extends all leases by the delay (`Tick`), and gives nodes as much time
to return as after its restart, so that its own pauses count against no node. Nodes get this time
also if many streams were cut together, or if they fell silent together, as when the head has lost
its network. While many return, each gets a further answer time after the last one that did:
handshakes need a processor.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from oobleck.host.detection import Detection
from oobleck.master.state.cluster import ClusterState
from oobleck.master.state.node import Node

#: Number of streams that end within the witness window from which on they count as cut together.
_MANY = 8
#: Heartbeats of silence before a stream's end from which on the node counts as silent rather than
#: cut. Nodes last heard within this time of each other fell silent together.
_SILENT = 2
#: Longest wait for a node, as a multiple of the time to return, however many nodes return.
_MOST_RETURNS = 3


def last_sign(state: ClusterState, node: Node) -> float:
    """Return when the node was last known to be alive. A member of the plan that this master
    process has not heard from was alive when the plan was made, and at the last recorded step."""
    job, seen = state.job, node.seen
    if seen.heard_at is not None or job is None or not job.current.has_member(node.facts.node):
        return seen.last_heard
    if not job.seen.steps.recent or job.state == "waiting for nodes":
        return seen.last_heard
    alive_at = max(job.seen.steps.recent[-1].time, job.current.made_at)
    return min(seen.last_heard, job.seen.since - (job.seen.since_unix - alive_at))


class Leases:
    """Leases of all nodes: how long each may be silent, given the state of the others."""

    def __init__(self, state: ClusterState, now: float, timing: Detection) -> None:
        self._timing, self._silent_s = timing, _SILENT * timing.heartbeat_s
        seen = [node.seen for node in state.nodes.values() if node.registered]
        # Include lost nodes, so that a loss does not change the time of the others.
        cuts = (node.seen.cut_at for node in state.nodes.values())
        self._cuts = sorted(at for at in cuts if at is not None)
        #: Time of the last return of a node; None: none has returned, or none is away.
        self._opened_at: float | None = None
        if any(one.session is None for one in seen):
            opened = (one.opened_at for one in seen if one.opened_at is not None)
            self._opened_at = max(opened, default=None)
        #: Sorted times at which nodes were last heard, and at which returned nodes were last heard
        #: before their silence. Empty: no node is silent for a lease.
        self._heard, self._heard_before = list[float](), list[float]()
        if any(now >= one.last_heard + timing.lease_s for one in seen):
            self._heard = sorted(one.last_heard for one in seen)
            self._heard_before = sorted(
                one.heard_before
                for one in seen
                if one.heard_before is not None
                and one.opened_at is not None
                and one.opened_at - one.heard_before > self._silent_s
            )

    def of(self, node: Node) -> tuple[float, str]:
        """Return the end of the node's lease, and its length as text."""
        timing, heard_at = self._timing, node.seen.last_heard
        if node.seen.awaited:
            why = "once the master was away"
        elif self._cut_with_many(node):
            why = "where many streams are cut"
        elif self._silent_with_all(node):
            why = "where all nodes fall silent together"
        else:
            return heard_at + timing.lease_s, f"{timing.lease_s:g} s"
        end = heard_at + timing.return_s
        if self._opened_at is not None:
            most = heard_at + _MOST_RETURNS * timing.return_s
            end = max(end, min(self._opened_at + timing.answer_s, most))
        return end, f"{timing.return_s:g} s {why}"

    def _cut_with_many(self, node: Node) -> bool:
        at, window_s = node.seen.closed_at, self._timing.witness_window_s
        if at is None or self._fell_silent(node):
            return False
        return _between(self._cuts, at - window_s, at + window_s) >= _MANY

    def _silent_with_all(self, node: Node) -> bool:
        """Return whether all nodes that were heard after this one had been silent since the same
        time."""
        if len(self._heard) < 2 or not self._fell_silent(node):
            return False
        first, last = node.seen.last_heard - self._silent_s, node.seen.last_heard + self._silent_s
        since = len(self._heard) - bisect_right(self._heard, last)
        return since <= _between(self._heard_before, first, last)

    def _fell_silent(self, node: Node) -> bool:
        """Return whether the node fell silent, rather than having its stream cut."""
        closed_at = node.seen.closed_at
        return closed_at is None or closed_at - node.seen.last_heard > self._silent_s


def _between(times: Sequence[float], first: float, last: float) -> int:
    """Count the `times`, which are sorted, from `first` to `last`, both included."""
    return bisect_right(times, last) - bisect_left(times, first)


def reconnect_s(state: ClusterState, node: Node, now: float, timing: Detection) -> float:
    """Return the seconds left for the node to reconnect, unless its loss is proven earlier."""
    end, _ = Leases(state, now, timing).of(node)
    return end - now
