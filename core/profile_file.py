"""The profile file: JSON text to a Profile and back.

Owns the file's syntax. msgspec reads the types of `oobleck.core.profile`, which checks the values. An
error names the field by its path in the file, such as `layers[3].forward_s["2"]`, and the fix.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from oobleck.core.profile import OPTIONAL_BYTES, InvalidProfile, Profile

_OPTIONAL_TIMES = ("backward_input_s", "update_s")
#: Digits of an integer that may be beyond every float.
_MOST_DIGITS = 309
#: The parts of msgspec's errors: the problem, and the path of the value.
_AT = re.compile(r"(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$\.?(?P<path>.*)`)?", re.DOTALL)
_MISTYPED = re.compile(r"Expected `(\w+)`, got `(\w+)`")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WORDS = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "object": "an object",
    "str": "a text",
}


def parse_profile(text: str | bytes) -> Profile:
    """Parse a profile; raises ValueError with the field and the fix.

    Unknown keys are ignored: profiles also record how they were measured.
    """
    try:
        tree = json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
        return msgspec.convert(tree, Profile, str_keys=True)
    except RecursionError:
        raise ValueError("not a valid profile: it is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise ValueError(f"not a valid profile: {_told(error)}") from error
    except ValueError as error:
        raise ValueError(f"not a valid profile: it is not JSON text: {error}") from error


def format_profile(profile: Profile, notes: Mapping[str, object] | None = None) -> str:
    """Return `profile` as JSON text that `parse_profile` reads back equal.

    `notes` say how it was made; they go under the key `measured`, which parsing ignores.
    """
    tree = msgspec.to_builtins(profile, str_keys=True)
    for layer in tree["layers"]:
        for name in (*_OPTIONAL_TIMES, *OPTIONAL_BYTES):
            if not layer[name]:
                del layer[name]
    if notes:
        tree["measured"] = dict(notes)
    return json.dumps(tree, indent=2) + "\n"


def _integer(digits: str) -> int | float:
    """Parse an integer; one with more digits than a float can have becomes infinity."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {json.dumps(twice)} is given twice in one object; keep one")
    return found


def _told(error: msgspec.ValidationError) -> str:
    """Return msgspec's error as a line: the path in the file, the problem and the fix."""
    found = _AT.fullmatch(str(error))
    assert found is not None, "everything matches"
    path, problem = found["path"] or "", found["problem"]
    if isinstance(error.__cause__, InvalidProfile):
        path, problem = f"{path}.{error.__cause__.field_path}", error.__cause__.problem
    elif missing := _MISSING.fullmatch(problem):
        path, problem = f"{path}.{missing[1]}", "is missing; add it"
    elif found["key"]:
        problem = "keys are numbers of GPUs, from 1"
    elif types := _MISTYPED.match(problem):
        wanted, given = (_WORDS.get(name, name) for name in types.groups())
        problem = f"must be {wanted}, not {given}"
        if types.groups() == ("int", "float"):
            problem = "must be a whole number, without a fraction and not too large"
    return f"{path.lstrip('.') or 'the profile'}: {problem}"
