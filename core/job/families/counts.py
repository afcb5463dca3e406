"""Arithmetic of layers: parameters, FLOPs, and the numbers kept from forward to backward."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCount:
    """Arithmetic of one layer."""

    parameters: int
    #: Multiplications and additions of one token's forward.
    flops: float
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


def attention_scores(heads: int, length: int, dropout: float) -> int:
    """Return the attention weights per token that dropout keeps from being fused: those before it,
    those after it, and the mask."""
    return heads * length if dropout else 0
