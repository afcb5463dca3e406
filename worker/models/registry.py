"""Registry of the modules that build each kind of model.

The adapters are loaded when one is asked for, since transformers, which they need, is optional and
takes two seconds to import.
"""

import importlib
import sys

import torch

from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec
from oobleck.worker.models import gpt, own
from oobleck.worker.models.base import Family, Layer
from oobleck.worker.runtime.errors import JobError

_ADAPTERS = f"{__package__}.adapters"
_HUGGING_FACE = f"{__package__}.huggingface.causal_lm"


def load(kind: str) -> bool:
    """Import what `kind` needs beyond this module, and return whether that brought in transformers.
    Raises ImportError where it is missing."""
    if kind in ("own", "gpt"):
        return False
    name = _HUGGING_FACE if kind == "huggingface" else _ADAPTERS
    new = name not in sys.modules
    importlib.import_module(name)
    return new


def family(spec: ModelSpec) -> Family:
    """Return the family for the kind of `spec`; raises JobError where transformers cannot be
    imported."""
    if spec.kind == "gpt":
        return gpt.FAMILY
    try:
        found: Family = importlib.import_module(_ADAPTERS).FAMILIES[spec.kind]
    except ImportError as error:
        raise JobError(
            f"model.kind: {spec.kind} needs the package transformers, which this node cannot "
            f"import ({error}); on every node: pip install 'transformers>=5.0'"
        ) from error
    return found


def build_layer(spec: AnyModel, layer: int) -> Layer:
    """Build layer number `layer` of the model on the device of the context. Its weights are not yet
    the job's initial ones."""
    last = spec.layer_count - 1
    if not 0 <= layer <= last:
        raise ValueError(f"layer {layer} is not one of 0 to {last}")
    if isinstance(spec, OwnModelSpec):
        return own.build_layer(spec, layer)
    assert isinstance(spec, ModelSpec), "there are two kinds"
    parts = family(spec)
    build = {0: parts.embedding, last: parts.head}.get(layer, parts.block)
    return build(spec, layer)


def empty_layer(spec: AnyModel, seed: int, layer: int) -> Layer:
    """Build the layer with parameters that have no memory, or only until they get another one."""
    if isinstance(spec, OwnModelSpec):
        return own.empty_layer(spec, seed, layer)
    with torch.device("meta"):
        return build_layer(spec, layer)


def tied_parameters(spec: AnyModel, layer: int) -> tuple[str, ...]:
    """Return the names of the parameters that `layer` shares with others, in one order for all."""
    if isinstance(spec, OwnModelSpec):
        return tuple(f"module.{name}" for name in spec.description.shared(layer))
    assert isinstance(spec, ModelSpec), "there are two kinds"
    found = tied_parameter(spec, layer)
    return () if found is None else (found,)


def tied_parameter(spec: ModelSpec, layer: int) -> str | None:
    """Return the name of the parameter that `layer` shares with another one; None where there is
    none."""
    if not spec.tied:
        return None
    in_embedding, in_head = family(spec).tied
    return {0: in_embedding, spec.layer_count - 1: in_head}.get(layer)
