"""What a disk that no longer takes anything means: the master ends, in one line."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StorageFailed(Exception):
    """The state directory takes no more; the text is one line with the way out."""


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Around what writes `path`. Raises StorageFailed."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        words = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise StorageFailed(
            f"{path} cannot be written ({words}); training goes on without a master: free space "
            "or make it writable, and start oobleck-master anew with the same flags"
        ) from error
