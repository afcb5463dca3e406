"""The models: each a row of layers, the units of placement and state.

Layer 0 is the embedding, the last one the head, between them the blocks. Owns what a layer computes
and its initial weights, one module per family; knows nothing of stages, flat state or plans.
"""

from oobleck.planner.job.spec import ModelSpec
from oobleck.worker.models.base import Layer
from oobleck.worker.models.initial import check_weights, load_parameters
from oobleck.worker.models.registry import build_layer, family, tied_parameter

__all__ = ["Layer", "build_layer", "check_weights", "initialise_parameters", "tied_parameter"]


def initialise_parameters(module: Layer, spec: ModelSpec, seed: int) -> None:
    """Give `module` its initial weights: those of the files that `spec` names, else a function of
    (spec, seed, layer) alone."""
    if spec.weights is None:
        tied = tied_parameter(spec, module.layer)
        family(spec).initialise(module, spec, seed, tied)
    else:
        load_parameters(module, spec)
