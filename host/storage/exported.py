"""Layers under the names and in the forms of transformers: the contents of an exported checkpoint.

Pure: names, shapes and numpy arrays. The built-in model is exported as GPT-2, whose layers are the
same except that biases are zeros and some weights are transposed.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oobleck.core.job.families import GPT2, decode_config, family_of
from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec

Array = NDArray[Any]

#: Parts of the built-in block under GPT-2's names.
_GPT_PARTS = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
#: Prefix of all parameter names in the layers of a model of transformers.
_PART = "module.part."
#: Tensors that transformers omits from a file where they are tied.
_TIED = frozenset({"lm_head.weight", "cls.predictions.decoder.weight"})


def foreign_name(spec: ModelSpec, layer: int, name: str) -> str:
    """Return transformers' name of parameter `name` of `layer`."""
    family = family_of(spec.kind)
    if family is None:
        return _gpt(spec, layer, name)
    return family.foreign_name(layer, name, tied=spec.tied)


def _gpt(spec: ModelSpec, layer: int, name: str) -> str:
    owner, _, kind = name.rpartition(".")
    if layer == 0:
        return f"transformer.{'wte' if owner == 'token' else 'wpe'}.weight"
    if layer == spec.layer_count - 1:
        return "lm_head.weight" if owner == "token" else f"transformer.ln_f.{kind}"
    return f"transformer.h.{layer - 1}.{_GPT_PARTS[owner]}.{kind}"


def to_hugging_face(spec: ModelSpec, layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of `layer`, given by our names, as transformers' checkpoint has them.

    The head's copy of a tied weight is left out. `from_pretrained` loads all layers together with
    `hugging_face_config`.
    """
    found: dict[str, Array] = {}
    for name, value in tensors.items():
        foreign = foreign_name(spec, layer, name)
        if spec.tied and foreign in _TIED:
            continue
        matrix = ".attn." in foreign or ".mlp." in foreign
        if spec.kind == "gpt" and matrix:
            found[foreign] = np.ascontiguousarray(value.T)
            bias = foreign.removesuffix("weight") + "bias"
            found[bias] = np.zeros(value.shape[0], dtype=value.dtype)
        else:
            found[foreign] = value
    return found


def exported(spec: AnyModel, layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of `layer`, given by our names, as an export of the model has them."""
    if isinstance(spec, ModelSpec):
        return to_hugging_face(spec, layer, tensors)
    assert isinstance(spec, OwnModelSpec), "there are two kinds"
    foreign, last = spec.description.foreign, spec.layer_count - 1
    if foreign is None:
        return by_layer(layer, tensors)
    shared = spec.description.shared(layer)
    tied = {f"module.{name}" for name, (first, _) in shared.items() if layer != first}
    prefix = f"{foreign.blocks}{layer - 1}." if 0 < layer < last else ""
    found = {
        prefix + name.removeprefix(_PART): value
        for name, value in tensors.items()
        if name not in tied
    }
    if foreign.adapters:
        return {_of_adapter(name): value for name, value in found.items()}
    return found


def _of_adapter(name: str) -> str:
    """Return peft's name of the tensor in a file: without the name of the adapter."""
    for matrix in ("lora_A", "lora_B"):
        name = name.replace(f".{matrix}.default.", f".{matrix}.")
    return f"base_model.model.{name}"


def has_adapters(spec: AnyModel) -> bool:
    """Return whether an export has adapters of peft instead of a model."""
    return isinstance(spec, OwnModelSpec) and spec.lora is not None


def exported_config(spec: AnyModel) -> dict[str, Any] | None:
    """Return the export's config; None where transformers does not know the model."""
    if isinstance(spec, ModelSpec):
        return hugging_face_config(spec)
    assert isinstance(spec, OwnModelSpec), "there are two kinds"
    foreign = spec.description.foreign
    return None if foreign is None else dict(json.loads(foreign.config))


def by_layer(layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of a user's layer, named as in an nn.Sequential of the layers."""
    return {f"{layer}.{name.removeprefix('module.')}": value for name, value in tensors.items()}


def hugging_face_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of the model as transformers reads it."""
    keys = _gpt_config(spec) if spec.kind == "gpt" else decode_config(spec.config)
    family = family_of(spec.kind) or GPT2
    return {
        "model_type": family.kind,
        "architectures": [family.architecture],
        # BERT pads with token 0 by default.
        **{name: v for name, v in keys.items() if v is not None or name == "pad_token_id"},
    }


def _gpt_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocabulary,
        "n_positions": spec.sequence_length,
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "activation_function": "gelu",
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }
