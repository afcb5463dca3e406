"""The models: each a row of layers, the units of placement and state.

Layer 0 is the embedding, the last one the head, between them the blocks. Owns what a layer computes
and its initial weights, one module per family; knows nothing of stages, flat state or plans.
"""

from collections.abc import Mapping

from torch import Tensor

from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.core.job.own import OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.worker.models import own
from oobleck.worker.models.base import Layer, place_parameters
from oobleck.worker.models.initial import check_weights, load_parameters
from oobleck.worker.models.registry import (
    build_layer,
    empty_layer,
    family,
    tied_parameter,
    tied_parameters,
)

__all__ = [
    "Layer",
    "build_layer",
    "check_code",
    "check_weights",
    "empty_layer",
    "initial_values",
    "initialise_parameters",
    "place_parameters",
    "tied_parameters",
]


def check_code(job: JobSpec) -> None:
    """Check that the model's code, if it is the user's, is here what it was where the job was
    submitted. Raises NodeError, JobError."""
    if isinstance(job.model, OwnModelSpec):
        own.check_code(job)


def initial_values(module: Layer) -> dict[str, Tensor]:
    """The initial weights of an empty layer that was built with them; none of any other."""
    return own.values(module) if isinstance(module, own.OwnLayer) else {}


def initialise_parameters(
    module: Layer, spec: AnyModel, seed: int, begun: Mapping[str, Tensor] | None = None
) -> None:
    """Give `module` its initial weights: those of the files that `spec` names, else a function of
    (spec, seed, layer) alone. `begun`: its `initial_values`, if it has any."""
    if isinstance(spec, OwnModelSpec):
        assert isinstance(module, own.OwnLayer), "it was built from the same spec"
        own.initialise(module, spec, seed, begun)
        return
    assert isinstance(spec, ModelSpec), "there are two kinds"
    if spec.weights is None:
        tied = tied_parameter(spec, module.layer)
        family(spec).initialise(module, spec, seed, tied)
    else:
        load_parameters(module, spec)
