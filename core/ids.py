"""Names and numbers that identify things, one type each so that they cannot be swapped."""

import re
from dataclasses import dataclass
from typing import NewType

NodeName = NewType("NodeName", str)
JobId = NewType("JobId", str)
#: Number of a plan; grows by one with every change of the plan.
Generation = NewType("Generation", int)
#: Random hex id of one start of an agent or a worker.
Incarnation = NewType("Incarnation", str)

#: Characters of a wrong name that a message repeats.
_SHOWN = 80
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def check_name(name: str, what: str) -> str:
    """Return `name` if it may name a `what` (node, job); raise ValueError with the rule if not."""
    if _NAME.fullmatch(name) is None:
        near = nearest_name(name)
        hint = f"; {near!r} would do" if near else ""
        raise ValueError(
            f"{what} name {name[:_SHOWN]!r} is not allowed: use 1 to 63 of a-z, 0-9, '.', '_' and "
            f"'-', beginning with a letter or a digit{hint}"
        )
    return name


def nearest_name(text: str) -> str:
    """`text` with whatever a name may not contain replaced; may be empty."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63].rstrip("-._")


@dataclass(frozen=True, slots=True, order=True)
class WorkerId:
    """GPU (or CPU slot) of a node; outlives the processes that fill it one after the other."""

    node: NodeName
    slot: int

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"
