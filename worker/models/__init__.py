"""The models: each a row of layers, the units of placement and state.

Layer 0 is the embedding, the last one the head, between them the blocks. Owns what a layer
computes and how it begins, one module per family; knows nothing of stages, flat state, devices of
others or plans.
"""

from oobleck.worker.models.base import Layer
from oobleck.worker.models.registry import build_layer, initialise_parameters, tied_parameter

__all__ = ["Layer", "build_layer", "initialise_parameters", "tied_parameter"]
