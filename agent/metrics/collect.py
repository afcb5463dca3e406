"""Metrics of an agent: their families, and where they are read.

`read_slowly` reads those of the host itself, since a disk or a driver may take its time; for GPUs
the agent keeps the newest samples of NVML (`oobleck.agent.health`).
"""

from collections.abc import Iterator

from oobleck.agent.metrics import gpus, host, workers
from oobleck.host.metrics.families import Reading, families_of

FAMILIES = families_of(workers, gpus, host)


def read_slowly() -> Iterator[Reading]:
    """Read the metrics for which the event loop does not wait."""
    yield from host.read()
