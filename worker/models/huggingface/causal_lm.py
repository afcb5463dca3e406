"""Any causal language model of transformers whose decoder layers are a chain, as layers.

The family's own classes compute: layer 0 is its base model without decoder layers and final norm,
then comes each of its decoder layers, and the last layer is its final norm under its own head. Only
hidden states travel between layers; masks and rotary tables are made anew where they are needed
(`unsplit`).
"""

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oobleck.model import Model, Tensors
from oobleck.planner.job.lora import LoraSpec
from oobleck.worker.models.compiled import Prepared
from oobleck.worker.models.huggingface import pretrained
from oobleck.worker.models.huggingface.architecture import Architecture, choose, configuration
from oobleck.worker.models.huggingface.balancing import (
    Balance,
    balance_of,
    balancing_losses,
    recorded,
    routing_sums,
)
from oobleck.worker.models.huggingface.lora import adapt, choose_adapters
from oobleck.worker.models.huggingface.unsplit import fill, front, handed, no_mask, take_apart
from oobleck.worker.runtime.errors import JobError

#: What a layer calls the part of transformers that it has.
_PART = "part."
#: Targets that are not counted, as in transformers.
_IGNORED = -100


def causal_lm(
    architecture: str | None = None,
    config: Mapping[str, Any] | None = None,
    weights: str | None = None,
    *,
    sequence_length: int,
    lora: Mapping[str, Any] | None = None,
) -> Model:
    """The model `architecture`, such as `Qwen3ForCausalLM`, as transformers computes it.

    `config` has keys of its config class; what is left out is transformers' default. `weights` is a
    directory as `save_pretrained` writes it: what `config` does not say and the architecture come
    from its config.json, initial weights from its safetensors. Without it, weights are drawn as
    transformers draws them. Rows are full: there is no padding.

    Layer 0 takes ids (b, T). The loss is the mean cross entropy over all tokens of the global
    batch, those with target -100 left out. Where the config has `output_router_logits: true`, the
    load-balancing loss of the experts is added times `router_aux_loss_coef`, of each row by itself:
    what transformers adds for a batch of that row alone, with the weight of the row's tokens. What
    it needs travels with the hidden states, as (b, 2, experts).

    With `lora`, keys of peft's LoraConfig, adapters on the linear layers that it names are trained,
    and nothing else.

    Raises JobError, a ValueError, with the key at fault and the fix.
    """
    chosen = choose(architecture, config, weights)
    found = configuration(chosen)
    most = getattr(found, "max_position_embeddings", None)
    if isinstance(most, int) and 0 < most < sequence_length:
        raise JobError(
            f"model.sequence_length: {sequence_length} is beyond the config's "
            f"max_position_embeddings {most}; shorten it, or set that key"
        )
    parts = take_apart(chosen, torch.get_default_dtype())
    last = len(parts.layers) + 1
    if weights is not None:
        for number in range(last + 1):
            pretrained.check(chosen, foreign_names(chosen, number))
    adapters = None if lora is None else choose_adapters(chosen, lora)
    balance = balance_of(chosen) or Balance(0.0, 0, ())
    return Model(
        layers=[partial(build, chosen, number, adapters) for number in range(last + 1)],
        loss=partial(row_losses, coefficient=balance.coefficient, chosen=balance.chosen),
        # What is frozen is the same in both anyway.
        tied=[]
        if adapters
        else [(f"0.{_PART}{ours}", f"{last}.{_PART}{theirs}") for ours, theirs in _tied(chosen)],
    )


def build(architecture: Architecture, number: int, lora: LoraSpec | None = None) -> nn.Module:
    """One layer, with its initial weights; on the meta device without."""
    last = len(take_apart(architecture, torch.get_default_dtype()).layers) + 1
    layer: nn.Module
    if number == 0:
        layer = Embedding(architecture)
    else:
        layer = Head(architecture) if number == last else Block(architecture, number - 1)
    if lora is not None:
        adapt(layer, _prefix(architecture, number), lora)
    return layer


def foreign_names(architecture: Architecture, number: int) -> dict[str, str]:
    """By the name that layer `number` gives a parameter or a kept buffer: transformers' name in the
    state of the whole model, which is what `from_pretrained` understands."""
    with torch.device("meta"):
        layer = build(architecture, number)
    prefix = _prefix(architecture, number)
    return {name: prefix + name.removeprefix(_PART) for name in layer.state_dict()}


def _prefix(architecture: Architecture, number: int) -> str:
    """What the names of the layer's modules begin with in the whole model."""
    parts = take_apart(architecture, torch.get_default_dtype())
    block = 0 < number <= len(parts.layers)
    return f"{parts.prefix}{parts.name}.{number - 1}." if block else ""


class Embedding(nn.Module):
    """Ids (b, T) to what the first decoder layer takes, (b, T, hidden)."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        parts = take_apart(architecture, torch.get_default_dtype())
        # Under its name in the whole model, so that its parameters are called as there.
        self.part = nn.ModuleDict({parts.prefix[:-1]: front(parts)})
        _fill(self, architecture, parts.base, foreign="")

    def forward(self, ids: Tensor) -> Tensor:
        (base,) = self.part.values()
        mask = no_mask(ids.device)
        embedded: Tensor = base(input_ids=ids, attention_mask=mask, use_cache=False)[0]
        return embedded


class Block(Prepared):
    """One decoder layer: hidden states (b, T, hidden) to the same, or both with routing sums."""

    def __init__(self, architecture: Architecture, index: int) -> None:
        super().__init__()
        self._architecture = architecture
        self._index = index
        balance = balance_of(architecture)
        self._recorders, self._chosen = (balance.recorders, balance.chosen) if balance else ((), 0)
        parts = take_apart(architecture, torch.get_default_dtype())
        self.part = copy.deepcopy(parts.layers[index])
        _fill(self, architecture, parts.base, foreign=f"{parts.prefix}{parts.name}.{index}.")

    def prepare(self, x: Tensors) -> Any:
        hidden, sums = x if isinstance(x, tuple) else (x, None)
        layers = handed(self._architecture, hidden.shape[1], hidden.device, hidden.dtype)
        extra = layers[self._index].to(len(hidden))
        return hidden, sums, extra.positional, extra.named

    def compute(self, prepared: Any) -> Tensors:
        hidden, sums, positional, named = prepared
        logits: list[Tensor] = []
        with recorded(self.part, self._recorders, logits):
            out = self.part(hidden, *positional, **named)
        out = out[0] if isinstance(out, tuple) else out
        for found in logits:
            added = routing_sums(found.view(len(hidden), -1, found.shape[-1]), self._chosen)
            sums = added if sums is None else sums + added
        return out if sums is None else (out, sums)


class _Normed(tuple[Tensor]):
    """What a base model gives: normed hidden states, and nothing else that a head may pass on."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


class _Tail(nn.Module):
    """A base model of which only the final norm is left."""

    def __init__(self, name: str, norm: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, norm)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Normed:
        return _Normed((self.get_submodule(self._name)(inputs_embeds),))


class Head(nn.Module):
    """Hidden states (b, T, hidden) to logits (b, T, vocabulary), beside routing sums if any."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        parts = take_apart(architecture, torch.get_default_dtype())
        base = parts.base
        tail = _Tail(parts.norm, getattr(base, parts.norm))
        # The whole model with that in the place of its base model, which is not copied.
        self.part = copy.deepcopy(parts.model, {id(base): copy.deepcopy(tail)})
        _fill(self, architecture, parts.model, foreign="")

    def forward(self, x: Tensors) -> Tensors:
        hidden, sums = x if isinstance(x, tuple) else (x, None)
        # No logits of routers are asked for: those that are needed came along.
        options = {} if sums is None else {"output_router_logits": False}
        logits = self.part(inputs_embeds=hidden, use_cache=False, **options).logits
        return logits if sums is None else (logits, sums)


def row_losses(
    output: Tensors, targets: Tensor, *, coefficient: float = 0.0, chosen: int = 0
) -> tuple[Tensor, Tensor]:
    """Sums over the tokens of each row, and how many are counted: see `causal_lm`."""
    logits, sums = output if isinstance(output, tuple) else (output, None)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(
        wide.flatten(0, 1), targets.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    rows, counted = losses.view(targets.shape).sum(1), (targets != _IGNORED).sum(1)
    if sums is not None:
        rows = rows + counted * coefficient * balancing_losses(sums, chosen)
    return rows, counted


def _tied(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Names in the whole model: of the parameter in front, and of the one in the head."""
    parts = take_apart(architecture, torch.get_default_dtype())
    for theirs, ours in parts.model.get_expanded_tied_weights_keys().items():
        yield ours, theirs


def _fill(layer: nn.Module, architecture: Architecture, owner: Any, foreign: str) -> None:
    """The layer's initial weights, where it is not built on the meta device."""
    device = torch.empty(0).device
    if device.type == "meta":
        return
    if architecture.weights is not None:
        names = {name: foreign + name.removeprefix(_PART) for name in layer.state_dict()}
        pretrained.load(layer, architecture, names, device)
    fill(layer, architecture, owner, device)
