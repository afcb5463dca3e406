"""The profile of a model on a machine: measured or estimated time and bytes per layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer. Times are seconds for one micro-batch, keyed by the GPUs sharing the layer."""

    name: str
    forward_s: Mapping[int, float]
    backward_s: Mapping[int, float]
    parameter_bytes: int
    #: Weights, gradients and optimizer moments.
    state_bytes: int
    #: Kept per micro-batch from its forward to its backward.
    activation_bytes: int
    #: Sent to the next stage per micro-batch.
    output_bytes: int
    #: The part of `backward_s` that makes the gradient of the layer's input, where it was measured
    #: apart from that of the weights.
    backward_input_s: Mapping[int, float] = field(default_factory=dict)
    #: The optimizer's update of the layer, once per step.
    update_s: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.forward_s:
            raise ValueError(f"layer {self.name}: forward_s is empty; give a time for 1 GPU")
        if set(self.forward_s) != set(self.backward_s):
            raise ValueError(
                f"layer {self.name}: forward_s and backward_s must have the same numbers of GPUs "
                f"({sorted(self.forward_s)} and {sorted(self.backward_s)})"
            )
        for name in ("forward_s", "backward_s"):
            for gpus, seconds in getattr(self, name).items():
                if gpus < 1 or not math.isfinite(seconds) or seconds < 0:
                    raise ValueError(
                        f"layer {self.name}: {name}[{gpus}] = {seconds}; "
                        "keys must be >= 1 and times finite and >= 0"
                    )
        for name in ("parameter_bytes", "state_bytes", "activation_bytes", "output_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"layer {self.name}: {name} is negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """What the wires do: bytes per second inside and between nodes, seconds per message."""

    intra_node_bytes_per_s: float
    inter_node_bytes_per_s: float
    latency_s: float

    def __post_init__(self) -> None:
        for name in ("intra_node_bytes_per_s", "inter_node_bytes_per_s"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"links.{name} = {value}; it must be > 0")
        if not (math.isfinite(self.latency_s) and self.latency_s >= 0):
            raise ValueError(f"links.latency_s = {self.latency_s}; it must be finite and >= 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All that planning knows of the model and the machines."""

    microbatch: int
    gpus_per_node: int
    gpu_memory_bytes: int
    layers: tuple[LayerProfile, ...]
    links: Links

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("the profile has no layers")
        for name in ("microbatch", "gpus_per_node", "gpu_memory_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}; it must be >= 1")
