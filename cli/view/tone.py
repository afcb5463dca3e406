"""Tones: how urgent a state is, for whoever paints it. Pure."""

from typing import Literal

from oobleck.cli.output.colour import COLOUR_OF

#: `good`: as wanted; `warn`: somebody may look; `bad`: it failed; `quiet`: nothing to see.
Tone = Literal["good", "warn", "bad", "quiet"]

_OF_COLOUR: dict[str, Tone] = {"green": "good", "yellow": "warn", "red": "bad"}
#: Worst first.
ORDER: tuple[Tone, ...] = ("bad", "warn", "quiet", "good")


def tone(state: str) -> Tone:
    """Return the tone of a job's or a node's state."""
    return _OF_COLOUR.get(COLOUR_OF.get(state, ""), "quiet")


def worst(*tones: Tone) -> Tone:
    return min(tones, key=ORDER.index, default="quiet")
