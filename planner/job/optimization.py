"""What the job says of the update: the optimizer and how its learning rate goes over the steps.

Owns the settings, their defaults and their checks, and what planning must know of an optimizer:
how many numbers it keeps per weight. The update itself is the worker's.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

#: What each optimizer takes beside `lr`, and the defaults.
_SETTINGS: Mapping[str, Mapping[str, float | bool]] = {
    "adamw": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1.0e-8},
    "sgd": {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """torch.optim's AdamW or SGD. A setting that is left out has its optimizer's default after
    construction; those of the other optimizer stay None, and giving one raises ValueError.
    """

    name: Literal["adamw", "sgd"] = "adamw"
    lr: float = 3.0e-4
    #: Acts on matrices and embeddings; norms and biases are not decayed. AdamW 0.1, SGD 0.
    weight_decay: float | None = None
    #: AdamW: 0.9, 0.95 and 1e-8.
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    #: SGD: 0 and false.
    momentum: float | None = None
    nesterov: bool | None = None

    def __post_init__(self) -> None:
        own = _SETTINGS[self.name]
        for other, settings in _SETTINGS.items():
            for key in settings:
                if key not in own and getattr(self, key) is not None:
                    raise ValueError(
                        f"{key}: is a setting of {other}; remove it, or set name: {other} "
                        f"({self.name} takes lr, {', '.join(own)})"
                    )
        for key, default in own.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, default)
        for key in ("lr", "weight_decay", "eps"):
            value = getattr(self, key)
            if value is not None and not value >= 0:
                raise ValueError(f"{key}: {value} is too small; it must be at least 0")
        for key in ("beta1", "beta2", "momentum"):
            value = getattr(self, key)
            if value is not None and not 0.0 <= value < 1.0:
                raise ValueError(f"{key}: {value} is not in [0, 1)")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: needs momentum; give momentum, such as 0.9, or remove it")

    @property
    def moments(self) -> int:
        """Numbers kept per weight from step to step: AdamW two, SGD its momentum if it has one."""
        return 2 if self.name == "adamw" else int(bool(self.momentum))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Learning rate over steps: linear warm-up, then constant, or a fall to `min_lr`, along a
    line or half a cosine."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    #: Steps before the first one at the full rate.
    warmup: int = 0
    #: Rate that a fall would reach in the step after the last one.
    min_lr: float = 0.0

    def __post_init__(self) -> None:
        for key in ("warmup", "min_lr"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key}: {getattr(self, key)} is too small; it must be at least 0")
        if self.min_lr and self.name == "constant":
            raise ValueError(
                "min_lr: is where linear and cosine end; remove it, or choose one of them"
            )
