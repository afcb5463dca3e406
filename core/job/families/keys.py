"""Keys of configs under transformers' names: their types, defaults and checks of values."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]

#: Activation functions, by transformers' names, that keep no state and draw nothing at random.
ACTIVATIONS = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)
#: Keys of config files that have no effect on training a language model.
NO_EFFECT = frozenset(
    {
        "_attn_implementation_autoset",
        "architectures",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "directionality",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "is_encoder_decoder",
        "label2id",
        "max_length",
        "n_ctx",
        "name_or_path",
        "_name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_past",
        "pad_token_id",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


#: Limit of integers given where a float is expected.
_MOST = 1 << 63


class ConfigError(ValueError):
    """Error of a config that cannot be used; `key` is the one to change."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key
        self.text = text


@dataclass(frozen=True, slots=True)
class Key:
    """Key of a config: its type and default."""

    type: type
    default: Any
    #: Least value of a number.
    least: float = 0
    choices: tuple[str, ...] = ()
    #: True if None is allowed too; it always is where it is the default.
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        """Return `value` as this key's type; raises ConfigError."""
        if value is None and (self.optional or self.default is None):
            return None
        if self.type is float and type(value) is int:
            value = float(value) if abs(value) < _MOST else math.inf
        if type(value) is not self.type:
            raise ConfigError(name, f"{value!r} is not {_ARTICLES[self.type]}")
        if type(value) is float and not math.isfinite(value):
            raise ConfigError(name, "is too large")
        if isinstance(value, int | float) and not value >= self.least:
            raise ConfigError(name, f"{value} is too small; it must be at least {self.least:g}")
        if self.choices and value not in self.choices:
            raise ConfigError(name, f"{value!r} is not supported; use {', '.join(self.choices)}")
        return dict(value) if isinstance(value, Mapping) else value


_ARTICLES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a mapping",
}


def check_padding(config: Config) -> None:
    padding = config["pad_token_id"]
    if padding is not None and padding >= config["vocab_size"]:
        raise ConfigError(
            "pad_token_id",
            f"{padding} is not below vocab_size ({config['vocab_size']}); lower it or set null",
        )


def encode_config(config: Config) -> str:
    """Encode a config as text; equal configs give equal texts."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def decode_config(text: str) -> dict[str, Any]:
    """Decode a text of `encode_config`; raises ValueError."""
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("config: it is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("config: it must be a mapping of keys to values")
    return found
