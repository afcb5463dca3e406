"""Settings of the master: one frozen object, built in `__main__` and passed down."""

from dataclasses import dataclass
from pathlib import Path

from oobleck.host.detection import Detection
from oobleck.host.storage.backup import Summary


class Unusable(Exception):
    """Error in a setting; the text is one line with the flag and the fix."""


#: Seconds for which a job with a checkpoint waits for nodes before it lets another job train.
GIVES_WAY_S = 600.0
#: Least seconds until a lost node may be forgotten: it may be about to return.
_LEAST_NODE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Retention of lost nodes and ended jobs in the state; a job's files on disk are kept."""

    #: Seconds after which a lost node is forgotten.
    node_s: float = 86_400.0
    #: Most ended jobs that are kept.
    ended_jobs: int = 200

    def __post_init__(self) -> None:
        if not self.node_s >= _LEAST_NODE_S:
            raise ValueError(
                f"--forget-nodes-after: {self.node_s:g} s is too short, since a lost node "
                f"may be about to come back; give at least {_LEAST_NODE_S:g} s, as in 24h"
            )
        if self.ended_jobs < 1:
            raise ValueError(
                f"--keep-jobs {self.ended_jobs}: is too few, since whoever follows a job is told "
                "of its end; give at least 1"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterConfig:
    #: HOST:PORT that the service binds to; port 0: any free one.
    listen: str
    state_dir: Path
    timing: Detection
    #: HOST:PORT of all heads of the cluster, sent to agents; none: unknown.
    heads: tuple[str, ...] = ()
    #: HOST:PORT of the page of metrics; None: there is none.
    metrics_listen: str | None = None
    #: HOST:PORT of the health check, open to all; None: there is none.
    health_listen: str | None = None
    #: Folder of the cluster's authority; None: the service is in the clear.
    pki: Path | None = None
    #: Identity of that authority; empty: there is none.
    cluster: str = ""
    #: Identity of the state directory; a copy of the directory has another one, on any host.
    place: str = ""
    #: Validity of the certificates issued to agents, operators and viewers.
    certificate_life_s: float = 90 * 86_400.0
    retention: Retention = Retention()
    #: Seconds for which a job with a checkpoint waits for nodes before it gives way.
    gives_way_s: float = GIVES_WAY_S
    #: Seconds that records wait for those of earlier steps: longer than the wait for any node.
    records_wait_s: float = 60.0
    #: Check the invariants of the state after every event, and end where one is broken.
    validate: bool = False
    #: Backup that this start restores; None: the state directory is the master's own.
    restored: Summary | None = None

    @property
    def profiles(self) -> Path:
        """Stored measurements, one file per key."""
        return self.state_dir / "profiles"

    @property
    def code(self) -> Path:
        """Wheels of jobs, by their hashes."""
        return self.state_dir / "code"

    @property
    def tracking(self) -> Path:
        """Copies of jobs for other programs."""
        return self.state_dir / "tracking"

    @property
    def viewer(self) -> Path:
        """Folder of the credentials that the processes behind `tracking` present to the master."""
        return self.state_dir / "viewer"

    def job_directory(self, job_id: str) -> Path:
        return self.state_dir / "jobs" / job_id
