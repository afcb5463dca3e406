"""Type of a model family: a table of keys under transformers' names, and the numbers that follow.

Owns keys and their checks, the arithmetic of layers, and the type. Must not know any family.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

# ---- keys: their types, defaults and checks of values


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
        config = json.loads(text)
    except RecursionError as error:
        raise ValueError("config: it is nested too deeply") from error
    if not isinstance(config, dict):
        raise ValueError("config: it must be a mapping of keys to values")
    return config


# ---- arithmetic of layers: parameters, FLOPs, and the numbers kept from forward to backward


class Linear(NamedTuple):
    """Sizes of a linear layer, at least one of them a multiple of the hidden size."""

    #: Config key that the other size follows from; empty: it is one, too.
    key: str
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """Arithmetic of one layer."""

    parameters: int
    #: Multiplications and additions of one token's forward.
    flops: float
    #: Linear layers that multiply in float8 where their sizes fit; those together take one input.
    linear: tuple[tuple[Linear, ...], ...] = ()
    #: Numbers per token kept from the forward to the backward, in the precision of computing.
    #: `kept_wide` counts those in float32 even under bf16: some norms, softmax, losses.
    kept: int = 0
    kept_wide: int = 0
    #: Bytes per token of dropout's masks.
    masks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Arithmetic of each kind of layer."""

    embedding: LayerCount
    block: LayerCount
    head: LayerCount


def lookup(
    vocabulary: int, hidden: int, others: int, *, kept_wide: int = 0, dropout: float = 0.0
) -> LayerCount:
    """Count embedding tables; a look-up costs next to nothing and keeps only the tokens."""
    return LayerCount(
        parameters=vocabulary * hidden + others,
        flops=2.0 * hidden,
        kept_wide=kept_wide,
        masks=hidden if dropout else 0,
    )


def dense_block(hidden: int, inner: int, key: str) -> tuple[tuple[Linear, ...], ...]:
    """List the linear layers of a block whose attention keeps the hidden size. `key`: the config's
    for the `inner` units of its MLP."""
    attention = Linear("", hidden, 3 * hidden), Linear("", hidden, hidden)
    mlp = Linear(key, hidden, inner), Linear(key, inner, hidden)
    return tuple((one,) for one in (*attention, *mlp))


def attention_scores(heads: int, length: int, dropout: float) -> int:
    """Return the attention weights per token that dropout keeps from being fused: those before it,
    those after it, and the mask."""
    return heads * length if dropout else 0


# ---- families


Objective = Literal["causal", "masked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Numbers of a model that planning and data need, under the names of `ModelSpec`."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    tied: bool
    #: Largest dropout of the family's keys.
    dropout: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Model family: a table of keys, and the numbers that follow from their values."""

    kind: str
    #: Class in transformers.
    architecture: str
    objective: Objective
    keys: Mapping[str, Key]
    #: Other names of keys that transformers accepts.
    aliases: Mapping[str, str]
    #: Keys of which only one value is supported.
    fixed: Mapping[str, Any]
    #: `ModelSpec`'s names to keys; `positions` is the largest sequence length.
    names: Mapping[str, str]
    dropouts: tuple[str, ...]
    #: Called with a complete config and the sequence length.
    count: Callable[[Config, int], Counts]
    #: Name in transformers of the list of blocks.
    blocks: str
    #: Raises ConfigError where the values of a complete config contradict each other.
    check: Callable[[Config], None] | None = None
    #: Name in transformers of a parameter of the embedding (True) or of the head. Called with our
    #: name, and whether the head shares the embedding's weight. None: the name in the base model.
    outside: Callable[[bool, str, bool], str] | None = None

    @property
    def base_prefix(self) -> str:
        """Prefix that names in a base model's checkpoint leave out."""
        return self.blocks.partition(".")[0] + "."

    def foreign_name(self, layer: int, name: str, *, tied: bool) -> str:
        """Return transformers' name of parameter `name` of `layer`."""
        inner = name.removeprefix("block.")
        if inner != name:
            return f"{self.blocks}.{layer - 1}.{inner}"
        if self.outside is not None:
            return self.outside(layer == 0, name, tied)
        return name if name.startswith("lm_head.") else f"{self.base_prefix}{name}"

    def native(self, config: Config) -> dict[str, Any]:
        """Return only the keys that matter, under their own names and checked one by one. Raises
        ConfigError for a key that is unknown, given twice, or of a wrong value."""
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
        """Return `config` with every key of the family, checked; raises ConfigError."""
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
        if self.check is not None:
            self.check(full)
        return full

    def numbers(self, config: Config) -> Numbers:
        """Read the numbers from a complete config."""
        return Numbers(
            layers=config[self.names["layers"]],
            hidden=config[self.names["hidden"]],
            heads=config[self.names["heads"]],
            vocabulary=config[self.names["vocabulary"]],
            tied=config[self.names["tied"]],
            dropout=max(config[name] for name in self.dropouts),
        )

    def positions(self, config: Config) -> int:
        """Return the largest sequence length, from a complete config."""
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
