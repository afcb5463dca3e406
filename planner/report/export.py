"""Layers under the names and in the forms of transformers: what an exported checkpoint holds.

Pure: names, shapes and numpy arrays. The built-in model goes as GPT-2, whose layers are the same
but for biases, which it has as zeros, and for weights that it keeps transposed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oobleck.planner.job.families import decode_config
from oobleck.planner.job.spec import ModelSpec

Array = NDArray[Any]

_ARCHITECTURES = {
    "gpt": "GPT2LMHeadModel",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
}
#: The built-in block's parts under GPT-2's names.
_GPT_PARTS = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
#: What transformers leaves out of a file where it is tied.
_TIED = frozenset({"lm_head.weight", "cls.predictions.decoder.weight"})


def foreign_name(spec: ModelSpec, layer: int, name: str) -> str:
    """transformers' name of parameter `name` of `layer`."""
    match spec.kind:
        case "gpt":
            return _gpt(spec, layer, name)
        case "gpt2":
            if name.startswith("lm_head."):
                return name
            return _numbered(layer, name, "transformer.h") or f"transformer.{name}"
        case "llama":
            if name.startswith("lm_head."):
                return name
            return _numbered(layer, name, "model.layers") or f"model.{name}"
        case "bert":
            return _numbered(layer, name, "bert.encoder.layer") or _bert(spec, layer, name)


def _numbered(layer: int, name: str, prefix: str) -> str | None:
    """Of a block's parameter; None of another's."""
    inner = name.removeprefix("block.")
    return None if inner == name else f"{prefix}.{layer - 1}.{inner}"


def _gpt(spec: ModelSpec, layer: int, name: str) -> str:
    owner, _, kind = name.rpartition(".")
    if layer == 0:
        return f"transformer.{'wte' if owner == 'token' else 'wpe'}.weight"
    if layer == spec.layer_count - 1:
        return "lm_head.weight" if owner == "token" else f"transformer.ln_f.{kind}"
    return f"transformer.h.{layer - 1}.{_GPT_PARTS[owner]}.{kind}"


def _bert(spec: ModelSpec, layer: int, name: str) -> str:
    if layer == 0:
        return f"bert.embeddings.{name}"
    # transformers ties the decoder's bias too, to a parameter that has no other use.
    own = spec.tied and name == "decoder.bias"
    return "cls.predictions.bias" if own else f"cls.predictions.{name}"


def to_hugging_face(spec: ModelSpec, layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The parameters of `layer`, by our names, as transformers' checkpoint of the model has them.

    The head's copy of a tied weight is left out. All layers together, with `hugging_face_config`,
    are what `from_pretrained` loads.
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


def hugging_face_config(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of the model as transformers reads it."""
    model_type = "gpt2" if spec.kind == "gpt" else spec.kind
    keys = _gpt_config(spec) if spec.kind == "gpt" else decode_config(spec.config)
    return {
        "model_type": model_type,
        "architectures": [_ARCHITECTURES[spec.kind]],
        # BERT pads with token 0 where nothing is said.
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
