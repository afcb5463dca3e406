"""Whether what the master says of failures is true: here it is known what really struck.

Each closed incident names a root cause. Some fault that can look like it must have struck the node
that it names, before it was declared. Must not know how the master comes to its conclusions.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from simulation.lies import STRANGER
from simulation.watch import GONE, Broken

from oobleck.core.ids import JobId, NodeName

if TYPE_CHECKING:
    from simulation.world import World

_ENDS = {
    "kill_agent", "lose_host", "lose_several", "replace_host", "start_twin", "end_agent",
}  # fmt: skip
_WORKER_ENDS = {"kill_worker", "kill_warm", "flap_node", "break_warm", "fail_forks", "sicken_node"}
_STOPS = {"freeze_worker", "freeze_host", "freeze_agent", "hang_worker"}
_DATA_CUTS = {"cut_data", "cut_both"}
_CONTROL_CUTS = {"cut_control", "cut_both", "start_twin"}
#: Of the node that lies; what a stranger to all plans says explains nothing.
_LIES = {"lie_inside"}
#: Another head, which counts on other workers than there are, or hears of some only.
_HEADS = {"mistake_directory", "lose_directory", "start_old_copy", "part_heads"}
_ANY = _HEADS | _ENDS | _WORKER_ENDS | _STOPS | _DATA_CUTS | _CONTROL_CUTS | _LIES
#: By the kind of the root cause: what may have struck the node that it names.
_EXPLAINS = {
    # A drain ends workers, and a plan that takes the node back may meet one on its way out.
    "worker died": _HEADS | _ENDS | _WORKER_ENDS | _STOPS | _LIES | {"drain_node"},
    "node lost": _HEADS | _ENDS | {"freeze_host", "freeze_agent"} | _CONTROL_CUTS,
    "agent restarted": _HEADS | _ENDS,
    "hang": _STOPS | _LIES,
    "node unfit": _ANY,
    "peers disconnected": _ANY,
    "no progress": _ANY,
    "job error": {"fail_job", "sicken_node"} | _LIES,
    "job failed": _ANY,
    "network cut": _ANY,
    "head cut off": _HEADS | _CONTROL_CUTS | {"freeze_host", "freeze_agent"},
    "site away": _HEADS | _ENDS | _CONTROL_CUTS | {"freeze_host", "freeze_agent"},
    "drained by force": {"drain_node", "end_agent"},
}
#: Those that strike no node in particular.
_EVERYWHERE = {"fail_forks", "fail_job"} | _HEADS
#: Those that show when a step comes, whenever that is.
_DORMANT = {"fail_job", "hang_worker"}
#: So long after the last fault all else is found.
_AFTER_S = 90.0
#: What a moment loses on its way through the calendar and back.
_ROUNDED_S = 1e-3


@dataclass(slots=True)
class Struck:
    kind: str
    nodes: frozenset[NodeName]
    at: float


class Truth:
    def __init__(self, world: "World") -> None:
        self._world = world
        self._struck: list[Struck] = []

    def struck(self, kind: str, words: str, nodes: list[NodeName]) -> None:
        """`words`: what the transcript says of it, with the nodes that it befell."""
        named = frozenset(name for name in (*nodes, STRANGER) if re.search(rf"\b{name}\b", words))
        self._struck.append(Struck(kind, named, self._world.loop.clock))

    def check(self, job_id: JobId) -> int:
        """Returns how many incidents there were. Raises Broken."""
        path = self._world.config.job_directory(job_id) / "events.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        incidents = [r for r in map(msgspec.json.decode, lines) if r["event"] == "incident"]
        for incident in incidents:
            if not any(self._explains(struck, incident["root_cause"]) for struck in self._struck):
                raise Broken(f"{job_id}: nothing like that has struck: {incident['summary']}")
        numbers = [incident["incident"] for incident in incidents]
        if numbers != list(range(1, len(numbers) + 1)):
            raise Broken(f"{job_id} has incidents {numbers}")
        return len(incidents)

    def _explains(self, struck: Struck, root: dict[str, Any]) -> bool:
        # All looked for a checkpoint that the master had not been told of, and there was none.
        looked = root["kind"] == "job error" and GONE in root["summary"]
        node = None if looked else root["node"]
        # The stranger ends with its lies, also if a job that waited has begun on it.
        if node == STRANGER and struck.kind == "lie_outside":
            return True
        if struck.kind not in (_ANY if looked else _EXPLAINS[root["kind"]]):
            return False
        if node is not None and struck.kind not in _EVERYWHERE and node not in struck.nodes:
            return False
        found_s = root["declared_at"] - root["time"]
        last = max(self._world.peace_at, struck.at) + _AFTER_S
        return any(
            at + found_s + _ROUNDED_S >= struck.at and (at <= last or struck.kind in _DORMANT)
            for at in self._world.moments(root["time"])
        )
