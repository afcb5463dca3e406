"""GPT-2, and the GPT-3 sizes, as transformers defines `GPT2LMHeadModel`."""

from oobleck.core.job.families.counts import Counts, LayerCount, attention_scores, lookup
from oobleck.core.job.families.family import Family
from oobleck.core.job.families.keys import ACTIVATIONS, Config, Key


def _check(config: Config) -> None:
    del config  # every combination of single values works


def _count(config: Config, length: int) -> Counts:
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


def _outside(embedding: bool, name: str, tied: bool) -> str:
    return name if name.startswith("lm_head.") else f"transformer.{name}"


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
    check=_check,
    count=_count,
    blocks="transformer.h",
    outside=_outside,
)
