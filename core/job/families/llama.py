"""Llama, as transformers defines `LlamaForCausalLM`."""

from oobleck.core.job.families.counts import Counts, LayerCount, attention_scores, lookup
from oobleck.core.job.families.family import Family
from oobleck.core.job.families.keys import ACTIVATIONS, Config, ConfigError, Key, check_padding

_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _heads(config: Config) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key and value heads, and the width of one."""
    heads = config["num_attention_heads"]
    shared = config["num_key_value_heads"] or heads
    return heads, shared, config["head_dim"] or config["hidden_size"] // heads


def _check(config: Config) -> None:
    heads, shared, width = _heads(config)
    if heads % shared:
        raise ConfigError(
            "num_key_value_heads",
            f"{shared} does not divide num_attention_heads ({heads}); choose a divisor of it",
        )
    if width % 2:
        raise ConfigError(
            "head_dim",
            f"heads {width} wide cannot be rotated in pairs; choose hidden_size and "
            "num_attention_heads, or head_dim, so that the width of a head is even",
        )
    check_padding(config)
    _check_rope(config)


def _check_rope(config: Config) -> None:
    """Check `rope_parameters` and `rope_scaling`, its name in older configs."""
    new, old = config["rope_parameters"], config["rope_scaling"]
    if new and old:
        raise ConfigError("rope_scaling", "and rope_parameters say the same thing; remove one")
    rope = new or old or {}
    named = rope.get("rope_type", rope.get("type", "default"))
    if named not in _ROPE_TYPES:
        key = "rope_parameters" if new else "rope_scaling"
        raise ConfigError(key, f"type {named!r} is not supported; use {', '.join(_ROPE_TYPES)}")


def _count(config: Config, length: int) -> Counts:
    hidden, inner, vocabulary = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    heads, shared, width = _heads(config)
    matrices = hidden * width * 2 * (heads + shared) + 3 * hidden * inner
    biases = 0
    if config["attention_bias"]:
        biases += width * (heads + 2 * shared) + hidden
    if config["mlp_bias"]:
        biases += 2 * inner + hidden
    scores = attention_scores(heads, length, config["attention_dropout"])
    return Counts(
        embedding=lookup(vocabulary, hidden, 0),
        block=LayerCount(
            parameters=matrices + biases + 2 * hidden,
            flops=2.0 * matrices + 4.0 * length * width * heads,
            kept=2 * width * (heads + shared) + 4 * inner + 4 * hidden + scores,
            kept_wide=2 * hidden + scores,
            masks=scores,
        ),
        head=LayerCount(
            parameters=hidden + vocabulary * hidden,
            flops=2.0 * hidden * vocabulary,
            kept=hidden + vocabulary,
            kept_wide=2 * hidden,
        ),
    )


def _outside(embedding: bool, name: str, tied: bool) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


LLAMA = Family(
    kind="llama",
    architecture="LlamaForCausalLM",
    objective="causal",
    keys={
        "vocab_size": Key(int, 32000, least=2),
        "hidden_size": Key(int, 4096, least=1),
        "intermediate_size": Key(int, 11008, least=1),
        "num_hidden_layers": Key(int, 32, least=1),
        "num_attention_heads": Key(int, 32, least=1),
        "num_key_value_heads": Key(int, None, least=1),
        "head_dim": Key(int, None, least=1),
        "hidden_act": Key(str, "silu", choices=ACTIVATIONS),
        "max_position_embeddings": Key(int, 2048, least=1),
        "initializer_range": Key(float, 0.02),
        "rms_norm_eps": Key(float, 1e-6),
        "pad_token_id": Key(int, None),
        "tie_word_embeddings": Key(bool, False),
        "rope_parameters": Key(dict, None),
        "rope_scaling": Key(dict, None),
        "rope_theta": Key(float, None),
        "attention_bias": Key(bool, False),
        "attention_dropout": Key(float, 0.0),
        "mlp_bias": Key(bool, False),
    },
    aliases={},
    fixed={},
    names={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "vocabulary": "vocab_size",
        "tied": "tie_word_embeddings",
        "positions": "max_position_embeddings",
    },
    dropouts=("attention_dropout",),
    check=_check,
    count=_count,
    blocks="model.layers",
    outside=_outside,
)
