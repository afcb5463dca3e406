"""Parameters that a step's update leaves out because, as in torch, they have no gradient.

A parameter is used in a step if any micro-batch gave it a gradient, on any worker, in any of the
layers that share it. The vote on the step lists the used ones, so every worker that commits the
step knows them. The number of steps that left out each parameter is training state, because
optimizers count the updates of each. Only a user's model can leave one out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from oobleck.core.job.model import AnyModel
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.state.layout import layout

#: Number of committed steps that left a parameter out, by key; parameters never left out are
#: absent.
Missed = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Omissions:
    """Parameters that an update leaves out, and the counts of earlier omissions."""

    unused: frozenset[str] = frozenset()
    #: Counts before this update.
    missed: Missed = field(default_factory=dict)

    def after(self) -> Missed:
        """Return the counts after the update."""
        if not self.unused:
            return self.missed
        counted = {key: self.missed.get(key, 0) + 1 for key in self.unused}
        return dict(sorted({**self.missed, **counted}.items()))

    def of(self, key: str) -> tuple[bool, int]:
        """Return whether the update leaves the parameter out, and how many earlier ones did."""
        return key in self.unused, self.missed.get(key, 0)


NO_OMISSIONS = Omissions()


@dataclass(frozen=True, slots=True)
class Parameters:
    """Keys of a model's parameters: `LAYER.NAME`; a shared one is named after its first layer."""

    #: Keys of each layer, in its layout's order.
    by_layer: tuple[tuple[str, ...], ...]
    #: All keys once, in the order of votes.
    keys: tuple[str, ...]

    def unused(self, used: Iterable[bool]) -> frozenset[str]:
        """Return the keys that are not `used`, given in the order of `keys`."""
        return frozenset(key for key, one in zip(self.keys, used, strict=True) if not one)


def parameters_of(job: JobSpec) -> Parameters:
    """Return the parameters that a step of `job` may leave out; a built-in model has none."""
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
