"""The master's settings: one frozen object, built in `__main__` and passed down."""

from dataclasses import dataclass
from pathlib import Path

from oobleck.host.detection import Detection


class Unusable(Exception):
    """What the settings name cannot be used; the text is one line with the flag and the fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    #: HOST:PORT that the service binds to; port 0: any free one.
    listen: str
    state_dir: Path
    timing: Detection
    #: Folder of the cluster's authority; None: the service is in the clear.
    pki: Path | None = None
    #: Of the certificates that agents, operators and viewers are given.
    certificate_life_s: float = 90 * 86_400.0

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
