"""Profiles for the planner's benches: like a GPT (equal blocks) and without any likeness."""

import random

from oobleck.core.profile import LayerProfile, Links, Profile

#: Exponent of speed by GPUs: d GPUs need 1/d^0.85 of the time of one for a layer.
SCALING = 0.85
LINKS = Links(intra_node_bytes_per_s=100e9, inter_node_bytes_per_s=12.5e9, latency_s=20e-6)


def profile(
    layers: int, gpus_per_node: int, *, kind: str, seed: int = 0, nodes_needed: int = 1
) -> Profile:
    """Return a profile. `kind`: "gpt" has equal blocks between an embedding and a head, "random" no
    two layers alike. With its memory the model needs about `nodes_needed` nodes."""
    rng = random.Random(seed)
    made = [
        _layer(number, weight, gpus_per_node)
        for number, weight in enumerate(_weights(layers, kind, rng))
    ]
    whole = sum(layer.state_bytes + layer.activation_bytes for layer in made)
    return Profile(
        microbatch=1,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=2 * whole
        if nodes_needed == 1
        else int(1.1 * whole / (nodes_needed * gpus_per_node)),
        layers=tuple(made),
        links=LINKS,
    )


def _weights(layers: int, kind: str, rng: random.Random) -> list[float]:
    if kind == "random":
        return [rng.uniform(0.5, 1.5) for _ in range(layers)]
    return [0.1, *[1.0] * (layers - 2), rng.uniform(0.3, 1.5)] if layers > 2 else [1.0] * layers


def _layer(number: int, weight: float, gpus_per_node: int) -> LayerProfile:
    """Return a layer like a GPT-3 6.7B block on one GPU: 200 M parameters, 2048 tokens per
    micro-batch."""
    parameters = int(200e6 * weight)
    forward_s = 0.008 * weight
    gpus = range(1, gpus_per_node + 1)
    return LayerProfile(
        name=f"layer{number}",
        forward_s={d: forward_s / d**SCALING for d in gpus},
        backward_s={d: 2 * forward_s / d**SCALING for d in gpus},
        parameter_bytes=4 * parameters,
        state_bytes=16 * parameters,
        activation_bytes=int(70e6 * weight),
        output_bytes=2048 * 4096 * 2,
    )
