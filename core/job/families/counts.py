"""A layer's arithmetic: its parameters, FLOPs, and what its forward keeps for the backward."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """Arithmetic of one layer."""

    parameters: int
    #: Multiplications and additions of one token's forward.
    flops: float
    #: Numbers per token that the forward leaves to the backward, in the precision of computing,
    #: and those that are in float32 under bf16 too: some norms, softmax, losses.
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
    """Embedding tables; a look-up costs next to nothing and keeps nothing but the tokens."""
    return LayerCount(
        parameters=vocabulary * hidden + others,
        flops=2.0 * hidden,
        kept_wide=kept_wide,
        masks=hidden if dropout else 0,
    )


def attention_scores(heads: int, length: int, dropout: float) -> int:
    """Attention's shares per token, which only dropout on them keeps from being fused: before and
    after it, and the mask."""
    return heads * length if dropout else 0
