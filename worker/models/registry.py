"""Which module builds which kind of model.

A family is a module with the functions of `Family`. Those of Hugging Face are loaded when they are
asked for: transformers is optional, and takes two seconds to import.
"""

import importlib
import sys
from typing import Protocol

from oobleck.planner.families import FAMILIES
from oobleck.planner.job import ModelSpec
from oobleck.worker.errors import ModelError
from oobleck.worker.models import gpt
from oobleck.worker.models.base import Layer


class Family(Protocol):
    """What a family's module has."""

    def build_layer(self, spec: ModelSpec, layer: int) -> Layer: ...

    def tied_parameter(self, spec: ModelSpec, layer: int) -> str | None: ...

    def initialise_parameters(self, module: Layer, spec: ModelSpec, seed: int) -> None: ...


def load(kind: str) -> bool:
    """Import what `kind` needs; whether that was new. Raises ImportError where it is missing."""
    name = f"{__package__}.{kind}"
    if kind not in FAMILIES or name in sys.modules:
        return False
    importlib.import_module(name)
    return True


def family(spec: ModelSpec) -> Family:
    """The module for the kind of `spec`; raises ModelError where it cannot be imported."""
    try:
        match spec.kind:
            case "gpt":
                return gpt
            case "gpt2":
                from oobleck.worker.models import gpt2

                return gpt2
            case "llama":
                from oobleck.worker.models import llama

                return llama
            case "bert":
                from oobleck.worker.models import bert

                return bert
    except ImportError as error:
        raise ModelError(
            f"model.kind: {spec.kind} needs the package transformers, which this node cannot "
            f"import ({error}); on every node: pip install 'oobleck[huggingface]'"
        ) from error


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
