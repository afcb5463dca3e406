"""The profile file: JSON text to a Profile and back.

Owns the file's syntax. Every error names the field by its path in the file, such as
`layers[3].forward_s["2"]`, and the fix. `oobleck.core.profile` checks the values.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from oobleck.core.profile import OPTIONAL_BYTES, InvalidProfile, LayerProfile, Links, Profile

_GPUS = re.compile(r"[0-9]{1,9}")
#: Characters of a number or a text that a message repeats.
_SHOWN = 40
#: Digits of an integer that may be beyond every float.
_MOST_DIGITS = 309
_OPTIONAL_TIMES = ("backward_input_s", "update_s")


def parse_profile(text: str | bytes) -> Profile:
    """Parse a profile; raises ValueError with the field and the fix.

    Unknown keys are ignored: profiles also record how they were measured.
    """
    root = _Reader(_load(text), "")
    layers = root.take_list("layers")
    try:
        return Profile(
            microbatch=root.take_integer("microbatch"),
            gpus_per_node=root.take_integer("gpus_per_node"),
            gpu_memory_bytes=root.take_integer("gpu_memory_bytes"),
            layers=tuple(
                _layer(_Reader(layer, f"layers[{number}]")) for number, layer in enumerate(layers)
            ),
            links=_links(_Reader(root.take("links"), "links")),
        )
    except InvalidProfile as error:
        raise ValueError(f"not a valid profile: {error}") from error


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


def _load(text: str | bytes) -> object:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_int=_integer)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a valid profile: it is not JSON text: {error}") from error
    except RecursionError:
        raise ValueError("not a valid profile: it is nested too deeply") from None


def _integer(digits: str) -> int | float:
    """Parse an integer; one with more digits than a float can have becomes infinity. The caller,
    which knows its place in the file, refuses infinity."""
    return int(digits) if len(digits) < _MOST_DIGITS else float(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(
                f"not a valid profile: the key {_show(key)} is given twice in one object; keep one"
            )
        found[key] = value
    return found


def _show(value: object) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return "an object"
        case list():
            return "a list"
        case bool():
            return str(value).lower()
        case _:
            text = json.dumps(value)
            return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


class _Reader:
    """Reader of one object of the file, which knows the object's path."""

    def __init__(self, content: object, path: str) -> None:
        self._path = path
        if not isinstance(content, dict):
            self._fail(path or "the profile", f"must be an object, not {_show(content)}")
        self._content: dict[str, Any] = content

    def _fail(self, path: str, problem: str) -> NoReturn:
        raise ValueError(f"not a valid profile: {path}: {problem}")

    def _below(self, key: str) -> str:
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str) -> object:
        if key not in self._content:
            self._fail(self._below(key), "is missing; add it")
        return self._content[key]

    def take_list(self, key: str) -> list[object]:
        value = self.take(key)
        if not isinstance(value, list):
            self._fail(self._below(key), f"must be a list, not {_show(value)}")
        return value

    def take_text(self, key: str) -> str:
        value = self.take(key)
        if not isinstance(value, str):
            self._fail(self._below(key), f"must be a text, not {_show(value)}")
        return value

    def take_integer(self, key: str) -> int:
        value = self.take(key)
        if value in (math.inf, -math.inf):
            self._fail(self._below(key), "is too large")
        if type(value) is not int:
            self._fail(self._below(key), f"must be a whole number, not {_show(value)}")
        return value

    def take_number(self, key: str) -> float:
        return self._number(self.take(key), self._below(key))

    def _number(self, value: object, path: str) -> float:
        if type(value) not in (int, float):
            self._fail(path, f"must be a number, not {_show(value)}")
        return float(value)  # type: ignore[arg-type]  # just checked

    def take_times(self, key: str) -> dict[int, float]:
        """Read seconds by number of GPUs."""
        value, path = self.take(key), self._below(key)
        if not isinstance(value, dict):
            self._fail(path, f"must be seconds by number of GPUs, not {_show(value)}")
        times: dict[int, float] = {}
        for gpus, seconds in value.items():
            if _GPUS.fullmatch(gpus) is None:
                self._fail(f"{path}[{_show(gpus)}]", "keys are numbers of GPUs, from 1")
            if int(gpus) in times:
                self._fail(f"{path}[{_show(gpus)}]", "that number of GPUs is given twice; keep one")
            times[int(gpus)] = self._number(seconds, f"{path}[{_show(gpus)}]")
        return times

    def take_optional_times(self, key: str) -> dict[int, float]:
        return self.take_times(key) if key in self._content else {}

    def take_optional_integer(self, key: str) -> int:
        return self.take_integer(key) if key in self._content else 0

    def complain(self, error: InvalidProfile) -> NoReturn:
        self._fail(self._below(error.field_path), error.problem)


def _layer(reader: _Reader) -> LayerProfile:
    fields: dict[str, Any] = {name: reader.take_times(name) for name in ("forward_s", "backward_s")}
    for name in _OPTIONAL_TIMES:
        fields[name] = reader.take_optional_times(name)
    for name in ("parameter_bytes", "state_bytes", "activation_bytes", "output_bytes"):
        fields[name] = reader.take_integer(name)
    for name in OPTIONAL_BYTES:
        fields[name] = reader.take_optional_integer(name)
    try:
        return LayerProfile(name=reader.take_text("name"), **fields)
    except InvalidProfile as error:
        reader.complain(error)


def _links(reader: _Reader) -> Links:
    names = [link.name for link in dataclasses.fields(Links)]
    return Links(**{name: reader.take_number(name) for name in names})
