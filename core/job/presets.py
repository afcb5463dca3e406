"""Published models by name: a kind, and the keys in which a config differs from the defaults.

Vocabularies are the published ones; a job's own values replace any of these.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oobleck.core.job.families import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    kind: Kind
    config: Mapping[str, Any]


def _gpt2(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(kind="gpt2", config={"n_layer": layers, "n_embd": hidden, "n_head": heads})


def _gpt3(layers: int, hidden: int, heads: int) -> Preset:
    """Build a preset of Brown et al. 2020, table 2.1: GPT-2's layers (the paper's sparse attention
    is left out).

    Without dropout, since these models see each token less than once.
    """
    base = _gpt2(layers, hidden, heads)
    no_dropout = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
    return Preset(kind="gpt2", config={**base.config, "n_positions": 2048, **no_dropout})


def _bert(layers: int, hidden: int, heads: int) -> Preset:
    return Preset(
        kind="bert",
        config={
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": 4 * hidden,
        },
    )


def _llama(
    layers: int, hidden: int, heads: int, inner: int, positions: int, **others: object
) -> Preset:
    return Preset(
        kind="llama",
        config={
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "intermediate_size": inner,
            "max_position_embeddings": positions,
            "rms_norm_eps": 1e-5,
            **others,
        },
    )


_LLAMA3: dict[str, object] = {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
}

PRESETS: dict[str, Preset] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-small": _gpt3(12, 768, 12),
    "gpt3-medium": _gpt3(24, 1024, 16),
    "gpt3-large": _gpt3(24, 1536, 16),
    # The paper's 24 heads do not divide its width of 2048. 16 heads keep the paper's head width of
    # 128.
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    # The paper's width of 5140 does not match its 40 heads of 128.
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "bert-base": _bert(12, 768, 12),
    "bert-large": _bert(24, 1024, 16),
    "llama-2-7b": _llama(32, 4096, 32, 11008, 4096),
    "llama-2-13b": _llama(40, 5120, 40, 13824, 4096),
    "llama-3-8b": _llama(32, 4096, 32, 14336, 8192, **_LLAMA3),
    "llama-3-70b": _llama(80, 8192, 64, 28672, 8192, **_LLAMA3),
    "llama-3-405b": _llama(126, 16384, 128, 53248, 8192, **_LLAMA3),
}
