"""Points at which a master can be made to die as by `kill -9`, for tests of what is left then.

`arm` is called once, from the command line; where nothing is armed `reach` does nothing. The point
of a torn write lies between the two halves of it.
"""

import os
import signal

POINTS = (
    "applied",  # decided and applied, not in the journal
    "journal-torn",
    "committed",  # in the journal, nothing is told
    "events-torn",
    "told",  # the agents' assignments are in their outboxes
    "metrics-torn",
    "evaluations-torn",
    "snapshot-written",  # the new journal file is there, and not in place
    "snapshot-placed",
)
_armed: list[tuple[str, int]] = []


def arm(point: str, count: int) -> None:
    """Die when `point` is reached for the `count`-th time. Raises ValueError."""
    if point not in POINTS:
        raise ValueError(f"{point!r} is no point to die at; there are {', '.join(POINTS)}")
    _armed.append((point, count))


def is_armed(point: str) -> bool:
    return any(name == point for name, _ in _armed)


def reach(point: str) -> None:
    for index, (name, left) in enumerate(_armed):
        if name == point:
            if left <= 1:
                os.kill(os.getpid(), signal.SIGKILL)
            _armed[index] = (name, left - 1)
