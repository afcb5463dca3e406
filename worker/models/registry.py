"""Which module builds which kind of model.

A family is a module with `build_layer`, `tied_parameter` and `initialise_parameters` as here.
"""

from typing import Protocol

from oobleck.planner.job import ModelSpec
from oobleck.worker.models import gpt
from oobleck.worker.models.base import Layer


class Family(Protocol):
    """What a family's module has."""

    def build_layer(self, spec: ModelSpec, layer: int) -> Layer: ...

    def tied_parameter(self, spec: ModelSpec, layer: int) -> str | None: ...

    def initialise_parameters(self, module: Layer, spec: ModelSpec, seed: int) -> None: ...


def family(spec: ModelSpec) -> Family:
    """The module for the kind of `spec`."""
    match spec.kind:
        case "gpt":
            return gpt


def build_layer(spec: ModelSpec, layer: int) -> Layer:
    """Layer number `layer` of the model; its weights are not yet the job's initial ones."""
    if not 0 <= layer < spec.layer_count:
        raise ValueError(f"layer {layer} is not one of 0 to {spec.layer_count - 1}")
    return family(spec).build_layer(spec, layer)


def tied_parameter(spec: ModelSpec, layer: int) -> str | None:
    """Name of the parameter that `layer` shares with another one; None where there is none."""
    return family(spec).tied_parameter(spec, layer)


def initialise_parameters(module: Layer, spec: ModelSpec, seed: int) -> None:
    """Give `module` its initial weights: a function of (spec, seed, layer) alone."""
    family(spec).initialise_parameters(module, spec, seed)
