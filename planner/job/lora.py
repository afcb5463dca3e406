"""Adapters that are trained on a model in place of its own weights, as a job names them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Low-rank adapters; keys and defaults are those of peft's LoraConfig."""

    #: Linear layers of the model, by the ends of their names: q_proj is that of every block.
    target_modules: tuple[str, ...] = ()
    r: int = 8
    lora_alpha: int = 8
    lora_dropout: float = 0.0

    def __post_init__(self) -> None:
        if not self.target_modules or not all(self.target_modules):
            raise ValueError(
                "target_modules names no linear layer of the model; give some, such as "
                "[q_proj, v_proj]"
            )
        for name in ("r", "lora_alpha"):
            if not 1 <= getattr(self, name) <= 1 << 16:
                raise ValueError(f"{name}: {getattr(self, name)} is not in 1 to {1 << 16}")
        if not 0.0 <= self.lora_dropout < 1.0:
            raise ValueError(f"lora_dropout: {self.lora_dropout} is not in [0, 1)")
