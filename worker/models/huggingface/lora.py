"""Adapters of peft on the linear layers of a transformers model, put into each layer separately.

All else in a layer is frozen, and so a constant of the job: each holder of the layer reads it from
the initial weights. Owns which modules a job's names mean. Loads peft, which is optional, only for
jobs with adapters.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oobleck.core.job.code import Json
from oobleck.core.job.model import LoraSpec
from oobleck.host.command import nearest
from oobleck.worker.models.huggingface.architecture import Architecture
from oobleck.worker.models.huggingface.unsplit import REFUSALS, take_apart
from oobleck.worker.runtime.errors import JobError, NodeError

_PART = "part."


def choose_adapters(architecture: Architecture, keys: Mapping[str, Any]) -> LoraSpec:
    """Return the adapters that `keys` describe, for a model that has all that they name. Raises
    JobError, NodeError."""
    if architecture.task != "causal":
        raise JobError(
            f"model.lora: adapts causal language models, and {architecture.name} has a head that "
            "would stay as it was drawn; leave lora out to train all of it"
        )
    lora = LoraSpec(**{**keys, "target_modules": tuple(keys.get("target_modules", ()))})
    _peft()
    modules = dict(_modules(architecture))
    linear = sorted({name.rpartition(".")[2] for name, one in modules.items() if _is_linear(one)})
    for target in lora.target_modules:
        if target == "all-linear":
            raise JobError(
                f"model.lora.target_modules: {architecture.name} has no linear layer all-linear, "
                "peft's word for all; give them by name: "
                f"[{', '.join(_inner(architecture))}]"
            )
        meant = {name: one for name, one in modules.items() if _fits(name, target)}
        for name, one in meant.items():
            if isinstance(one, nn.Linear | Conv1D) and not _is_linear(one):
                raise JobError(
                    f"model.lora.target_modules: {target} means {name}, a {type(one).__name__}, "
                    "which does more than a linear layer, so that no adapter fits it; leave it out"
                )
        if not meant or not all(map(_is_linear, meant.values())):
            near = nearest(target, linear)
            hint = f" (did you mean {near}?)" if near else ""
            raise JobError(
                f"model.lora.target_modules: {architecture.name} has no linear layer {target}"
                f"{hint}; there are: {', '.join(linear)}"
            )
    return lora


def adapt(layer: nn.Module, prefix: str, lora: LoraSpec) -> None:
    """Put adapters into `layer`, drawn from torch's generator, and freeze all else. `prefix`: the
    beginning of its modules' names in the whole model."""
    layer.requires_grad_(False)
    meant = [
        (name, module)
        for name, module in layer.named_modules()
        if any(_fits(prefix + name.removeprefix(_PART), one) for one in lora.target_modules)
    ]
    if meant:
        transposed = any(isinstance(module, Conv1D) for _, module in meant)
        config = _config(lora, [name for name, _ in meant], transposed)
        _peft().inject_adapter_in_model(config, layer)


def adapter_config(architecture: Architecture, lora: LoraSpec) -> Json:
    """Return the config that PeftModel.from_pretrained reads."""
    transposed = any(
        isinstance(module, Conv1D)
        for name, module in _modules(architecture)
        if any(_fits(name, one) for one in lora.target_modules)
    )
    config = _config(lora, list(lora.target_modules), transposed)
    config.base_model_name_or_path = architecture.weights
    config.task_type = "CAUSAL_LM"
    config.inference_mode = True
    return Json(json.dumps(config.to_dict(), default=sorted, sort_keys=True))


def _config(lora: LoraSpec, names: list[str], transposed: bool) -> Any:
    return _peft().LoraConfig(
        target_modules=names,
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        fan_in_fan_out=transposed,
    )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise NodeError(
            f"model.lora: needs the package peft, which this machine cannot import ({error}); on "
            "every node: pip install 'peft>=0.18'"
        ) from error
    return peft


def _modules(architecture: Architecture) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules of the whole model, by their names in it."""
    parts = take_apart(architecture, torch.get_default_dtype())
    yield from parts.model.named_modules()
    for index, layer in enumerate(parts.layers):
        yield from layer.named_modules(prefix=f"{parts.prefix}{parts.name}.{index}")


def _inner(architecture: Architecture) -> list[str]:
    """Return the last name parts of linear layers that peft's `all-linear` means: not the head."""
    parts = take_apart(architecture, torch.get_default_dtype())
    modules = [module for layer in parts.layers for module in layer.named_modules()]
    return sorted({name.rpartition(".")[2] for name, one in modules if _is_linear(one)})


def _fits(name: str, target: str) -> bool:
    """Return whether `target` means the module `name`, by peft's rule."""
    return name == target or name.endswith(f".{target}")


def _is_linear(module: nn.Module) -> bool:
    """Return whether an adapter's result can be added to what the module gives: some routers are
    linear layers by their class alone."""
    if not isinstance(module, nn.Linear | Conv1D):
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    width, made = (
        (module.nx, module.nf) if isinstance(module, Conv1D) else module.weight.shape[::-1]
    )
    try:
        with torch.no_grad():
            given = module(module.weight.new_empty(1, 2, width))
    except REFUSALS:
        return False
    return isinstance(given, Tensor) and given.shape == (1, 2, made)
