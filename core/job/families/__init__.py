"""Families of Hugging Face models: their config keys, and the numbers that planning reads from
them.

One module per family holds its keys and defaults, which are those of transformers. Its counts are
those of the modules that `oobleck.worker.models` builds, one for each kind of layer. A family needs
its module here, a line in `Kind` and `FAMILIES`, and a module of the same name in
`oobleck.worker.models`. Planning must not import transformers.
"""

from typing import Any, Literal

from oobleck.core.job.families.bert import BERT, mask_token
from oobleck.core.job.families.counts import Counts, LayerCount
from oobleck.core.job.families.family import Family, Numbers, Objective
from oobleck.core.job.families.gpt2 import GPT2
from oobleck.core.job.families.keys import Config, ConfigError, decode_config, encode_config
from oobleck.core.job.families.llama import LLAMA

__all__ = [
    "FAMILIES",
    "GPT2",
    "Config",
    "ConfigError",
    "Counts",
    "Family",
    "Kind",
    "LayerCount",
    "Numbers",
    "Objective",
    "decode_config",
    "encode_config",
    "family_of",
    "mask_token",
]

Kind = Literal["gpt2", "llama", "bert"]
FAMILIES: dict[Kind, Family] = {"gpt2": GPT2, "llama": LLAMA, "bert": BERT}


def family_of(kind: str) -> Family | None:
    """Return the family of that name; None for the built-in model and for unknown names."""
    known: dict[Any, Family] = dict(FAMILIES)
    return known.get(kind)
