"""Running a stage: forward and backward of contiguous layers, micro-batch by micro-batch.

Owns what a micro-batch keeps between its forward and its backward. Knows nothing of peers, orders
or steps: the executor says which micro-batch and hands tensors in and out. Any order of forwards
and backwards is right, as long as a micro-batch's forward comes first and, where its backward is
split, the input's gradient before the weights'.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from oobleck.planner.job import JobSpec
from oobleck.worker.linear import DeferredGradients, deferring
from oobleck.worker.models import loss
from oobleck.worker.random import RowKeys
from oobleck.worker.state import ModelState, state_dtype


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A micro-batch between forward and backward."""

    #: None on the first stage: tokens have no gradient.
    leaf: Tensor | None
    output: Tensor
    #: Where its backward is split, what collects the weight gradients that are left for later.
    deferred: DeferredGradients | None


class StageRunner:
    """One stage of one pipeline on this worker."""

    def __init__(
        self, state: ModelState, layers: range, job: JobSpec, device: torch.device
    ) -> None:
        self._state = state
        self._layers = layers
        self._job = job
        self._device = device
        self._in_flight: dict[Hashable, _InFlight] = {}
        #: Micro-batches between the two parts of their backward.
        self._deferred: dict[Hashable, DeferredGradients] = {}

    @property
    def first(self) -> bool:
        """Whether it takes tokens."""
        return self._layers[0] == 0

    @property
    def last(self) -> bool:
        """Whether it yields the loss."""
        return self._layers[-1] == self._job.model.layer_count - 1

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Of what passes between stages, forwards and backwards, for one micro-batch."""
        model = self._job.model
        return (self._job.training.microbatch, model.sequence_length, model.hidden)

    @property
    def activation_dtype(self) -> torch.dtype:
        return state_dtype(self._job.training.precision)

    def forward(
        self,
        microbatch: Hashable,
        x: Tensor,
        rows: RowKeys,
        targets: Tensor | None = None,
        *,
        split: bool = False,
    ) -> Tensor:
        """The stage's output for `x`; on the last stage, which needs `targets`, the mean loss.

        `x` is int64 tokens (b, T) on the first stage and the previous stage's output elsewhere.
        The result is cut off from autograd: it may be sent as it is. `split`: its backward will
        come as `backward_input` and `backward_weight`, and not as `backward`.
        """
        if self.last and targets is None:
            raise ValueError("the last stage needs targets")
        leaf = None if self.first else x.detach().requires_grad_()
        hidden = x if leaf is None else leaf
        deferred = DeferredGradients() if split else None
        autocast = torch.autocast(
            self._device.type,
            dtype=torch.bfloat16,
            enabled=self._job.training.precision == "bf16",
        )
        with autocast, deferring(deferred):
            for layer in self._layers:
                hidden = self._state.module(layer)(hidden, rows)
            output = hidden if targets is None else loss(hidden, targets)
        output = output.to(self.activation_dtype)
        self._in_flight[microbatch] = _InFlight(leaf, output, deferred)
        return output.detach()

    def backward(self, microbatch: Hashable, gradient: Tensor | None = None) -> Tensor | None:
        """Add the micro-batch's gradients to the layers' and return that of the stage's input.

        `gradient` is that of the output, None on the last stage: the loss itself. The first
        stage returns None.
        """
        kept = self._in_flight.pop(microbatch)
        assert kept.deferred is None, "its forward was told that the backward would be split"
        torch.autograd.backward(kept.output, gradient)
        return None if kept.leaf is None else kept.leaf.grad

    def backward_input(self, microbatch: Hashable, gradient: Tensor | None = None) -> Tensor | None:
        """As `backward`, but most of the weights' gradients are left to `backward_weight`.

        Until then the inputs of the linear layers and the gradients of their outputs are kept.
        """
        kept = self._in_flight.pop(microbatch)
        assert kept.deferred is not None, "its forward was not told that the backward is split"
        torch.autograd.backward(kept.output, gradient)
        self._deferred[microbatch] = kept.deferred
        return None if kept.leaf is None else kept.leaf.grad

    def backward_weight(self, microbatch: Hashable) -> None:
        """Add what `backward_input` left out, and keep nothing of the micro-batch any more."""
        self._deferred.pop(microbatch).add()

    def reset(self) -> None:
        """Drop everything in flight."""
        self._in_flight.clear()
        self._deferred.clear()
