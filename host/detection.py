"""Time-outs of a cluster, which decide how fast faults are found; one word chooses all of them.

`oobleck-master --detection fast|balanced|wan` chooses; agents get it with their welcome.
docs/faults.md has the three side by side.

A silent host is lost between lease - heartbeat and lease after its last sign of life. A hang is
declared after the longer of its time-out and `HUNG_STEPS` times the 99th percentile of step times.
Owns the numbers; `tests/host/test_detection.py` has the relations that they keep. Must not know the
reaction to a fault.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

Mode = Literal["fast", "balanced", "wan"]
MODES: tuple[Mode, ...] = get_args(Mode)

_DAY_S = 86_400.0
#: How many times as long as the slowest one seen a start may take.
_SLOWER = 1.5
#: Multiple of the longest usual step after which a lack of progress is a hang.
HUNG_STEPS = 4.0
#: Longest time that agents gather the reports of workers that enter a plan, to send them together.
#:
#: They are sent earlier with the plan's first step record, or with a report that the master acts
#: on. One by one they would keep the master busy while all wait for that step.
GATHER_REPORTS_S = 0.25
#: Shortest silence that is a fault: another worker's host is probed every second, and a full link
#: loses some probes.
_LEAST_SILENCE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Time-outs that decisions depend on, in seconds. Raises ValueError if one is not from 0 to a
    day."""

    #: Longest time between two statuses of an agent, and between its probes of its workers.
    heartbeat_s: float = 1.0
    #: Silence after which a node is lost.
    lease_s: float = 4.0
    #: Longer lease where the fault may be the master's: it has just started or was paused, many
    #: streams were cut together, or all nodes fell silent at once.
    return_s: float = 10.0
    #: Time between keepalive pings of either end of a connection, and the wait for an answer before
    #: it is closed.
    ping_every_s: float = 2.0
    ping_timeout_s: float = 2.0
    #: Time after which an agent abandons a master that does not accept or answer its messages.
    answer_s: float = 5.0
    #: Longest wait before an agent reconnects. Each wait is a random part of it.
    longest_retry_s: float = 2.0
    #: A closed stream and a peer's report this close together prove a loss.
    witness_window_s: float = 2.0
    #: Time after which workers meet again if some report a lost peer but none is missing. It
    #: doubles with each such meeting that leads to no step.
    regroup_s: float = 3.0
    longest_regroup_s: float = 30.0
    #: Time after which a stopped worker process, or one whose training thread hangs, is lost.
    hang_s: float = 8.0
    #: Time without progress after which workers that all wait for each other meet again.
    stall_s: float = 8.5
    #: The same while they meet, move layers, and save the result.
    meeting_s: float = 30.0
    #: If a process wakes up later than intended by this much, it extends all deadlines: messages of
    #: others may wait for it unread.
    lag_limit_s: float = 1.0
    #: Longest wait of the others for the replacement of a lost worker's process.
    replacement_grace_s: float = 1.5
    #: The same with a GPU to open, which takes some seconds; longer where starts took longer.
    gpu_grace_s: float = 6.0
    #: Nodes that become ready within this time of each other join together.
    join_settle_s: float = 1.0
    #: Longest time that files may keep a worker waiting.
    storage_s: float = 120.0
    #: Time for a process's first step, when libraries compile and step times are still unknown.
    first_step_s: float = 600.0
    #: Time without a step after which a job whose workers keep meeting has failed.
    fruitless_s: float = 900.0
    #: Longest wait of the first plan for nodes that are not ready.
    start_timeout_s: float = 30.0
    #: Longest wait for a node whose stream has ended, if the others are enough.
    away_s: float = 1.0
    #: Longest wait of the first plan for the measurement of the model; then the estimate is used.
    profile_timeout_s: float = 60.0
    #: Time that a repeatedly failing node is quarantined, doubled each time; 0: never.
    quarantine_s: float = 60.0
    #: Time between measurements of a worker that stands by because it is slow.
    stand_by_s: float = 60.0

    @property
    def silence_s(self) -> float:
        """Silence after which a worker reports another worker's host as unreachable. It exceeds the
        time in which the master declares such a host lost."""
        return max(self.lease_s + 1, _LEAST_SILENCE_S)

    def grace_s(self, device: str, started_s: float = 0.0) -> float:
        """Return the replacement grace of a process on a `device`: cpu or cuda. `started_s`: how
        long the newest such process took to start; 0: none has."""
        cpu, gpu = self.replacement_grace_s, self.gpu_grace_s
        if device != "cuda":
            return cpu
        return min(max(cpu, gpu, _SLOWER * started_s), self.meeting_s)

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < _DAY_S:
                raise ValueError(
                    f"{field.name}: {value} is not a number of seconds from 0 to a day"
                )
        if self.heartbeat_s < 0.05:
            raise ValueError(f"heartbeat_s: {self.heartbeat_s} is below 0.05 s")


#: Values of the modes fast and wan where they differ from balanced, which has the defaults.
_FAST_AND_WAN: Mapping[str, tuple[float, float]] = {
    "heartbeat_s": (0.5, 3.0),
    "lease_s": (2.0, 20.0),
    "return_s": (5.0, 40.0),
    "ping_every_s": (1.0, 10.0),
    "ping_timeout_s": (1.0, 10.0),
    "answer_s": (3.0, 20.0),
    "longest_retry_s": (1.0, 8.0),
    "witness_window_s": (1.0, 5.0),
    "regroup_s": (1.5, 8.0),
    "longest_regroup_s": (15.0, 60.0),
    "hang_s": (4.0, 25.0),
    "stall_s": (4.5, 30.0),
    "meeting_s": (15.0, 90.0),
    "lag_limit_s": (0.5, 3.0),
    "replacement_grace_s": (1.5, 3.0),
    "join_settle_s": (1.0, 3.0),
}
DETECTIONS: Mapping[Mode, Detection] = {
    "fast": Detection(**{name: fast for name, (fast, _) in _FAST_AND_WAN.items()}),
    "balanced": Detection(),
    "wan": Detection(**{name: wan for name, (_, wan) in _FAST_AND_WAN.items()}),
}


def choose(mode: Mode, time_outs: Mapping[str, float | None]) -> Detection:
    """Return the mode's time-outs, replaced by those given in `time_outs`. Raises ValueError."""
    given = {name: value for name, value in time_outs.items() if value is not None}
    return replace(DETECTIONS[mode], **given)


def patience_s(least_s: float, usual_step_s: float) -> float:
    """Return the time without progress after which a worker counts as hung. `usual_step_s`: longest
    usual step."""
    return max(least_s, HUNG_STEPS * usual_step_s)
