"""Names and numbers that identify things, one type each so that they cannot be swapped."""

import re
from typing import NewType

import msgspec

NodeName = NewType("NodeName", str)
JobId = NewType("JobId", str)
#: Number of a plan; increases by one with every new plan.
Generation = NewType("Generation", int)
#: Random hex id of one start of an agent or a worker process.
Incarnation = NewType("Incarnation", str)

#: Characters of a refused name that a message repeats.
_SHOWN = 80
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_RACK = re.compile(r"[A-Za-z0-9._:/-]{1,63}")


def check_name(name: str, what: str) -> str:
    """Return `name` if it may name a `what` (node, job); else raise ValueError with the rule."""
    if _NAME.fullmatch(name) is None:
        near = nearest_name(name)
        hint = f"; {near!r} would do" if near else ""
        raise ValueError(
            f"{what} name {name[:_SHOWN]!r} is not allowed: use 1 to 63 of a-z, 0-9, '.', '_' and "
            f"'-', beginning with a letter or a digit{hint}"
        )
    return name


def check_rack(rack: str) -> str:
    """Return `rack` if it may label a node's rack, or is empty; else raise ValueError."""
    if rack and _RACK.fullmatch(rack) is None:
        raise ValueError(
            f"rack {rack[:_SHOWN]!r} is not allowed: use 1 to 63 letters, digits, '.', '_', ':', "
            "'/' and '-'"
        )
    return rack


def nearest_name(text: str) -> str:
    """Return `text` with disallowed characters replaced; may be empty."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._")[:63].rstrip("-._")


class WorkerId(msgspec.Struct, frozen=True, order=True, gc=False):
    """GPU (or CPU slot) of a node; outlives the processes that run there one after the other.

    A Struct: plans of a thousand nodes hash and compare as many of them again and again.
    """

    node: NodeName
    slot: int

    def __str__(self) -> str:
        return f"{self.node}/{self.slot}"
