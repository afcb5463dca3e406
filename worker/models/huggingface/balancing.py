"""The load-balancing loss of mixtures of experts, per row.

transformers gathers the logits of all routers and averages over them. Here only two sums per row
and expert travel with the hidden states, from which each row has that loss for itself.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from oobleck.worker.models.huggingface.architecture import Architecture, configuration
from oobleck.worker.models.huggingface.unsplit import take_apart
from oobleck.worker.models.tree import cached
from oobleck.worker.runtime.errors import JobError


def routing_sums(logits: Tensor, chosen: int) -> Tensor:
    """Sum the routing over tokens: (b, T, experts) to (b, 2, experts). The first row counts how
    often each expert is among the `chosen` likeliest of a token. The second is the sum of its
    probabilities."""
    shares = logits.softmax(-1)
    wide = shares.to(torch.promote_types(shares.dtype, torch.float32))
    often = torch.zeros_like(wide).scatter_(-1, shares.topk(chosen, -1).indices, 1.0)
    return torch.stack([often.sum(1), wide.sum(1)], dim=1)


def balancing_losses(sums: Tensor, chosen: int) -> Tensor:
    """Return the Switch Transformer's balancing loss of each row: the product of both means, summed
    over experts."""
    often, shares = sums.unbind(1)
    tokens = often.sum(-1) / chosen
    return (often * shares).sum(-1) / tokens**2 * often.shape[-1]


@dataclass(frozen=True, slots=True)
class Balance:
    """Balancing of the experts' load."""

    coefficient: float
    #: Experts per token.
    chosen: int
    #: transformers' descriptions of the modules that give the routers' logits.
    recorders: tuple[OutputRecorder, ...]


@cached(maxsize=4)
def balance_of(architecture: Architecture) -> Balance | None:
    """Return how the loss balances experts; None where it has no such part. Raises JobError where
    it has one of another form."""
    config = configuration(architecture)
    # As in transformers, other heads have no balancing loss.
    if architecture.task != "causal" or not getattr(config, "output_router_logits", False):
        return None
    parts = take_apart(architecture, torch.get_default_dtype())
    coefficient = getattr(config, "router_aux_loss_coef", None)
    chosen = getattr(parts.model, "num_experts_per_tok", None) or getattr(
        config, "num_experts_per_tok", None
    )
    theirs = getattr(inspect.getmodule(type(parts.model)), "load_balancing_loss_func", None)
    kinds = type(parts.base)._can_record_outputs or {}
    listed = kinds.get("router_logits")
    recorders = tuple(map(_recorder, listed if isinstance(listed, list) else [listed]))
    if not (coefficient and chosen and theirs and listed and _same_form(theirs, chosen)):
        raise JobError(
            f"model.config: the load-balancing loss of {architecture.name} is of a form that is "
            "not computed row by row; set output_router_logits to false"
        )
    return Balance(float(coefficient), int(chosen), recorders)


def _recorder(listed: Any) -> Any:
    return listed if isinstance(listed, OutputRecorder) else OutputRecorder(listed, index=1)


def _same_form(theirs: Any, chosen: int) -> bool:
    """Return whether the family's balancing loss is ours, tried on some logits of two layers."""
    draws = torch.Generator(device="cpu").manual_seed(0)
    experts = max(2 * chosen, 3)
    shape = (2, 1, 8, experts)
    logits = torch.randn(shape, generator=draws, device="cpu", dtype=torch.float32)
    sums = sum(routing_sums(layer, chosen) for layer in logits)
    assert isinstance(sums, Tensor)
    try:
        expected = theirs(tuple(layer[0] for layer in logits), experts, chosen)
    except (ValueError, TypeError, RuntimeError):
        return False
    # The default device may be another one, as where layers are built.
    expected = torch.as_tensor(expected, device="cpu")
    return bool(torch.allclose(balancing_losses(sums, chosen), expected))


def _records(recorder: OutputRecorder, name: str, module: nn.Module) -> bool:
    within = recorder.layer_name is None or f".{recorder.layer_name.strip('.')}." in f".{name}."
    return (
        within and recorder.target_class is not None and isinstance(module, recorder.target_class)
    )


@contextlib.contextmanager
def recorded(
    part: nn.Module, recorders: tuple[OutputRecorder, ...], logits: list[Tensor]
) -> Iterator[None]:
    """Append the logits that routers give within the block to `logits`."""
    hooks = [
        module.register_forward_hook(partial(_note, logits, recorder.index))
        for recorder in recorders
        for name, module in part.named_modules()
        if _records(recorder, name, module)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note(logits: list[Tensor], index: int, _: Any, __: Any, given: Any) -> None:
    found = given[index] if isinstance(given, tuple) else given
    if found is not None:
        logits.append(found)
