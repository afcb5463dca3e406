"""The model part of a job file: a preset, a config or the built-in model's numbers.

Turns the user's keys into those of `ModelSpec` before the rest of the file is parsed. The
normalised form holds every number and the config it follows from; both must agree.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from oobleck.core.errors import InvalidJob
from oobleck.core.job.checks import url_refusal
from oobleck.core.job.document import Document, describe
from oobleck.core.job.families import FAMILIES, Kind, family_of
from oobleck.core.job.family import ConfigError, Family, encode_config
from oobleck.core.job.model import OWN_KEYS

# ---- published models by name: a kind, and the keys that differ from its defaults


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    kind: Kind
    config: Mapping[str, Any]


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(kind="gpt2", config={"n_layer": layers, "n_embd": hidden, "n_head": heads})


def _gpt3(layers: int, hidden: int, heads: int) -> Preset:
    """Build a preset of Brown et al. 2020, table 2.1: GPT-2's layers (the paper's sparse attention
    is left out). Without dropout, since these models see each token less than once."""
    base = _gpt2(layers, hidden, heads)
    no_dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return Preset(kind="gpt2", config={**base.config, "n_positions": 2048, **no_dropout})


def _bert(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(
        kind="bert",
        config={
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
        },
    )


def _llama(
    layers: int, hidden: int, heads: int, inner: int, positions: int, **others: object
) -> Preset:
    return Preset(
        kind="llama",
        config={
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "max_position_embeddings": positions,
            "rms_norm_eps": 1e-5,
            **others,
        },
    )


_LLAMA3: dict[str, object] = {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}

PRESETS: dict[str, Preset] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-small": _gpt3(12, 768, 12),
    "gpt3-medium": _gpt3(24, 1024, 16),
    "gpt3-large": _gpt3(24, 1536, 16),
    # The paper's 24 heads do not divide its width of 2048. 16 heads keep the paper's head width of
    # 128.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    # The paper's width of 5140 does not match its 40 heads of 128.
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "llama-2-7b": _llama(32, 4096, 32, 11008, 4096),
    "llama-2-13b": _llama(40, 5120, 40, 13824, 4096),
    "llama-3-8b": _llama(32, 4096, 32, 14336, 8192, **_LLAMA3),
    "llama-3-70b": _llama(80, 8192, 64, 28672, 8192, **_LLAMA3),
    "llama-3-405b": _llama(126, 16384, 128, 53248, 8192, **_LLAMA3),
}


# ---- expansion of the keys of a model


#: Reads a file that the job names; raises InvalidJob with the fault of the file.
ReadText = Callable[[str], str]

#: Keys of the model that repeat keys of a config.
_NUMBERS = ("layers", "hidden", "heads", "vocabulary", "tied", "dropout")


def expand_model(job: Document, read: ReadText | None) -> None:
    """Resolve the preset or config of a job's model to `ModelSpec`'s keys. Other mistakes are left
    to the general checks. Raises InvalidJob."""
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
            tree = json.loads(self._read(path))
        except InvalidJob as error:
            raise self._wrong(name, str(error)) from error
        except (ValueError, RecursionError) as error:
            raise self._wrong(name, f"{path} is not valid JSON: {error}") from error
        if not isinstance(tree, dict):
            raise self._wrong(name, f"{path} must hold one JSON object with a config's keys")
        return f"model.{name}: {path}", tree

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
