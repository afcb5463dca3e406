"""Families of Hugging Face models: the keys of their configs, and what planning reads from them.

Owns the types, the checks that all families share, and the table by kind; the families themselves
are in `oobleck.planner.familytables`. Key names and defaults are those of transformers, which
planning must not import.
"""

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["gpt2", "llama", "bert"]
Objective = Literal["causal", "masked"]
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
#: Keys of config files that change nothing about training a language model.
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


class ConfigError(ValueError):
    """A config that cannot be used; `key` is the one to change."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}")
        self.key = key
        self.text = text


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a config: its type and default."""

    type: type
    default: Any
    #: Least value of a number; of a float that it may be.
    least: float = 0
    choices: tuple[str, ...] = ()
    #: None is a value too; it always is where it is the default.
    optional: bool = False

    def check(self, name: str, value: Any) -> Any:
        """`value` as this key's type; raises ConfigError."""
        if value is None and (self.optional or self.default is None):
            return None
        if self.type is float and type(value) is int:
            value = float(value)
        if type(value) is not self.type:
            raise ConfigError(name, f"{value!r} is not {_ARTICLES[self.type]}")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """What planning and data need of a model, under the names of `ModelSpec`."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tied: bool
    #: The largest of the family's.
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """One layer's arithmetic."""

    parameters: int
    #: Multiplications and additions of one token's forward.
    flops: float
    #: Numbers per token that the forward leaves to the backward, in the precision of computing,
    #: and those that autocast leaves in the weights' precision: norms, residuals, losses.
    kept: int = 0
    kept_wide: int = 0
    #: Bytes per token of dropout's masks.
    masks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    embedding: LayerCount
    block: LayerCount
    head: LayerCount


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: a table of keys and what follows from their values."""

    kind: Kind
    objective: Objective
    keys: Mapping[str, Key]
    #: Other names of keys that transformers takes too.
    aliases: Mapping[str, str]
    #: Keys of which only one value is supported.
    fixed: Mapping[str, Any]
    #: `ModelSpec`'s names to keys; `positions` is the largest sequence length.
    names: Mapping[str, str]
    dropouts: tuple[str, ...]
    #: Raises ConfigError where complete values contradict each other.
    check: Callable[[Config], None]
    #: Of complete values and the sequence length.
    count: Callable[[Config, int], Counts]

    def native(self, config: Config) -> dict[str, Any]:
        """Only the keys that matter, under their own names and checked one by one.

        Raises ConfigError for a key that is unknown, given twice, or of a wrong value.
        """
        chosen: dict[str, Any] = {}
        for name, value in config.items():
            if name == "model_type":
                self._check_type(value)
                continue
            if name in self.fixed:
                if value not in (None, self.fixed[name]):
                    raise ConfigError(
                        name,
                        f"{value!r} is not supported; remove the key or set {self.fixed[name]!r}",
                    )
                continue
            key = self.aliases.get(name, name)
            if key not in self.keys:
                if name not in NO_EFFECT:
                    raise ConfigError(name, f"{self.kind} has no such key; {self._near(name)}")
                continue
            checked = self.keys[key].check(name, value)
            if chosen.setdefault(key, checked) != checked:
                raise ConfigError(
                    name, f"{value} here and {chosen[key]} under {key}'s other name; remove one"
                )
        return chosen

    def complete(self, config: Config) -> dict[str, Any]:
        """`config` with every key of the family, checked; raises ConfigError."""
        chosen = self.native(config)
        full = {name: chosen.get(name, key.default) for name, key in self.keys.items()}
        numbers = self.numbers(full)
        if numbers.hidden % numbers.heads:
            raise ConfigError(
                self.names["heads"],
                f"{numbers.heads} does not divide {self.names['hidden']} ({numbers.hidden}); "
                "choose a divisor of it",
            )
        for name in self.dropouts:
            if not full[name] < 1.0:
                raise ConfigError(name, f"{full[name]} is not in [0, 1)")
        self.check(full)
        return full

    def numbers(self, config: Config) -> Numbers:
        """Of complete values."""
        return Numbers(
            layers=config[self.names["layers"]],
            hidden=config[self.names["hidden"]],
            heads=config[self.names["heads"]],
            vocabulary=config[self.names["vocabulary"]],
            tied=config[self.names["tied"]],
            dropout=max(config[name] for name in self.dropouts),
        )

    def positions(self, config: Config) -> int:
        """The largest sequence length, of complete values."""
        positions: int = config[self.names["positions"]]
        return positions

    def _check_type(self, model_type: object) -> None:
        if model_type != self.kind:
            raise ConfigError(
                "model_type", f"{model_type!r} is not the job's kind {self.kind}; correct either"
            )

    def _near(self, name: str) -> str:
        known = [*self.keys, *self.aliases]
        near = difflib.get_close_matches(name, known, n=1)
        return f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(self.keys)}"


def encode_config(config: Config) -> str:
    """One text for equal configs."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def decode_config(text: str) -> dict[str, Any]:
    """What `encode_config` was given; raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("config: it must be a mapping of keys to values")
    return found
