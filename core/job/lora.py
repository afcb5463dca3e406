"""Adapters that a job trains in place of a model's own weights."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from oobleck.core.job.checks import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters; keys and defaults are those of peft's LoraConfig."""

    #: Linear layers of the model, by the ends of their names: q_proj matches that of every block.
    target_modules: tuple[str, ...] = ()
    r: Annotated[int, Meta(ge=1, le=1 << 16)] = 8
    lora_alpha: Annotated[int, Meta(ge=1, le=1 << 16)] = 8
    lora_dropout: Part = 0.0

    def __post_init__(self) -> None:
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                "target_modules names no linear layer of the model; give some, such as "
                "[q_proj, v_proj]"
            )
