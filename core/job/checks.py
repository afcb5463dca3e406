"""Limits of a job's numbers, as types; and checks of its paths, whose errors begin with the key."""

import re
from collections.abc import Iterable
from typing import Annotated
from unicodedata import category

from msgspec import Meta

from oobleck.core.redact import redact

#: The largest number that fits into messages. Other limits are far above any use. They are low
#: enough that a slip of the keyboard keeps neither the master nor the workers busy for hours.
MOST = (1 << 63) - 1
Count = Annotated[int, Meta(ge=1, le=MOST)]
NotNegative = Annotated[int, Meta(ge=0, le=MOST)]
Amount = Annotated[float, Meta(ge=0)]
Part = Annotated[float, Meta(ge=0, lt=1)]
#: Most characters of a path, so that a checkpoint's name behind it still fits into a line of the
#: wire.
MOST_PATH = 900
#: Unicode categories that no path has on purpose: controls, invisible marks, bytes that are no
#: text. The two joiners below are allowed: some scripts need them to join letters.
_UNSEEN = ("Cc", "Cf", "Cs")
_JOINERS = "\u200c\u200d"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def url_refusal(place: str) -> str:
    """Return the error about a path that is a URL; empty: it is no URL."""
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
