"""All metrics of an agent: their families, and where they are read.

What is asked of the host itself is in `read_slowly`, since a disk or a driver may take its time;
of GPUs the agent keeps what NVML said last (`oobleck.agent.health`).
"""

from collections.abc import Iterator

from oobleck.agent.metrics import gpus, host, workers
from oobleck.host.metrics.families import Reading, families_of

FAMILIES = families_of(workers, gpus, host)


def read_slowly() -> Iterator[Reading]:
    """What the event loop does not wait for."""
    yield from host.read()
