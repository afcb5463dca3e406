"""Initial weights of any model of transformers, from a directory that it saved.

Files may hold tensors under other names, or in other pieces, than the model: one per expert where
the model has one of all. transformers has a list of such conversions for each family; they are
looked up and run here for the tensors of one layer.
"""

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from oobleck.host.storage.weight_files import WeightFiles
from oobleck.worker.models.huggingface.architecture import Architecture
from oobleck.worker.models.huggingface.unsplit import take_apart
from oobleck.worker.models.registry import DTYPES, check_as_begun, read_tensor, weight_files
from oobleck.worker.models.tree import cached
from oobleck.worker.runtime.errors import JobError


@dataclass(slots=True)
class _Source:
    """Source of one or more parameters."""

    #: Converter of the tensors; None: one tensor as it is.
    converter: WeightConverter | None = None
    #: Names in the files, by the converter's pattern, in transformers' order.
    keys: dict[str, list[str]] = field(default_factory=dict)


def check(architecture: Architecture, names: Mapping[str, str]) -> None:
    """Check by headers that the files have all parameters among `names`. Raises JobError."""
    files = _files(architecture)
    sources, model = _sources(architecture), _state(architecture)
    for full in names.values():
        source = sources.get(_stored_name(architecture, full))
        if source is None and full in _parameters(architecture):
            if _begins_anew(architecture, full):
                continue
            raise JobError(
                f"model.weights: {files.directory} has no tensor {full}; give weights of "
                f"{architecture.name}, or correct the config"
            )
        for key in [] if source is None else chain.from_iterable(source.keys.values()):
            tensor = files.tensors[key]
            if tensor.dtype not in DTYPES and model[full].is_floating_point():
                raise JobError(
                    f"model.weights: {tensor.path} has {key} as {tensor.dtype}, as quantised "
                    f"models do; give weights of type {', '.join(DTYPES)}"
                )
            if source is not None and source.converter is None:
                _check_shape(key, full, tensor.shape, tuple(model[full].shape))


def stored(
    architecture: Architecture, full: str, trained: Collection[str]
) -> list[tuple[str, str]]:
    """Return the tensors of an export for the whole model's parameter `full`: pairs of the name in
    the export and the name in the files. If the files have it in pieces, return these: transformers
    makes the parameter from them again. Raises JobError, also if the pieces make one of the
    `trained` parameters too."""
    sources = _sources(architecture)
    source = sources.get(full)
    if source is None:
        return []
    keys = list(chain.from_iterable(source.keys.values()))
    if source.converter is None:
        return [(full, key) for key in keys]
    both = [name for name, other in sources.items() if other is source and name in trained]
    if both:
        raise JobError(
            f"model.weights: {keys[0]} has {full}, which is not trained, together with {both[0]}, "
            "which is, and an export could not have the one alone; save the model anew: "
            "from_pretrained(DIR).save_pretrained(NEW, save_original_format=False)"
        )
    return [(key, key) for key in keys]


def _begins_anew(architecture: Architecture, full: str) -> bool:
    """Return whether weights saved for another task may lack the parameter, which is then drawn: as
    in `from_pretrained`, one of a classifier's head or its pooler."""
    parts = _whole(architecture)
    pooler = parts.pooler and full.startswith(f"{parts.prefix}{parts.pooler}.")
    classifies = architecture.task in ("token", "sequence", "image")
    return classifies and bool(pooler or not full.startswith(parts.prefix))


@torch.no_grad()
def load(
    layer: nn.Module, architecture: Architecture, names: Mapping[str, str], device: torch.device
) -> None:
    """Give the parameters of `layer` their values, each under its name in the whole model, and mark
    them as transformers does. Buffers that the files lack stay. Raises JobError, NodeError."""
    sources = _sources(architecture)
    found: dict[str, Tensor] = {}
    #: New tensors by the old one's id: the layer may have a parameter under two names.
    loaded: dict[int, Tensor] = {}
    state = layer.state_dict(keep_vars=True)
    for name, full in names.items():
        stored = _stored_name(architecture, full)
        if stored not in sources:
            continue
        if stored not in found:
            found.update(_read(architecture, stored, sources[stored]))
        old = state[name]
        _check_shape(stored, full, tuple(found[stored].shape), tuple(old.shape))
        if id(old) not in loaded:
            new: Tensor = found[stored].to(device, old.dtype, copy=True)
            if isinstance(old, nn.Parameter):
                new = nn.Parameter(new, old.requires_grad)
            new._is_hf_initialized = True  # type: ignore[attr-defined]
            loaded[id(old)] = new
        new = loaded[id(old)]
        owner, _, own = name.rpartition(".")
        kept = layer.get_submodule(owner)
        if isinstance(new, nn.Parameter):
            kept._parameters[own] = new
        else:
            kept._buffers[own] = new
    tensors = _files(architecture).tensors
    used = [sources[one] for one in found if one in sources]
    keys = chain.from_iterable(chain.from_iterable(source.keys.values()) for source in used)
    check_as_begun(tensors[key] for key in keys)


def _check_shape(key: str, full: str, has: tuple[int, ...], needs: tuple[int, ...]) -> None:
    if has != needs:
        raise JobError(
            f"model.weights: {key} is {list(has)}, and the model needs {list(needs)} for {full}; "
            "correct the config, or leave it out for that of the directory"
        )


def _files(architecture: Architecture) -> WeightFiles:
    assert architecture.weights is not None
    return weight_files(architecture.weights)


def _whole(architecture: Architecture) -> Any:
    return take_apart(architecture, torch.float32)


@cached(maxsize=2)
def _state(architecture: Architecture) -> dict[str, Tensor]:
    """Return the state of the whole model on the meta device."""
    parts = _whole(architecture)
    state = dict(parts.model.state_dict())
    for index, layer in enumerate(parts.layers):
        state |= layer.state_dict(prefix=f"{parts.prefix}{parts.name}.{index}.")
    return state


@cached(maxsize=2)
def _parameters(architecture: Architecture) -> frozenset[str]:
    parts = _whole(architecture)
    names = {name for name, _ in parts.model.named_parameters(remove_duplicate=False)}
    for index, layer in enumerate(parts.layers):
        prefix = f"{parts.prefix}{parts.name}.{index}."
        names |= {prefix + name for name, _ in layer.named_parameters()}
    return frozenset(names)


def _stored_name(architecture: Architecture, full: str) -> str:
    """Return the parameter's name in the files. A tied parameter has the name of the first one,
    which files have in any case."""
    tied: dict[str, str] = _whole(architecture).model.get_expanded_tied_weights_keys()
    return tied.get(full, full)


@cached(maxsize=2)
def _sources(architecture: Architecture) -> dict[str, _Source]:
    """Return the source in the files of each parameter or buffer of the whole model."""
    model, state = _whole(architecture).model, _state(architecture)
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, _Source] = {}
    for key in sorted(_files(architecture).tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = key, None
        if target not in state:
            continue
        converter = None if pattern is None else of_pattern[pattern]
        source = sources.setdefault(target, _Source(converter))
        if source.keys and (converter is None or converter is not source.converter):
            ((other, *_), *_) = source.keys.values()
            raise JobError(
                f"model.weights: {_files(architecture).directory} has {target} twice, as {other} "
                f"and as {key}; leave one of them out"
            )
        source.keys.setdefault(pattern or key, []).append(key)
    for target, source in list(sources.items()):
        for other in _further(target, source):
            sources.setdefault(other, source)
    return sources


def _further(target: str, source: _Source) -> Iterable[str]:
    """Return the parameters that the converter makes besides `target`, its first one."""
    first, *more = source.converter.target_patterns if source.converter is not None else [""]
    return [target.replace(first, name) for name in more]


def _read(architecture: Architecture, stored: str, source: _Source) -> dict[str, Tensor]:
    """Return the tensors that `source` gives, by name in the whole model."""
    files = _files(architecture)
    tensors = {
        pattern: [read_tensor(files, key) for key in keys] for pattern, keys in source.keys.items()
    }
    if source.converter is None:
        ((value,),) = tensors.values()
        return {stored: value}
    converter = copy.deepcopy(source.converter)
    for pattern, values in tensors.items():
        for key, value in zip(source.keys[pattern], values, strict=True):
            converter.add_tensor(stored, key, pattern, value)
    model = _whole(architecture).model
    made = converter.convert(stored, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
