"""The master's settings: one frozen object, built in `__main__` and passed down."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All spans that decisions depend on, in seconds."""

    #: Agents send their status at least this often.
    heartbeat_s: float = 1.0
    #: A node that is not heard of for this long is lost.
    lease_s: float = 5.0
    #: A closed stream and a peer's report this close together prove a loss.
    witness_window_s: float = 2.0
    #: How long the plan waits for the replacement of a lost worker.
    replacement_grace_s: float = 1.5
    #: Nodes that become ready within this time of each other join together.
    join_settle_s: float = 1.0
    #: Workers that report a lost peer while nobody is missing meet again after this time; where
    #: that has led to no step, each time after twice as long, up to the longest.
    regroup_s: float = 3.0
    longest_regroup_s: float = 30.0
    #: A job whose workers meet again and again, and that has no step for so long, has failed.
    fruitless_s: float = 900.0
    #: Without progress for this long, and for many times as long as steps take, the workers meet
    #: again even though nobody tells of a loss.
    stall_s: float = 30.0
    #: The same for a job's first steps, when nobody knows yet how long they take.
    first_step_s: float = 600.0
    #: How long the first plan waits for nodes that are not ready.
    start_timeout_s: float = 30.0
    #: How long the first plan waits for the measurement of the model; then the estimate is used.
    profile_timeout_s: float = 60.0
    #: It waits no longer for one whose stream has ended, if the others are enough.
    away_s: float = 1.0
    #: A master that comes to itself this late gives everyone that much more time.
    lag_limit_s: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 <= value < 86_400:
                raise ValueError(f"{name}: {value} is not a number of seconds from 0 to a day")
        if self.heartbeat_s < 0.05:
            raise ValueError(f"heartbeat_s: {self.heartbeat_s} is below 0.05 s")
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s: {self.lease_s} must be at least twice heartbeat_s ({self.heartbeat_s})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    #: HOST:PORT that the service binds to; port 0: any free one.
    listen: str
    state_dir: Path
    timing: Timing

    def __post_init__(self) -> None:
        host, colon, port = self.listen.rpartition(":")
        if not (colon and host and port.isdigit() and int(port) <= 65_535):
            raise ValueError(f"listen: {self.listen!r} is not HOST:PORT, as in 127.0.0.1:4600")

    @property
    def profiles(self) -> Path:
        """Stored measurements, one file per key."""
        return self.state_dir / "profiles"

    def job_directory(self, job_id: str) -> Path:
        return self.state_dir / "jobs" / job_id
