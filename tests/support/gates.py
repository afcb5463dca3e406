"""Exact points of a job at which it can be held, from outside, until a fault has struck.

One worker per point stops itself there, every time, by a scripted fault of its agent; a thread here
lets it go on at once, unless the point is held. Where it stands, all others wait for it soon. A
worker that was replaced has no gate any more, so workers of gates are not to be killed.

From outside all stops of a worker look alike, so a worker has one gate on the way into a plan, and
the gates of a job are those of its name.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.support.client import ClusterError
from bench.support.netcluster import NetCluster
from support.faulty import JOB_NAME
from support.waiting import is_stopped


@dataclass(frozen=True)
class Gate:
    node: str
    point: str
    #: Name of the jobs that have it.
    job: str = JOB_NAME


#: Where each worker stops itself: on its way into a plan, in between, and while it saves.
GATES = {
    "rendezvous": Gate("n1", "before:rendezvous"),
    "connect": Gate("n1", "before:connect", "struck-early"),
    "agree": Gate("n2", "before:agree", "struck-early"),
    "transfer": Gate("n2", "before:transfer"),
    "first step": Gate("n3", "after:transfer"),
    "checkpoint": Gate("n1", "before:LayerFile"),
}
_MOST_STOPS = 200
_POLL_S = 0.005
_PATIENCE_S = 240.0
#: Of looking for a worker that is not there at the moment.
_GONE = (ClusterError, IndexError, KeyError, ProcessLookupError)


def rules() -> list[dict[str, object]]:
    """The faults that make the gates."""
    return [
        {
            "worker": {"node": gate.node, "slot": 0},
            "point": gate.point,
            "job": gate.job,
            "action": "stop",
        }
        for gate in GATES.values()
        for _ in range(_MOST_STOPS)
    ]


class Gatekeeper:
    """Lets stopped workers of gates go on; a context manager."""

    def __init__(self, cluster: NetCluster) -> None:
        self._cluster = cluster
        #: Workers that were seen last: to look for them takes longer than to look at them.
        self._pids: dict[str, int] = {}
        self._held: str | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gatekeeper")

    def __enter__(self) -> "Gatekeeper":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _keep(self) -> None:
        nodes = sorted({gate.node for gate in GATES.values()})
        while not self._end.wait(_POLL_S):
            for node in nodes:
                # Under the lock, so that a stop that `hold` has seen is not undone after.
                with self._lock, contextlib.suppress(*_GONE):
                    if self._held != node and is_stopped(pid := self._pid(node)):
                        os.kill(pid, signal.SIGCONT)

    def _pid(self, node: str) -> int:
        """The node's worker. Raises some of _GONE."""
        if node not in self._pids or not os.path.exists(f"/proc/{self._pids[node]}"):
            self._pids[node] = self._cluster.worker_pids_of(node)[0]
        return self._pids[node]

    @contextlib.contextmanager
    def hold(self, gate: str) -> Iterator[None]:
        """Keep the worker that comes to the gate there until the end of the context."""
        with self._lock:
            self._held = GATES[gate].node
        try:
            yield
        finally:
            with self._lock:
                self._held = None

    def await_held(self) -> None:
        """Until a worker stands at the held gate."""
        assert self._held is not None, "only within hold()"
        deadline = time.monotonic() + _PATIENCE_S
        while not self._is_held():
            if time.monotonic() > deadline:
                raise ClusterError(f"nobody came to the gate\n{self._cluster.report()}")
            time.sleep(_POLL_S)

    def _is_held(self) -> bool:
        with contextlib.suppress(*_GONE):
            assert self._held is not None
            return is_stopped(self._pid(self._held))
        return False
