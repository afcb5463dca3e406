"""Colours on a terminal: of states alone, so that what needs a look stands out. Pure, but for
what asks whether there is one."""

import os
import re
import sys

import click

_COLOURS = {
    "green": ("running", "succeeded", "live"),
    "yellow": (
        *("reconfiguring", "waiting for nodes", "draining", "drained", "disconnected"),
        "quarantined",
    ),
    "red": ("failed", "cancelled", "lost", "held"),
}
#: By the state of a job or a node; one that needs no look has none.
COLOUR_OF = {state: colour for colour, states in _COLOURS.items() for state in states}
#: A state stands second: behind the name in a listing, behind `state` of one job.
_STATE = re.compile(
    rf"^(\S+ +)({'|'.join(sorted(COLOUR_OF, key=len, reverse=True))})(?=:|\s|$)", re.MULTILINE
)


def is_terminal() -> bool:
    """Return whether standard output is a terminal that obeys escapes."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def is_wanted() -> bool:
    """Return whether standard output shows colours. NO_COLOR counts if it is not empty, as
    https://no-color.org has it."""
    return is_terminal() and not os.environ.get("NO_COLOR")


def states(text: str) -> str:
    """`text` with the states of jobs and nodes in it coloured."""
    return _STATE.sub(lambda found: found[1] + click.style(found[2], COLOUR_OF[found[2]]), text)
