"""The model part of a job file: a preset, a config or the built-in model's numbers.

Turns the user's keys into those of `ModelSpec` before the rest of the file is parsed. The
normalised form holds every number and the config it follows from; both must agree.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from oobleck.core.errors import InvalidJob
from oobleck.core.job.checks import url_refusal
from oobleck.core.job.document import KeyValue, Value
from oobleck.core.job.families import (
    FAMILIES,
    Config,
    ConfigError,
    Family,
    Kind,
    encode_config,
    family_of,
)
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.own import OWN_KEYS
from oobleck.core.job.presets import PRESETS, Preset

#: Reads a file that the job names; raises InvalidJob with the fault of the file.
ReadText = Callable[[str], str]

#: Keys of the model that repeat keys of a config.
_NUMBERS = ("layers", "hidden", "heads", "vocabulary", "tied", "dropout")


def family_model(
    kind: Kind, config: Config, *, sequence_length: int, weights: str | None = None
) -> ModelSpec:
    """Return the model of a config, as transformers would build it; raises ConfigError."""
    family = FAMILIES[kind]
    complete = family.complete(config)
    return ModelSpec(
        kind=kind,
        config=encode_config(complete),
        sequence_length=sequence_length,
        weights=weights,
        **asdict(family.numbers(complete)),
    )


def expand_model(root: Value, read: ReadText | None) -> Value:
    """Return `root`, a job, with the preset or config of its model resolved to `ModelSpec`'s keys.

    Other mistakes are left to the general checks. Raises InvalidJob.
    """
    entries = root.content
    if not isinstance(entries, Mapping) or "model" not in entries:
        return root
    model = entries["model"].value
    if not isinstance(model.content, Mapping) or any(key in model.content for key in OWN_KEYS):
        return root
    expanded = _Model(model, model.content, read).expand()
    entry = KeyValue(place=entries["model"].place, value=expanded)
    return Value(place=root.place, content={**entries, "model": entry})


class _Model:
    """Expansion of the keys of one model."""

    def __init__(
        self, whole: Value, entries: Mapping[str, KeyValue], read: ReadText | None
    ) -> None:
        self._whole = whole
        self._entries = entries
        self._read = read

    def expand(self) -> Value:
        preset = self._preset()
        source, config = self._config()
        kind = self._kind(preset, config)
        family = family_of(kind)
        if family is None:
            if config is None:
                return self._whole  # the general checks refuse an unknown kind
            if kind == "gpt":
                raise self._wrong("config", f"kind {kind} takes none; {_kinds()}")
            raise self._wrong("kind", f"there is no {kind!r}; {_kinds()}")
        chosen = self._complete(family, preset, config or {}, source)
        numbers = asdict(family.numbers(chosen))
        self._check_numbers(numbers, family)
        added = {"kind": kind, "config": encode_config(chosen), **numbers}
        # A number of a wrong type stays: the general checks refuse it in their words.
        added = {name: value for name, value in added.items() if not self._mistyped(name)}
        kept = {
            name: entry
            for name, entry in self._entries.items()
            if name not in added and name != "preset"
        }
        place = self._whole.place
        made = {
            name: KeyValue(
                place=self._place(name), value=Value(place=self._place(name), content=value)
            )
            for name, value in added.items()
        }
        return Value(place=place, content={**kept, **made})

    def _place(self, name: str) -> str:
        return self._entries[name].place if name in self._entries else self._whole.place

    def _wrong(self, name: str, text: str) -> InvalidJob:
        return InvalidJob(f"{self._place(name)}: model.{name}: {text}")

    def _text(self, name: str) -> str | None:
        """Return a key that must be a text; None where it is missing."""
        if name not in self._entries or self._entries[name].value.content is None:
            return None
        value = self._entries[name].value
        if not isinstance(value.content, str):
            raise InvalidJob(f"{value.place}: model.{name} must be a text, not {value.describe()}")
        return value.content

    def _preset(self) -> Preset | None:
        name = self._text("preset")
        if name is None:
            return None
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(PRESETS)}"
            raise self._wrong("preset", f"there is no {name!r}; {hint}")
        return PRESETS[name]

    def _config(self) -> tuple[str, dict[str, Any] | None]:
        """Return the name of the config for messages, and its keys; None where there are none."""
        if "config" in self._entries and self._entries["config"].value.content is not None:
            value = self._entries["config"].value
            if isinstance(value.content, Mapping):
                keys = plain(value)
                assert isinstance(keys, dict)
                return "model.config", keys
            if not isinstance(value.content, str):
                raise InvalidJob(
                    f"{value.place}: model.config must be a mapping of keys or the path of a "
                    f"config.json, not {value.describe()}"
                )
            return self._read_config("config", value.content)
        weights = self._text("weights")
        if why := url_refusal(weights or ""):
            raise self._wrong("weights", why)
        built_in = self._text("kind") == "gpt"
        if weights is not None and "preset" not in self._entries and not built_in:
            return self._read_config("weights", str(PurePosixPath(weights) / "config.json"))
        return "model", None

    def _read_config(self, name: str, path: str) -> tuple[str, dict[str, Any]]:
        if self._read is None:
            raise self._wrong(name, f"{path} cannot be read here; give the config's keys")
        try:
            found = json.loads(self._read(path))
        except InvalidJob as error:
            raise self._wrong(name, str(error)) from error
        except (ValueError, RecursionError) as error:
            raise self._wrong(name, f"{path} is not valid JSON: {error}") from error
        if not isinstance(found, dict):
            raise self._wrong(name, f"{path} must hold one JSON object with a config's keys")
        return f"model.{name}: {path}", found

    def _kind(self, preset: Preset | None, config: Mapping[str, Any] | None) -> str:
        given = self._text("kind")
        if preset is not None:
            if given not in (None, preset.kind):
                raise self._wrong(
                    "kind", f"{given} is not the preset's, which is {preset.kind}; leave kind out"
                )
            return preset.kind
        if given is not None:
            return given
        if config is None:
            return "gpt"
        named = config.get("model_type")
        if named is None:
            raise self._wrong("kind", f"is missing; {_kinds()}")
        if family_of(str(named)) is None:
            raise self._wrong("config", f"model_type {named!r} cannot be trained; {_kinds()}")
        return str(named)

    def _complete(
        self, family: Family, preset: Preset | None, config: Mapping[str, Any], source: str
    ) -> dict[str, Any]:
        try:
            chosen = family.native(config)
            for name in _NUMBERS:
                value = self._number(name)
                keys = family.dropouts if name == "dropout" else (family.names[name],)
                for key in keys if value is not None else ():
                    chosen.setdefault(key, value)
            return family.complete({**(preset.config if preset else {}), **chosen})
        except ConfigError as error:
            key = error.key
            if source == "model":  # the user gave it under ModelSpec's name
                key = next((name for name, native in family.names.items() if native == key), key)
            raise InvalidJob(f"{self._key_place(key)}: {source}.{key}: {error.text}") from error

    def _number(self, name: str) -> Any:
        if name not in self._entries:
            return None
        content = self._entries[name].value.content
        return content if isinstance(content, int | float) else None

    def _mistyped(self, name: str) -> bool:
        given = name in _NUMBERS and name in self._entries
        return (
            given and self._number(name) is None and self._entries[name].value.content is not None
        )

    def _check_numbers(self, numbers: Mapping[str, Any], family: Family) -> None:
        for name, value in numbers.items():
            given = self._number(name)
            if given is not None and given != value:
                key = "largest dropout" if name == "dropout" else family.names[name]
                raise self._wrong(
                    name, f"{given}, but the config's {key} is {value}; remove one of the two"
                )

    def _key_place(self, key: str) -> str:
        entry = self._entries.get("config")
        if entry is None:
            return self._place(key)
        below = entry.value.content
        if isinstance(below, Mapping) and key in below:
            return below[key].place
        return entry.place


def _kinds() -> str:
    return f"use kind {', '.join(FAMILIES)}"


def plain(value: Value) -> object:
    """Return the value without places."""
    match value.content:
        case tuple(items):
            return [plain(item) for item in items]
        case Mapping():
            return {name: plain(entry.value) for name, entry in value.content.items()}
        case content:
            return content
