"""Settings of the update: the optimizer and the schedule of its learning rate.

Owns the settings, their defaults and checks, and how many numbers an optimizer keeps per weight,
which planning needs. The count of a class that the job names is found at submission and sent with
the job. The worker makes the update.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from oobleck.core import codec
from oobleck.core.job.checks import Amount, NotNegative, Part
from oobleck.core.job.code import NO_ARGUMENTS, NOT_DESCRIBED, TORCH_OPTIM, Code, Json, check_code

#: Settings of each optimizer beside `lr`, with defaults.
_SETTINGS: Mapping[str, Mapping[str, float | bool]] = {
    "adamw": {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1.0e-8},
    "sgd": {"weight_decay": 0.0, "momentum": 0.0, "nesterov": False},
}
#: The same for a class that the job names.
_OWN_SETTINGS: Mapping[str, float | bool] = {"weight_decay": 0.0}


#: Settings of a class that have a key of the job file, and so are not among its arguments.
_KEYS = ("params", "lr", "weight_decay")
#: Most numbers that a class may keep per weight.
_MOST_ROWS = 8
_ENTRY = re.compile(r"[A-Za-z_]\w{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRow:
    """Number that a class keeps per weight, in a tensor of each parameter's shape."""

    #: Key in the class's state of a parameter.
    name: str
    #: Value before the first update.
    initial: float
    #: True: the class keeps one number per parameter, which is stored with each weight.
    single: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSketch:
    """State that a class keeps of each parameter from step to step."""

    rows: tuple[StateRow, ...]
    #: Single numbers that count the steps.
    counters: tuple[str, ...]
    #: Entries that never change.
    constants: tuple[str, ...] = ()
    #: Fingerprint of the examined code.
    code: str

    def __post_init__(self) -> None:
        if len(self.rows) > _MOST_ROWS:
            raise ValueError(f"{len(self.rows)} numbers per weight are more than {_MOST_ROWS}")
        if len({*self.names}) != len(self.names) or not all(map(_ENTRY.fullmatch, self.names)):
            raise ValueError(f"{self.names} are no different names")

    @property
    def names(self) -> tuple[str, ...]:
        return (*(row.name for row in self.rows), *self.counters, *self.constants)


@lru_cache(maxsize=16)
def _read_sketch(text: Json) -> OptimizerSketch:
    return codec.decode(OptimizerSketch, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Optimizer of a job: torch.optim's AdamW or SGD, or a class that the job names.

    After construction, an omitted setting has its optimizer's default. Settings of other optimizers
    stay None; giving one raises ValueError.
    """

    #: None after construction where the job names a class.
    name: Literal["adamw", "sgd"] | None = None
    lr: Amount = 3.0e-4
    #: Acts on matrices and embeddings, never on norms and biases. AdamW 0.1, others 0.
    weight_decay: Amount | None = None
    #: Further parameters without decay: patterns of their names in an output, layer first, such as
    #: "0.*" and "*.scale".
    no_decay: tuple[str, ...] = ()
    #: AdamW: 0.9, 0.95 and 1e-8.
    beta1: Part | None = None
    beta2: Part | None = None
    eps: Amount | None = None
    #: SGD: 0 and false.
    momentum: Part | None = None
    nesterov: bool | None = None
    #: Subclass of torch.optim.Optimizer: an entry point of the group oobleck.optimizers, or a class
    #: (package.module:Class; torch.optim:Class is allowed everywhere).
    plugin: str | None = None
    python: str | None = None
    #: Directory on every node that holds the class's module; None: it is installed.
    path: str | None = None
    #: Arguments of the class beside parameters, lr and weight_decay.
    arguments: Json = NO_ARGUMENTS
    #: JSON of an `OptimizerSketch`; empty: the class was not examined.
    described: Json = NOT_DESCRIBED

    def __post_init__(self) -> None:
        check_code(plugin=self.plugin, python=self.python, path=self.path)
        if self.code is not None:
            self._check_own(self.code)
        elif self.name is None:
            object.__setattr__(self, "name", "adamw")
        if self.code is None and (self.arguments != NO_ARGUMENTS or self.described):
            raise ValueError("arguments: are those of plugin or python; leave them out")
        own = _SETTINGS[self.name] if self.name else _OWN_SETTINGS
        for other, settings in _SETTINGS.items():
            for key in settings:
                if key not in own and getattr(self, key) is not None:
                    fix = (
                        f"remove it, or set name: {other} ({self.name} takes lr, {', '.join(own)})"
                        if self.name
                        else "put what your class takes under arguments"
                    )
                    raise ValueError(f"{key}: is a setting of {other}; {fix}")
        for key, default in own.items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, default)
        if not all(self.no_decay):
            raise ValueError("no_decay: has an empty pattern; remove it")
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov: needs momentum; give momentum, such as 0.9, or remove it")

    def _check_own(self, code: Code) -> None:
        if self.name is not None:
            raise ValueError(f"name: {self.name} is an optimizer of its own; leave name out")
        if code.module == f"{TORCH_OPTIM}.lr_scheduler":
            raise ValueError(
                "python: is a schedule of the rate, not an optimizer; give training.schedule"
            )
        for key in json.loads(code.arguments or NO_ARGUMENTS):
            if key in _KEYS:
                raise ValueError(
                    f"arguments: has {key}; give {key} beside them, as a key of its own"
                )
        if self.described:
            try:
                _read_sketch(self.described)
            except ValueError as error:
                raise ValueError(f"described: {error}") from error

    @property
    def code(self) -> Code | None:
        """Code that makes the optimizer; None for a named one."""
        name = self.plugin or self.python
        if name is None:
            return None
        group = "oobleck.optimizers" if self.plugin else None
        return Code(name=name, group=group, path=self.path, arguments=self.arguments)

    @property
    def sketch(self) -> OptimizerSketch:
        """Sketch of the state that the job's class keeps. Raises ValueError where the class was not
        examined."""
        if not self.described:
            raise ValueError("described: the class was not examined yet; submit by oobleck submit")
        return _read_sketch(self.described)

    @property
    def state(self) -> tuple[str, ...]:
        """Names in torch of the numbers that are kept per weight from step to step."""
        if self.code is not None:
            # Nothing is known of a class that was not examined; its workers refuse the job.
            return tuple(row.name for row in self.sketch.rows) if self.described else ()
        if self.name == "adamw":
            return ("exp_avg", "exp_avg_sq")
        return ("momentum_buffer",) if self.momentum else ()

    @property
    def initial(self) -> tuple[float, ...]:
        """Values of the `state` numbers before the first update."""
        if self.code is not None and self.described:
            return tuple(row.initial for row in self.sketch.rows)
        return (0.0,) * self.moments

    @property
    def moments(self) -> int:
        """Count of the `state` numbers: two for AdamW, one for SGD with momentum, none for plain
        SGD."""
        return len(self.state)

    @property
    def label(self) -> str:
        """Name of the optimizer, whatever its settings."""
        return self.name or self.plugin or self.python or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """Learning rate over steps: linear warm-up, then constant or a decay to `min_lr`, linear or
    along half a cosine."""

    name: Literal["constant", "linear", "cosine"] = "constant"
    #: Steps before the first one at the full rate.
    warmup: NotNegative = 0
    #: Rate that a decay reaches one step after the last step.
    min_lr: Amount = 0.0

    def __post_init__(self) -> None:
        if self.min_lr and self.name == "constant":
            raise ValueError(
                "min_lr: is where linear and cosine end; remove it, or choose one of them"
            )
