"""Costs of a layer that the workers of a node share: times and bytes, with or without resident
weights.

A stage of d workers splits each micro-batch: worker i takes the i-th d-th of its rows. State is
sharded: worker i keeps the i-th d-th of each layer's weights, gradients and moments. A layer's
weights are gathered for its forward and backward, and its gradients are summed into the shares
after. This is fully sharded data parallelism inside one stage, as ZeRO-3 of Rajbhandari et al.,
2020. While a layer is computed, the weights of the next one and the gradients of the last one
travel. With enough memory (`resident`) a worker does both once per step instead of once per
micro-batch.

Owns the numbers of workers that a profile offers, and the bytes with and without resident weights.
Must not know cuts or schedules.
"""

from collections.abc import Sequence
from dataclasses import replace

from oobleck.core.profile import LayerProfile, Links, exchange_s

#: Gradients beside the gathered weights, in units of a layer's parameters: that of the whole layer,
#: and the other workers' shares of the sum on their way.
_GRADIENTS = 2


def sharing_sizes(microbatch: int, gpus_per_node: int) -> tuple[int, ...]:
    """List the numbers of workers by which a measured or estimated profile lets a layer be shared.

    They are the numbers that divide the rows of a micro-batch. With any other, some worker would
    have more rows than its share, in time and in memory.
    """
    return tuple(d for d in range(1, min(microbatch, gpus_per_node) + 1) if microbatch % d == 0)


def with_exchanges(layer: LayerProfile, links: Links, gathered: int) -> LayerProfile:
    """Return `layer`, whose times are of computing alone, with the cost of sharing it added.
    `gathered`: bytes of its weights as it computes with them.

    Weights are gathered and gradients summed once per step, so that is part of `update_s`. Where
    memory is too short for that, both happen for every micro-batch; no time of a profile counts
    that.
    """
    sizes = sorted(layer.forward_s)
    if sizes == [1]:
        return layer
    return replace(
        layer,
        update_s={
            gpus: layer.update_s.get(gpus, 0.0)
            + exchange_s(gathered, gpus=gpus, links=links)
            + exchange_s(layer.summed_bytes, gpus=gpus, links=links)
            for gpus in sizes
        },
        exchange_bytes=gathered + _GRADIENTS * layer.parameter_bytes,
    )


def exchange_bytes(layers: Sequence[LayerProfile], gpus: int, *, resident: bool) -> int:
    """Return the bytes that each of `gpus` workers needs beside its share of the layers' state and
    activations. A resident stage keeps the weights and the gradients of all layers for the step."""
    if gpus == 1:
        return 0
    if not resident:
        return running_exchange_bytes(layers)[-1]
    parameters = [layer.parameter_bytes for layer in layers]
    return sum(map(_gathered, layers)) + sum(parameters) + (_GRADIENTS - 1) * max(parameters)


def running_exchange_bytes(layers: Sequence[LayerProfile]) -> list[int]:
    """Return `exchange_bytes` of the first layer, of the first two, and so on, with no layer
    resident.

    The peak is in the backward of a layer. In memory are its weights and gradient, the arriving
    weights of the layer below, and the gradient of the layer above with the others' shares of it.
    """
    running: list[int] = []
    before: tuple[int, int] | None = None  # layer below: bytes of weights, gradient
    below = 0  # weights of the layer below that
    most = 0
    for layer in layers:
        weights, gradient = _moving(layer)
        most = max(most, layer.exchange_bytes)
        if before is not None:
            # This layer's own backward, and that of the one below.
            most = max(
                most,
                weights + gradient + before[0],
                sum(before) + below + _GRADIENTS * gradient,
            )
            below = before[0]
        before = weights, gradient
        running.append(most)
    return running


def _moving(layer: LayerProfile) -> tuple[int, int]:
    """Return the bytes of the layer's weights and of its gradient as they travel. A profile without
    them gets an estimate from its exchange bytes."""
    weights = layer.exchange_bytes - _GRADIENTS * layer.parameter_bytes
    if weights > 0:
        return weights, layer.parameter_bytes
    return (layer.exchange_bytes // (1 + _GRADIENTS),) * 2


def _gathered(layer: LayerProfile) -> int:
    """Return the bytes of the layer's gathered weights. A profile without them gets the bytes of
    the trained weights."""
    gathered = layer.exchange_bytes - _GRADIENTS * layer.parameter_bytes
    return gathered if gathered > 0 else layer.parameter_bytes
