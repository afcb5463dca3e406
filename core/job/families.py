"""Families of Hugging Face models: their config keys, and the numbers that planning reads from
them.

Keys and defaults are those of transformers. Counts are those of the modules that
`oobleck.worker.models` builds, one for each kind of layer. Must not import transformers.
"""

from typing import Any, Literal

from oobleck.core.job.family import (
    ACTIVATIONS,
    Config,
    ConfigError,
    Counts,
    Family,
    Key,
    LayerCount,
    Linear,
    attention_scores,
    check_padding,
    dense_block,
    lookup,
)

# ---- GPT-2, and the GPT-3 sizes, as transformers defines `GPT2LMHeadModel`


def _gpt2_count(config: Config, length: int) -> Counts:
    hidden, vocabulary = config["n_embd"], config["vocab_size"]
    inner = config["n_inner"] or 4 * hidden
    matrices = 4 * hidden * hidden + 2 * hidden * inner
    scores = attention_scores(config["n_head"], length, config["attn_pdrop"])
    return Counts(
        embedding=lookup(
            vocabulary, hidden, config["n_positions"] * hidden, dropout=config["embd_pdrop"]
        ),
        block=LayerCount(
            parameters=matrices + 9 * hidden + inner,
            flops=2.0 * matrices + 4.0 * length * hidden,
            linear=dense_block(hidden, inner, "n_inner"),
            kept=8 * hidden + 2 * inner + scores,
            kept_wide=scores,
            masks=scores + (2 * hidden if config["resid_pdrop"] else 0),
        ),
        head=LayerCount(
            parameters=2 * hidden + vocabulary * hidden,
            flops=2.0 * hidden * vocabulary,
            kept=2 * hidden + vocabulary,
        ),
    )


GPT2 = Family(
    kind="gpt2",
    architecture="GPT2LMHeadModel",
    objective="causal",
    keys={
        "vocab_size": Key(int, 50257, least=2),
        "n_positions": Key(int, 1024, least=1),
        "n_embd": Key(int, 768, least=1),
        "n_layer": Key(int, 12, least=1),
        "n_head": Key(int, 12, least=1),
        "n_inner": Key(int, None, least=1),
        "activation_function": Key(str, "gelu_new", choices=ACTIVATIONS),
        "resid_pdrop": Key(float, 0.1),
        "embd_pdrop": Key(float, 0.1),
        "attn_pdrop": Key(float, 0.1),
        "layer_norm_epsilon": Key(float, 1e-5),
        "initializer_range": Key(float, 0.02),
        "scale_attn_weights": Key(bool, True),
        "scale_attn_by_inverse_layer_idx": Key(bool, False),
        "tie_word_embeddings": Key(bool, True),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    fixed={"reorder_and_upcast_attn": False, "add_cross_attention": False},
    names={
        "layers": "n_layer",
        "hidden": "n_embd",
        "heads": "n_head",
        "vocabulary": "vocab_size",
        "tied": "tie_word_embeddings",
        "positions": "n_positions",
    },
    dropouts=("embd_pdrop", "resid_pdrop", "attn_pdrop"),
    count=_gpt2_count,
    blocks="transformer.h",
)


# ---- Llama, as transformers defines `LlamaForCausalLM`


_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _llama_heads(config: Config) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key and value heads, and the width of one."""
    heads = config["num_attention_heads"]
    shared = config["num_key_value_heads"] or heads
    return heads, shared, config["head_dim"] or config["hidden_size"] // heads


def _llama_check(config: Config) -> None:
    heads, shared, width = _llama_heads(config)
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
    _llama_check_rope(config)


def _llama_check_rope(config: Config) -> None:
    """Check `rope_parameters` and `rope_scaling`, its name in older configs."""
    new, old = config["rope_parameters"], config["rope_scaling"]
    if new and old:
        raise ConfigError("rope_scaling", "and rope_parameters say the same thing; remove one")
    rope = new or old or {}
    named = rope.get("rope_type", rope.get("type", "default"))
    if named not in _ROPE_TYPES:
        key = "rope_parameters" if new else "rope_scaling"
        raise ConfigError(key, f"type {named!r} is not supported; use {', '.join(_ROPE_TYPES)}")


def _llama_count(config: Config, length: int) -> Counts:
    hidden, inner, vocabulary = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    heads, shared, width = _llama_heads(config)
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
            linear=(
                (
                    Linear("num_attention_heads", hidden, width * heads),
                    *[Linear("num_key_value_heads", hidden, width * shared)] * 2,
                ),
                (Linear("num_attention_heads", width * heads, hidden),),
                (Linear("intermediate_size", hidden, inner),) * 2,
                (Linear("intermediate_size", inner, hidden),),
            ),
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
    check=_llama_check,
    count=_llama_count,
    blocks="model.layers",
)


# ---- BERT, as transformers defines `BertForMaskedLM`


#: Vocabularies of the released BERT models, in which 103 is the mask token.
_RELEASED_BERT = (28996, 30522)
_RELEASED_MASK_TOKEN = 103


def _bert_check(config: Config) -> None:
    check_padding(config)
    mask = mask_token(config)
    if not mask < config["vocab_size"]:
        raise ConfigError(
            "mask_token_id", f"{mask} is not below vocab_size ({config['vocab_size']}); lower it"
        )


def mask_token(config: Config) -> int:
    """Return the mask token's id; raises ConfigError where the config does not determine it."""
    if config["mask_token_id"] is not None:
        given: int = config["mask_token_id"]
        return given
    if config["vocab_size"] in _RELEASED_BERT:
        return _RELEASED_MASK_TOKEN
    raise ConfigError(
        "mask_token_id",
        "is missing; give the id that stands for a masked token and that the data does not use, "
        f"such as vocab_size - 1 ({config['vocab_size'] - 1})",
    )


def _bert_count(config: Config, length: int) -> Counts:
    hidden, inner, vocabulary = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    matrices = 4 * hidden * hidden + 2 * hidden * inner
    tables = (config["max_position_embeddings"] + config["type_vocab_size"]) * hidden
    dropout = config["hidden_dropout_prob"]
    scores = attention_scores(
        config["num_attention_heads"], length, config["attention_probs_dropout_prob"]
    )
    return Counts(
        embedding=lookup(
            vocabulary, hidden, tables + 2 * hidden, kept_wide=hidden, dropout=dropout
        ),
        block=LayerCount(
            parameters=matrices + 9 * hidden + inner,
            flops=2.0 * matrices + 4.0 * length * hidden,
            linear=dense_block(hidden, inner, "intermediate_size"),
            kept=8 * hidden + 2 * inner + scores,
            kept_wide=scores,
            masks=scores + (2 * hidden if dropout else 0),
        ),
        head=LayerCount(
            parameters=hidden * hidden + 3 * hidden + vocabulary * hidden + vocabulary,
            flops=2.0 * hidden * (hidden + vocabulary),
            kept=4 * hidden + vocabulary,
        ),
    )


def _bert_outside(embedding: bool, name: str, tied: bool) -> str:
    if embedding:
        return f"bert.embeddings.{name}"
    # transformers ties the decoder's bias too, to a parameter that has no other use.
    own = tied and name == "decoder.bias"
    return "cls.predictions.bias" if own else f"cls.predictions.{name}"


BERT = Family(
    kind="bert",
    architecture="BertForMaskedLM",
    objective="masked",
    keys={
        "vocab_size": Key(int, 30522, least=2),
        "hidden_size": Key(int, 768, least=1),
        "num_hidden_layers": Key(int, 12, least=1),
        "num_attention_heads": Key(int, 12, least=1),
        "intermediate_size": Key(int, 3072, least=1),
        "hidden_act": Key(str, "gelu", choices=ACTIVATIONS),
        "hidden_dropout_prob": Key(float, 0.1),
        "attention_probs_dropout_prob": Key(float, 0.1),
        "max_position_embeddings": Key(int, 512, least=1),
        "type_vocab_size": Key(int, 2, least=1),
        "initializer_range": Key(float, 0.02),
        "layer_norm_eps": Key(float, 1e-12),
        "pad_token_id": Key(int, 0, optional=True),
        "tie_word_embeddings": Key(bool, True),
        # Our own key: in transformers the tokenizer has it.
        "mask_token_id": Key(int, None),
    },
    aliases={},
    fixed={
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    },
    names={
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "vocabulary": "vocab_size",
        "tied": "tie_word_embeddings",
        "positions": "max_position_embeddings",
    },
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    check=_bert_check,
    count=_bert_count,
    blocks="bert.encoder.layer",
    outside=_bert_outside,
)


# ---- all of them


Kind = Literal["gpt2", "llama", "bert"]
FAMILIES: dict[Kind, Family] = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT}


def family_of(kind: str) -> Family | None:
    """Return the family of that name; None for the built-in model and for unknown names."""
    known: dict[Any, Family] = dict(FAMILIES)
    return known.get(kind)
