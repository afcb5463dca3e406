"""Colours of states on a terminal, and tones of states for pages: exceptional ones stand out.

Pure, except for the checks of the terminal.
"""

import os
import re
import sys
from typing import Literal

import click

_COLOURS = {
    "green": ("running", "succeeded", "live"),
    "yellow": (
        *("reconfiguring", "waiting for nodes", "draining", "drained", "disconnected"),
        "quarantined",
    ),
    "red": ("failed", "cancelled", "lost", "held"),
}
#: Colour of a state of a job or a node; ordinary states have none.
COLOUR_OF = {state: colour for colour, states in _COLOURS.items() for state in states}
#: A state is the second word: after the name in a listing, or after `state` of one job.
_STATE = re.compile(
    rf"^(\S+ +)({'|'.join(sorted(COLOUR_OF, key=len, reverse=True))})(?=:|\s|$)", re.MULTILINE
)


def is_terminal() -> bool:
    """Return whether standard output is a terminal that obeys escapes."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def is_wanted() -> bool:
    """Return whether standard output shows colours; a non-empty NO_COLOR disables them.

    See https://no-color.org.
    """
    return is_terminal() and not os.environ.get("NO_COLOR")


def states(text: str) -> str:
    """Return `text` with the states of jobs and nodes coloured."""
    return _STATE.sub(lambda found: found[1] + click.style(found[2], COLOUR_OF[found[2]]), text)


#: - `good`: as wanted
#: - `warn`: worth a look
#: - `bad`: failed
#: - `quiet`: neutral
Tone = Literal["good", "warn", "bad", "quiet"]

_OF_COLOUR: dict[str, Tone] = {"green": "good", "yellow": "warn", "red": "bad"}
#: Worst first.
ORDER: tuple[Tone, ...] = ("bad", "warn", "quiet", "good")


def tone(state: str) -> Tone:
    """Return the tone of a job's or a node's state."""
    return _OF_COLOUR.get(COLOUR_OF.get(state, ""), "quiet")


def worst(*tones: Tone) -> Tone:
    return min(tones, key=ORDER.index, default="quiet")
