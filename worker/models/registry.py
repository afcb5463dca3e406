"""Construction of layers: the module that builds each kind of model, and initial weights.

The adapters are loaded when one is asked for, since transformers, which they need, is optional and
takes two seconds to import.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oobleck.core.job.families import family_of
from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec
from oobleck.host.storage.export import foreign_name
from oobleck.host.storage.weight_files import (
    StoredTensor,
    WeightFiles,
    WeightsError,
    check_unchanged,
    open_weights,
)
from oobleck.worker.models import gpt, own
from oobleck.worker.models.base import Family, Layer
from oobleck.worker.models.tree import cached
from oobleck.worker.runtime.errors import JobError, NodeError

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
            f"model.kind: {spec.kind} needs the package transformers, which this machine cannot "
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
    """Build the layer with parameters that have no memory, or memory that is to be replaced."""
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


# ---- Initial weights of a layer: drawn, kept from its building, or read from safetensors.
#
# Owns the names that a parameter may have in a file; `oobleck.host.storage.weight_files` finds
# the files. A layer reads its own tensors alone, memory-mapped.


#: Types that weights are computed with; other types have a meaning only with a scale.
DTYPES = ("F64", "F32", "F16", "BF16")
#: Names of norms in the first BERT checkpoints.
_FORMER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


def initial_values(module: Layer) -> dict[str, Tensor]:
    """Return the initial weights of an empty layer that was built with them; none of any other."""
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
        _load_parameters(module, spec)


@cached(maxsize=2)
def weight_files(directory: str) -> WeightFiles:
    """Open the files by `open_weights`, once. Raises JobError."""
    try:
        return open_weights(directory)
    except WeightsError as error:
        raise JobError(f"model.weights: {error}") from error


def check_as_begun(read: Iterable[StoredTensor]) -> None:
    """Check that the tensors a layer was read from are those that all nodes began with. Raises
    NodeError."""
    try:
        check_unchanged(read)
    except WeightsError as error:
        raise NodeError(f"model.weights: {error}") from error


def check_weights(spec: AnyModel) -> bytes:
    """Check that the files have every parameter of the model in its shape; return their
    fingerprint.

    The fingerprint is empty where the model has no files. Raises JobError with the tensor and the
    fix.
    """
    if spec.initial is None:
        return b""
    files = weight_files(spec.initial)
    if not isinstance(spec, ModelSpec):
        return files.fingerprint  # its own code has looked for the tensors
    for number in range(spec.layer_count):
        with torch.device("meta"):
            layer = build_layer(spec, number)
        for name, parameter in layer.named_parameters():
            _find(files, spec, number, name, tuple(parameter.shape))
    return files.fingerprint


@torch.no_grad()
def _load_parameters(module: Layer, spec: ModelSpec) -> None:
    """Fill `module` from the files, in its own precision. Raises JobError, NodeError."""
    assert spec.weights is not None
    files = weight_files(spec.weights)
    read: list[StoredTensor] = []
    for name, parameter in module.named_parameters():
        key, tensor = _find(files, spec, module.layer, name, tuple(parameter.shape))
        parameter.copy_(read_tensor(files, key))
        read.append(tensor)
        if name == tied_parameter(spec, module.layer):
            _check_alike(files, key, foreign_name(spec, module.layer, name))
    check_as_begun(read)


def _check_alike(files: WeightFiles, used: str, own: str) -> None:
    """Raise JobError where a tied parameter is in the files twice, with two values."""
    if own == used or own not in files.tensors:
        return
    if not torch.equal(read_tensor(files, own), read_tensor(files, used)):
        raise JobError(
            f"model.weights: {files.directory} has other values under {own} than under {used}, "
            "and the model ties them; set model.tied to false"
        )


def read_tensor(files: WeightFiles, key: str) -> Tensor:
    """Read one tensor of `files`. Raises NodeError: other nodes may have the file whole."""
    path = files.tensors[key].path
    try:
        with safe_open(path, framework="pt") as file:
            found: Tensor = file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise NodeError(
            f"model.weights: {path}: cannot read {key}: {error}; copy it to this machine anew"
        ) from error
    return found


def _find(
    files: WeightFiles, spec: ModelSpec, layer: int, name: str, shape: tuple[int, ...]
) -> tuple[str, StoredTensor]:
    """Return the key in the files of a parameter of that shape, and where it is. Raises
    JobError."""
    names = list(_names(spec, layer, name))
    key = next((key for key in names if key in files.tensors), None)
    if key is None:
        raise JobError(
            f"model.weights: {files.directory} has no tensor {names[0]}; give weights of the "
            f"same kind as the model ({spec.kind}), or correct the config"
        )
    tensor = files.tensors[key]
    if tensor.shape != shape:
        raise JobError(
            f"model.weights: {tensor.path} has {key} as {list(tensor.shape)}, and the model "
            f"needs {list(shape)}; correct the config, or leave it out for that of the directory"
        )
    if tensor.dtype not in DTYPES:
        raise JobError(
            f"model.weights: {tensor.path} has {key} as {tensor.dtype}, as quantised models do; "
            f"give weights of type {', '.join(DTYPES)}"
        )
    return key, tensor


def _names(spec: ModelSpec, layer: int, name: str) -> Iterator[str]:
    """Yield the names that the parameter may have in a checkpoint, the usual one first."""
    chosen = [foreign_name(spec, layer, name)]
    tied = tied_parameter(spec, 0)
    if layer and tied is not None and name == tied_parameter(spec, layer):
        # The embedding's name comes first: both copies must begin alike, whatever a file has under
        # the head's name.
        chosen.insert(0, foreign_name(spec, 0, tied))
    if chosen[-1] == "cls.predictions.decoder.bias":
        chosen.append("cls.predictions.bias")
    family = family_of(spec.kind)
    assert family is not None, "only a family has files of weights"
    prefix = family.base_prefix
    for full in chosen:
        yield full
        if full.startswith(prefix):
            yield full.removeprefix(prefix)
        for new, old in _FORMER.items():
            if full.endswith(new):
                yield full.removesuffix(new) + old
