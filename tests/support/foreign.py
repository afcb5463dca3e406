"""Unsplit models of transformers, to compare ours with: the same config, the same weights."""

from collections.abc import Sequence
from functools import partial

import torch
import transformers
from torch import Tensor, nn

from oobleck.core.job.family import decode_config
from oobleck.core.job.model import ModelSpec
from oobleck.host.storage.export import foreign_name
from oobleck.worker.models.base import Layer
from oobleck.worker.models.registry import tied_parameter
from support.families import family_model

TINY = {
    "gpt2": {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4},
    "llama": {
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
    },
    "bert": {
        "vocab_size": 64,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 24,
        "max_position_embeddings": 16,
        "mask_token_id": 63,
    },
}
DROPOUTS = {
    "gpt2": ("resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "llama": ("attention_dropout",),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
CLASSES = {
    "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "bert": (transformers.BertConfig, transformers.BertForMaskedLM),
}


def spec(kind: str, *, sequence_length: int, dropout: float = 0.0, **config: object) -> ModelSpec:
    """A tiny model of that kind; further keys go to its config."""
    dropouts = dict.fromkeys(DROPOUTS[kind], dropout)
    return family_model(kind, {**TINY[kind], **dropouts, **config}, sequence_length=sequence_length)


def fresh(spec: ModelSpec) -> nn.Module:
    """transformers' own model, as it begins there."""
    config_class, model_class = CLASSES[spec.kind]
    keys = decode_config(spec.config).items()
    return model_class(
        config_class(**{k: v for k, v in keys if v is not None or k == "pad_token_id"})
    )


def unsplit(spec: ModelSpec, layers: Sequence[Layer], *, exact: bool = True) -> nn.Module:
    """transformers' own model in float64, with the weights of `layers`.

    `exact`: with torch's own RMSNorm, since Llama's rounds to float32 whatever the precision.
    """
    model = fresh(spec).double()
    for path, module in list(model.named_modules()):
        if exact and type(module).__name__ == "LlamaRMSNorm":
            norm = nn.RMSNorm(spec.hidden, eps=module.variance_epsilon, dtype=torch.float64)
            model.set_submodule(path, norm)
    missing, unexpected = model.load_state_dict(weights(spec, layers), strict=False)
    assert not unexpected
    assert all("lm_head" in name or "decoder" in name or "bias" in name for name in missing)
    model.tie_weights()
    return model


def weights(spec: ModelSpec, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """The layers' parameters under transformers' names."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if layer.layer == 0 or name != tied_parameter(spec, layer.layer):
                found[_name(spec, layer, name)] = parameter.detach()
    return found


def gradients(spec: ModelSpec, layers: Sequence[Layer]) -> dict[str, Tensor]:
    """The layers' gradients under transformers' names, the tied one summed over both layers."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        for name, parameter in layer.named_parameters():
            tied = name == tied_parameter(spec, layer.layer)
            full = _name(spec, layers[0], tied_parameter(spec, 0)) if tied else None
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            key = full or _name(spec, layer, name)
            found[key] = found[key] + gradient if key in found else gradient
    return found


def names(spec: ModelSpec, layers: Sequence[Layer]) -> dict[str, str]:
    """transformers' names by ours, `<layer>.<parameter>`."""
    return {
        f"{layer.layer}.{name}": _name(spec, layer, name)
        for layer in layers
        for name, _ in layer.named_parameters()
    }


def freeze_key_biases(model: nn.Module) -> None:
    """Keep the rounding noise of key biases, whose true gradient is zero, out of the training."""

    def keep(gradient: Tensor, name: str) -> Tensor:
        third = len(gradient) // 3
        kept = gradient.clone()
        kept[slice(None) if name.endswith("key.bias") else slice(third, 2 * third)] = 0.0
        return kept

    for name, parameter in model.named_parameters():
        if name.endswith(("attention.self.key.bias", "attn.c_attn.bias")):
            parameter.register_hook(partial(keep, name=name))


def _name(spec: ModelSpec, layer: Layer, name: str | None) -> str:
    assert name is not None
    return foreign_name(spec, layer.layer, name)
