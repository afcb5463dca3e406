"""The profile file: JSON text to a Profile and back."""

import msgspec

from oobleck.planner.profile import Profile


def parse_profile(text: str | bytes) -> Profile:
    """The profile that `text` describes; raises ValueError naming the field and the fix.

    Keys that are not known are passed over: profiles may carry how they were measured.
    """
    try:
        return msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:  # a ValidationError names the path of the field
        raise ValueError(f"not a valid profile: {error}") from error


def format_profile(profile: Profile) -> str:
    """`profile` as JSON text that `parse_profile` reads back equal."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=2).decode() + "\n"
