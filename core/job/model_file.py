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
from oobleck.core.job.document import Document, describe
from oobleck.core.job.families import FAMILIES, ConfigError, Family, encode_config, family_of
from oobleck.core.job.model import OWN_KEYS
from oobleck.core.job.presets import PRESETS, Preset

#: Reads a file that the job names; raises InvalidJob with the fault of the file.
ReadText = Callable[[str], str]

#: Keys of the model that repeat keys of a config.
_NUMBERS = ("layers", "hidden", "heads", "vocabulary", "tied", "dropout")


def expand_model(job: Document, read: ReadText | None) -> None:
    """Resolve the preset or config of a job's model to `ModelSpec`'s keys.

    Other mistakes are left to the general checks. Raises InvalidJob.
    """
    model = job.tree.get("model") if isinstance(job.tree, dict) else None
    if isinstance(model, dict) and not any(key in model for key in OWN_KEYS):
        job.tree["model"] = _Model(job, model, read).expand()


class _Model:
    """Expansion of the keys of one model."""

    def __init__(self, job: Document, keys: Mapping[str, Any], read: ReadText | None) -> None:
        self._job = job
        self._keys = keys
        self._read = read

    def expand(self) -> Mapping[str, Any]:
        preset = self._preset()
        source, config = self._config()
        kind = self._kind(preset, config)
        family = family_of(kind)
        if family is None:
            if config is None:
                return self._keys  # a kind that there is not is for the general checks
            if kind == "gpt":
                raise self._wrong("config", f"kind {kind} takes none; {_kinds()}")
            raise self._wrong("kind", f"there is no {kind!r}; {_kinds()}")
        chosen = self._complete(family, preset, config or {}, source)
        numbers = asdict(family.numbers(chosen))
        self._check_numbers(numbers, family)
        added = {"kind": kind, "config": encode_config(chosen), **numbers}
        # A number of a wrong type stays: the general checks refuse it in their words.
        added = {name: value for name, value in added.items() if not self._mistyped(name)}
        kept = {name: value for name, value in self._keys.items() if name != "preset"}
        return {**kept, **added}

    def _wrong(self, name: str, text: str) -> InvalidJob:
        return InvalidJob(f"{self._job.place(('model', name))}: model.{name}: {text}")

    def _mistaken(self, name: str, wanted: str) -> InvalidJob:
        place, value = self._job.place(("model", name)), self._keys[name]
        return InvalidJob(f"{place}: model.{name} must be {wanted}, not {describe(value)}")

    def _text(self, name: str) -> str | None:
        """Return a key that must be a text; None where it is missing."""
        value = self._keys.get(name)
        if value is not None and not isinstance(value, str):
            raise self._mistaken(name, "a text")
        return value

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
        """Return the name of the config's keys for messages, and the keys; None where there are
        none."""
        config = self._keys.get("config")
        if isinstance(config, dict):
            return "model.config", config
        if isinstance(config, str):
            return self._read_config("config", config)
        if config is not None:
            raise self._mistaken("config", "a mapping of keys or the path of a config.json")
        weights = self._text("weights")
        if why := url_refusal(weights or ""):
            raise self._wrong("weights", why)
        built_in = self._text("kind") == "gpt"
        if weights is not None and "preset" not in self._keys and not built_in:
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
            path = ("model", "config", key) if "config" in self._keys else ("model", key)
            place = self._job.place(path)
            raise InvalidJob(f"{place}: {source}.{key}: {error.text}") from error

    def _number(self, name: str) -> int | float | None:
        value = self._keys.get(name)
        return value if isinstance(value, int | float) else None

    def _mistyped(self, name: str) -> bool:
        given = name in _NUMBERS and self._keys.get(name) is not None
        return given and self._number(name) is None

    def _check_numbers(self, numbers: Mapping[str, Any], family: Family) -> None:
        for name, value in numbers.items():
            given = self._number(name)
            if given is not None and given != value:
                key = "largest dropout" if name == "dropout" else family.names[name]
                raise self._wrong(
                    name, f"{given}, but the config's {key} is {value}; remove one of the two"
                )


def _kinds() -> str:
    return f"use kind {', '.join(FAMILIES)}"
