"""All metrics of an agent: their families, and where they are read.

What a device tells of itself, as a GPU does, is a module beside `host`, with its families
in `FAMILIES` and its reading in `read_slowly`: a driver may take its time.
"""

from collections.abc import Iterator

from oobleck.agent.metrics import host, workers
from oobleck.host.metrics.families import Reading, families_of

FAMILIES = families_of(workers, host)


def read_slowly() -> Iterator[Reading]:
    """What the event loop does not wait for."""
    yield from host.read()
