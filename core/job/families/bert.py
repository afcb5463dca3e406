"""BERT, as transformers defines `BertForMaskedLM`."""

from oobleck.core.job.families.counts import Counts, LayerCount, attention_scores, lookup
from oobleck.core.job.families.family import Family
from oobleck.core.job.families.keys import ACTIVATIONS, Config, ConfigError, Key, check_padding

#: Vocabularies of the released BERT models, in which 103 is the mask token.
_RELEASED_BERT = (28996, 30522)
_RELEASED_MASK_TOKEN = 103


def _check(config: Config) -> None:
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


def _count(config: Config, length: int) -> Counts:
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


def _outside(embedding: bool, name: str, tied: bool) -> str:
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
    check=_check,
    count=_count,
    blocks="bert.encoder.layer",
    outside=_outside,
)
