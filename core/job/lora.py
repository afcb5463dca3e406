"""Adapters that a job trains in place of a model's own weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from oobleck.core.job.checks import PART, Limits, check_limits


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters; keys and defaults are those of peft's LoraConfig."""

    #: Linear layers of the model, by the ends of their names: q_proj matches that of every block.
    target_modules: tuple[str, ...] = ()
    r: int = 8
    lora_alpha: int = 8
    lora_dropout: float = 0.0
    LIMITS: ClassVar[Mapping[str, Limits]] = {
        "r": Limits(at_least=1, at_most=1 << 16),
        "lora_alpha": Limits(at_least=1, at_most=1 << 16),
        "lora_dropout": PART,
    }

    def __post_init__(self) -> None:
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                "target_modules names no linear layer of the model; give some, such as "
                "[q_proj, v_proj]"
            )
        check_limits(self, self.LIMITS)
