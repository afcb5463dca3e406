"""Cost of a stage for each of its workers: compute, the update, and memory.

Owns the terms of the replay (`oobleck.planner.cost.replay`) and of memory checks. Must not know the
order of compute.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from oobleck.core.errors import PlanInfeasible
from oobleck.core.profile import Profile, working_bytes
from oobleck.planner.profile.sharing import exchange_bytes

#: Share of the backward that makes the input's gradient, where the profile has no times for it.
#: Measured on transformer blocks: gradients of inputs and of weights take 1.3 to 1.
INPUT_SHARE = 1.3 / 2.3


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Cost of a stage for each of its workers; times are for one micro-batch, `update_s` is once
    per step."""

    gpus: int
    forward_s: float
    backward_s: float
    #: The two parts of `backward_s`.
    backward_input_s: float
    backward_weight_s: float
    update_s: float
    #: Bytes of the whole stage, as all bytes here; its workers share them evenly.
    state_bytes: int
    #: Gradient sums over all workers that hold a layer, where several do.
    sum_bytes: int
    #: The part of `sum_bytes` that is needed even with one replica: the sum of a weight that two
    #: layers share, on one worker or on two.
    tied_bytes: int
    #: Kept per micro-batch from its forward to the end of its backward.
    #:  Nothing is counted as freed between the gradient of the input and those of the weights. The
    #: latter still need each linear layer's input and its output's gradient. They are 16 hidden
    #: widths per token of a transformer block, as many as the block keeps before.
    activation_bytes: int
    #: Extra bytes while a layer is computed, for the layer that needs most.
    working_bytes: int
    #: Extra bytes of each worker for exchanges while it computes.
    exchange_bytes: int

    def worker_bytes(self, kept: int, *, replicas: int) -> int:
        """Return the bytes of each worker that keeps the activations of `kept` micro-batches, in a
        plan with `replicas` replicas of the model (`oobleck.planner.cost.kinds.replicas`).

        The sum is rounded up only once, so that it never exceeds what a template's memory allows.
        """
        shared = self.state_bytes + kept * self.activation_bytes + self.working_bytes
        shared += self.sum_bytes if replicas > 1 else self.tied_bytes
        return -(-shared // self.gpus) + self.exchange_bytes

    def at(self, rate: float) -> "StageCost":
        """Return the cost when the slowest of the workers has that rate."""
        if rate == 1:
            return self
        return replace(
            self,
            forward_s=self.forward_s / rate,
            backward_s=self.backward_s / rate,
            backward_input_s=self.backward_input_s / rate,
            backward_weight_s=self.backward_weight_s / rate,
            update_s=self.update_s / rate,
        )


def idle_bytes(profile: Profile, layers: Iterable[int], gpus: int) -> int:
    """Return the bytes of each of `gpus` workers that hold layers without computing them: the state
    and the gradient sums."""
    own = [profile.layers[layer] for layer in layers]
    return -(-sum(layer.state_bytes + layer.sum_bytes for layer in own) // gpus)


def stage_cost(
    profile: Profile, first_layer: int, last_layer: int, gpus: int, *, resident: bool = False
) -> StageCost:
    """Return the cost of layers first_layer .. last_layer on `gpus` GPUs of a node.

    `resident` is the flag of that name in `oobleck.core.routes.Hold`. Raises
    PlanInfeasible where the profile has no time of a layer for so many GPUs.
    """
    layers = profile.layers[first_layer : last_layer + 1]
    for layer in layers:
        if gpus not in layer.forward_s:
            raise PlanInfeasible(
                f"layer {layer.name}: forward_s has no time for {gpus} GPUs; give one, or plan "
                f"stages of {', '.join(map(str, sorted(layer.forward_s)))} GPUs"
            )
    backward_s = sum(layer.backward_s[gpus] for layer in layers)
    input_s = sum(
        layer.backward_input_s.get(gpus, layer.backward_s[gpus] * INPUT_SHARE) for layer in layers
    )
    tied_bytes = max(layer.tied_bytes for layer in layers)
    return StageCost(
        gpus=gpus,
        forward_s=sum(layer.forward_s[gpus] for layer in layers),
        backward_s=backward_s,
        backward_input_s=input_s,
        backward_weight_s=backward_s - input_s,
        update_s=sum(layer.update_s.get(gpus, 0.0) for layer in layers),
        state_bytes=sum(layer.state_bytes for layer in layers),
        activation_bytes=sum(layer.activation_bytes for layer in layers),
        # A shared weight has one sum for all its places.
        sum_bytes=sum(layer.sum_bytes - layer.tied_bytes for layer in layers) + tied_bytes,
        tied_bytes=tied_bytes,
        working_bytes=working_bytes(layers),
        exchange_bytes=exchange_bytes(layers, gpus, resident=resident),
    )
