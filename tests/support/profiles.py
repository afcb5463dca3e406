"""Profiles for tests: from a list of layer times, or at random."""

import random
from collections.abc import Sequence

from oobleck.core.profile import LayerProfile, Links, Profile

LINKS = Links(intra_node_bytes_per_s=1e10, inter_node_bytes_per_s=1e9, latency_s=1e-5)


def profile_of(
    forward_s: Sequence[float],
    *,
    gpus: Sequence[int] = (1,),
    gpus_per_node: int = 1,
    memory: int = 1 << 40,
    state: Sequence[int] | int = 1000,
    activation: Sequence[int] | int = 10,
    links: Links = LINKS,
) -> Profile:
    """Backward takes twice the forward; d GPUs take 1/d^0.9 of the time of one."""
    count = len(forward_s)
    states = [state] * count if isinstance(state, int) else state
    activations = [activation] * count if isinstance(activation, int) else activation
    return Profile(
        microbatch=1,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=memory,
        layers=tuple(
            LayerProfile(
                name=f"layer{number}",
                forward_s={d: time / d**0.9 for d in gpus},
                backward_s={d: 2 * time / d**0.9 for d in gpus},
                parameter_bytes=states[number] // 4,
                state_bytes=states[number],
                activation_bytes=activations[number],
                output_bytes=100,
            )
            for number, time in enumerate(forward_s)
        ),
        links=links,
    )


def random_profile(
    rng: random.Random, *, layers: int, gpus_per_node: int = 1, tight: bool = False
) -> Profile:
    """Whole times, so that ties are frequent; `tight`: memory may rule cuts out."""
    state = [rng.randint(1, 9) for _ in range(layers)]
    gpus = [d for d in range(1, gpus_per_node + 1) if d == 1 or rng.random() < 0.7]
    whole = sum(state)
    return profile_of(
        [float(rng.randint(1, 6)) for _ in range(layers)],
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        state=state,
        activation=[rng.randint(0, 3) for _ in range(layers)],
        memory=rng.randint(whole // 4 + 1, whole) if tight else 1 << 40,
    )
