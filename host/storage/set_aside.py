"""Setting a damaged checkpoint aside: a file beside its manifest says what is damaged in it.

Object stores have no rename, so the folder keeps its name, and whoever looks for checkpoints passes
it over. Must not know how damage is found.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

from oobleck.host.storage.folder import Folder
from oobleck.host.system.files import WrongFile
from oobleck.planner.codec import decode, encode

#: The file's name.
DAMAGED = "damaged.json"

_MOST_FILES = 16
_MOST_CHARACTERS = 200
_MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What the file says."""

    #: Unix time.
    found: float
    #: By file; not all of many.
    problems: dict[str, str]

    def __str__(self) -> str:
        return "; ".join(f"{file}: {problem}" for file, problem in self.problems.items())


def set_aside(folder: Folder, problems: Mapping[str, str], now: float) -> None:
    """`folder`: of the checkpoint; `now`: Unix time. Raises OSError."""
    some = islice(problems.items(), _MOST_FILES)
    told = {file: problem[:_MOST_CHARACTERS] for file, problem in some}
    folder.write(DAMAGED, [encode(Mark(found=now, problems=told))])


def read_mark(folder: Folder) -> Mark | None:
    """None: the checkpoint in `folder` is not set aside. Raises OSError."""
    if not folder.exists(DAMAGED):
        return None
    try:
        return decode(Mark, folder.read(DAMAGED, most_bytes=_MOST_BYTES))
    except (ValueError, WrongFile):  # somebody's own way of setting it aside
        return Mark(found=0.0, problems={DAMAGED: "says so"})


def take_back(folder: Folder) -> None:
    """The checkpoint in `folder` is whole. Raises OSError."""
    folder.remove(DAMAGED)
