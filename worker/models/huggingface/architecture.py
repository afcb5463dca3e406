"""Choice of the transformers model that a job means, and its config: from a name, keys and a
directory.

Importing this imports transformers' tables of names, not its models.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto import modeling_auto

from oobleck.host.command import nearest
from oobleck.host.system.files import read_regular
from oobleck.worker.models.tree import cached
from oobleck.worker.runtime.errors import JobError, NodeError

_MOST_CONFIG_BYTES = 16 << 20
#: Errors of a config class for keys or values that it does not take.
_REFUSED = (StrictDataclassError, ValueError, TypeError, KeyError)
#: Names of keys for random draws while training.
_RANDOM = re.compile(r"drop|jitter")
#: Keys of how transformers computes attention and experts; no fields, and in every config.
_CHOICES = {"attn_implementation", "experts_implementation"}
#: Keys that are no field of a config class and that transformers still understands: it makes
#: `rope_parameters` of them.
_ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor")
#: Key that is no field: transformers makes `id2label` of it.
_LABELS = "num_labels"

#: Targets of a model: next tokens, masked tokens, or labels per token, row or image.
Task = Literal["causal", "masked", "token", "sequence", "image"]


#: transformers' tables of class names by model type, for each task.
_TABLES: Mapping[Task, Mapping[str, str | tuple[str, ...]]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
}


def _first(found: str | tuple[str, ...]) -> str:
    """Return the class name of a table's entry, the first of several."""
    return found if isinstance(found, str) else found[0]


#: Class names by task; the first task with a class is that class's task.
TASKS: Mapping[Task, frozenset[str]] = {
    task: frozenset(map(_first, table.values())) for task, table in _TABLES.items()
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model of transformers; small, hashable, and the same in every process."""

    #: Name of the class, such as `Qwen3ForCausalLM`.
    name: str
    #: All keys of its config that are not transformers' defaults, as JSON with sorted keys.
    keys: str
    #: Directory with its initial weights.
    weights: str | None = None

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.name)

    @property
    def task(self) -> Task:
        return next(task for task, names in TASKS.items() if self.name in names)

    @property
    def input_name(self) -> str:
        """The name of the model's main input."""
        return "pixel_values" if self.task == "image" else "input_ids"


def choose(name: str | None, config: Mapping[str, Any] | None, weights: str | None) -> Architecture:
    """Return the model to use; keys of `config` override those of the directory. Raises JobError,
    NodeError."""
    saved = {} if weights is None else _saved_config(weights)
    if name is None:
        name = _saved_name(saved, weights)
    if not any(name in names for names in TASKS.values()):
        raise JobError(f"model.architecture: {_unknown(name)}")
    chosen = Architecture(name, "{}")
    try:
        _check_keys(chosen, config or {})
    except ImportError as error:
        why = " ".join(str(error).split())
        raise NodeError(f"model.architecture: {name} needs a package more: {why}") from error
    keys = {**_no_dropout(chosen), **saved, **(config or {})}
    chosen = Architecture(name, json.dumps(keys, sort_keys=True), weights)
    configuration(chosen)
    return chosen


@cached(maxsize=8)
def configuration(architecture: Architecture) -> Any:
    """Return the config object that models are made with; nobody may change it. Raises JobError."""
    config = fresh_configuration(architecture)
    config.use_cache = False
    return config


def fresh_configuration(architecture: Architecture) -> Any:
    """Return a new config object that transformers has checked, with nothing of ours in it. Raises
    JobError."""
    keys = json.loads(architecture.keys)
    kind = architecture.model_class.config_class
    try:
        config = kind.from_dict(keys)
    except _REFUSED as error:
        why = " ".join(str(error).split())
        raise JobError(f"model.config: transformers refuses it: {why}; correct it") from error
    if config.is_encoder_decoder:
        raise JobError(f"model.architecture: {architecture.name} {_TWO_LISTS}")
    if getattr(config, "layerdrop", 0.0):
        raise JobError(
            "model.config: layerdrop leaves out whole layers at random, which other workers would "
            "have to know; set layerdrop to 0"
        )
    padding, words = getattr(config, "pad_token_id", None), getattr(config, "vocab_size", None)
    if padding is not None and words is not None and not -words <= padding < words:
        raise JobError(
            f"model.config: pad_token_id {padding} is beyond the vocab_size {words}; set "
            "pad_token_id to null"
        )
    return config


def _check_keys(architecture: Architecture, keys: Mapping[str, Any]) -> None:
    """Refuse what the config class does not know: it would keep it and never look at it."""
    kind = architecture.model_class.config_class
    known = {field.name for field in dataclasses.fields(kind)} | set(kind.attribute_map) | _CHOICES
    known |= {key for key in _ROTARY if "rope_parameters" in known}
    if architecture.task not in ("causal", "masked"):
        known.add(_LABELS)
    for key in keys:
        if key not in known:
            raise JobError(
                f"model.config: {kind.__name__} of transformers has no key {key}"
                f"{_hint(key, sorted(known))}; correct it or leave it out"
            )


_TWO_LISTS = (
    "has an encoder whose result each layer of its decoder takes, and layers here are one list; "
    "give a class that is an encoder or a decoder alone, such as BertForMaskedLM or "
    "LlamaForCausalLM, or write the model as layers of your own (oobleck.model)"
)


def _unknown(name: str) -> str:
    """Return why the class `name` has no task, and what to give."""
    kind = getattr(transformers, name, None)
    config = getattr(kind, "config_class", None)
    if config is None:
        known = sorted(chain.from_iterable(TASKS.values()))
        return (
            f"transformers {transformers.__version__} has no model {name}{_hint(name, known)}; "
            "give a class such as Qwen3ForCausalLM"
        )
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} {_TWO_LISTS}"
    if several := senses(kind):
        return f"{name} {several}"
    kinds = (table.get(config.model_type) for table in _TABLES.values())
    alike = sorted({_first(found) for found in kinds if found is not None})
    if alike:
        return (
            f"{name} has no head whose loss is known here; of its kind there are: "
            f"{', '.join(alike)}"
        )
    return (
        f"{name} is none of transformers' classes for causal or masked language models, "
        "classification of tokens, of sequences or of images; write it as layers of your own "
        "(oobleck.model)"
    )


def senses(kind: Any) -> str | None:
    """Return why a class that sees or hears is refused, and the fix; None if it does neither."""
    config = kind.config_class
    if not {"vision_config", "audio_config"} & set(getattr(config, "sub_configs", {})):
        return None
    return (
        "sees or hears beside what it reads, with layers of several kinds side by side, and layers "
        f"here are one list; give {_text_model(config) or 'its text model'} to train what it reads "
        "with alone"
    )


def _text_model(config: Any) -> str | None:
    """Return the causal language model's class within a model that also sees or hears."""
    try:
        text = config().get_text_config()
    except _REFUSED:
        return None
    found = _TABLES["causal"].get(text.model_type)
    return None if found is None else _first(found)


def _no_dropout(architecture: Architecture) -> dict[str, float]:
    """Return zeros for the keys of what a few families draw at random by default."""
    return {
        field.name: 0.0
        for field in dataclasses.fields(architecture.model_class.config_class)
        if _RANDOM.search(field.name) and isinstance(field.default, float) and field.default > 0.0
    }


def _hint(name: str, known: Sequence[str]) -> str:
    near = nearest(name, known)
    return f" (did you mean {near}?)" if near else ""


def _saved_config(directory: str) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    try:
        keys = json.loads(read_regular(path, _MOST_CONFIG_BYTES), object_hook=_special)
    except OSError as error:
        raise JobError(
            f"model.weights: cannot read {path}: {error.strerror}; give the directory of a saved "
            "Hugging Face model, the same on all nodes"
        ) from error
    except (ValueError, RecursionError) as error:
        raise JobError(f"model.weights: {path} is no JSON; copy the model anew") from error
    if not isinstance(keys, dict):
        raise JobError(f"model.weights: {path} is no JSON object; copy the model anew")
    if keys.get("quantization_config") is not None:
        raise JobError(
            f"model.weights: {directory} has a quantised model, whose weights cannot be trained; "
            "give the one that it was made from"
        )
    return keys


def _special(found: dict[str, Any]) -> Any:
    """Decode a special float: transformers writes infinity as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _saved_name(saved: Mapping[str, Any], weights: str | None) -> str:
    if weights is None:
        raise JobError(
            "model: names neither an architecture nor a directory of weights; give one such as "
            "architecture: Qwen3ForCausalLM"
        )
    names = saved.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise JobError(
            f"model.weights: {weights}/config.json does not name one architecture; give it as "
            "model.architecture"
        )
    return names[0]
