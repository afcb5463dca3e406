"""The parameters that a step leaves out of its update: as in torch, those without a gradient.

A parameter is used in a step if any micro-batch gave it a gradient, on any worker, in any of the
layers that share it. The vote on the step says which are, so all workers that know the step as
committed know that too. How many steps each parameter was left out of is part of what training has
come to: optimizers count the updates of each. Only a model of the user's can leave one out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from oobleck.planner.job.model import AnyModel
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import JobSpec
from oobleck.worker.state.layout import layout

#: How many committed steps left out each parameter that any did, by its key.
Missed = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Omissions:
    """The parameters that an update leaves as they are, and those that earlier ones did."""

    unused: frozenset[str] = frozenset()
    #: Before this update.
    missed: Missed = field(default_factory=dict)

    def after(self) -> Missed:
        """Return what is missed after the update."""
        if not self.unused:
            return self.missed
        counted = {key: self.missed.get(key, 0) + 1 for key in self.unused}
        return dict(sorted({**self.missed, **counted}.items()))

    def of(self, key: str) -> tuple[bool, int]:
        """Return whether the update leaves the parameter out, and how many before it did."""
        return key in self.unused, self.missed.get(key, 0)


NO_OMISSIONS = Omissions()


@dataclass(frozen=True, slots=True)
class Parameters:
    """The keys of a model's parameters: `LAYER.NAME`, of a shared one in its first layer."""

    #: In the order of each layer's layout.
    by_layer: tuple[tuple[str, ...], ...]
    #: Each once, in the order in which votes have them.
    keys: tuple[str, ...]

    def unused(self, used: Iterable[bool]) -> frozenset[str]:
        """Return the keys that are not `used`, given in the order of `keys`."""
        return frozenset(key for key, one in zip(self.keys, used, strict=True) if not one)


def parameters_of(job: JobSpec) -> Parameters:
    """Return the parameters that a step of `job` may leave out: none of a built-in model."""
    return _parameters(job.model, job.training.optimizer.no_decay)


@lru_cache(maxsize=4)
def _parameters(model: AnyModel, no_decay: tuple[str, ...]) -> Parameters:
    if not isinstance(model, OwnModelSpec):
        return Parameters(((),) * model.layer_count, ())
    by_layer = []
    for layer in range(model.layer_count):
        shared = model.description.shared(layer)
        names = [
            span.name.removeprefix("module.") for span in layout(model, layer, no_decay).parameters
        ]
        places = [shared.get(name, (layer, name)) for name in names]
        by_layer.append(tuple(f"{first}.{name}" for first, name in places))
    return Parameters(tuple(by_layer), tuple(dict.fromkeys(chain.from_iterable(by_layer))))
