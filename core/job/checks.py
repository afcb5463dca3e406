"""Checks of a job's paths and numbers, with errors that begin with the key."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from unicodedata import category

from oobleck.core.redact import redact

#: Characters of a path, so that it still fits into one wire field with a checkpoint's name
#: appended.
MOST_PATH = 900
#: Unicode categories that no path has on purpose: controls, invisible marks, bytes that are no
#: text. The two joiners below are allowed: some scripts need them to join letters.
_UNSEEN = ("Cc", "Cf", "Cs")
_JOINERS = "\u200c\u200d"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def url_refusal(place: str) -> str:
    """Return the refusal of a path that is a URL; empty where it is none."""
    if not _URL.match(place):
        return ""
    return (
        f"{redact(place)}: URLs are not supported yet here; give a path that is the same on all "
        "nodes, on disks of their own or a shared one"
    )


def check_place(name: str, place: str, what: str) -> None:
    """Check a path or URL of a job; raises ValueError. `what` names the expected value in the error
    about an empty one."""
    if not place.strip():
        raise ValueError(f"{name}: is empty; give {what}")
    if any(category(c) in _UNSEEN and c not in _JOINERS for c in place):
        raise ValueError(f"{name}: has characters that cannot be printed; name another place")
    if len(place) > MOST_PATH:
        raise ValueError(f"{name}: is longer than {MOST_PATH} characters; name another place")


def check_paths(name: str, places: Iterable[str | None]) -> None:
    for place in places:
        if place is not None:
            check_place(name, place, "a path")
            if why := url_refusal(place):
                raise ValueError(f"{name}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one number of a job; None means no limit.

    The largest are far above any use, and within what planning and the commit vote handle in a
    moment. A typing error must not keep the master or every worker busy for hours.
    """

    at_least: float | None = None
    at_most: float | None = None
    #: Exclusive limits. A value with only such a limit is refused by its owner, in its own words.
    above: float | None = None
    below: float | None = None


#: At least 0 and less than 1.
PART = Limits(at_least=0, below=1)


def check_limits(owner: object, limits: Mapping[str, Limits]) -> None:
    """Check that each field is within its limits; raises ValueError for the first that is not."""
    for name, of in limits.items():
        value = getattr(owner, name)
        if value is None:
            continue
        if of.at_least is not None and of.below is not None:
            if not of.at_least <= value < of.below:
                raise ValueError(f"{name}: {value} is not in [{of.at_least:g}, {of.below:g})")
            continue
        if of.at_least is not None and not value >= of.at_least:
            raise ValueError(f"{name}: {value} is too small; it must be at least {of.at_least}")
        if of.at_most is not None and value > of.at_most:
            raise ValueError(f"{name}: {value} is too large; it must be at most {of.at_most}")
