"""A profile from arithmetic alone, for a job that nobody has measured yet.

Times come from FLOPs over a nominal rate, so only their proportions mean something; byte counts
are true for the built-in GPT. Must not know the machine beyond its memory.
"""

from oobleck.planner.job import JobSpec
from oobleck.planner.memory import (
    ACTIVATION_ITEM_BYTES,
    STATE_ITEM_BYTES,
    budget_bytes,
    state_bytes,
)
from oobleck.planner.profile import LayerProfile, Links, Profile

#: A nominal worker and wire: one CPU core, and loopback or a 25 Gbit/s network.
FLOPS_PER_S = 20e9
INTRA_NODE_BYTES_PER_S = 4e9
INTER_NODE_BYTES_PER_S = 3e9
LATENCY_S = 1e-4

_TOKEN_BYTES = 8


def estimate_profile(job: JobSpec, *, gpus_per_node: int, memory_per_worker_bytes: int) -> Profile:
    """The profile of `job`'s model; times for one GPU per layer only.

    A margin goes off `memory_per_worker_bytes` (see `oobleck.planner.memory`); the job's own
    memory budget, where given, takes its place as it stands.
    """
    model, precision = job.model, job.training.precision
    hidden, vocabulary, length = model.hidden, model.vocabulary, model.sequence_length
    rows = job.training.microbatch * length
    item = ACTIVATION_ITEM_BYTES[precision]
    kept_bytes = rows * hidden * item
    # Between stages everything travels in the precision of the weights.
    output_bytes = rows * hidden * STATE_ITEM_BYTES[precision]
    attention_bytes = job.training.microbatch * model.heads * length * length * item

    def layer(
        name: str, *, parameters: int, forward_flops: float, activation_bytes: int, sends: int
    ) -> LayerProfile:
        forward_s = forward_flops / FLOPS_PER_S
        return LayerProfile(
            name=name,
            forward_s={1: forward_s},
            backward_s={1: 2 * forward_s},
            parameter_bytes=parameters * STATE_ITEM_BYTES[precision],
            state_bytes=state_bytes(parameters, precision),
            activation_bytes=activation_bytes,
            output_bytes=sends,
        )

    embedding = layer(
        "embedding",
        parameters=(vocabulary + length) * hidden,
        forward_flops=2.0 * rows * hidden,
        activation_bytes=rows * _TOKEN_BYTES + output_bytes,
        sends=output_bytes,
    )
    blocks = [
        layer(
            f"block{number}",
            # qkv, projection, 4x MLP up and down; weight and bias of two layer norms
            parameters=12 * hidden * hidden + 4 * hidden,
            forward_flops=2.0 * rows * 12 * hidden * hidden + 4.0 * rows * length * hidden,
            # norms, qkv, attention output, MLP (up, GELU), residuals; the scores where unfused
            activation_bytes=16 * kept_bytes + attention_bytes,
            sends=output_bytes,
        )
        for number in range(model.layers)
    ]
    head = layer(
        "head",
        parameters=2 * hidden + vocabulary * hidden,
        forward_flops=2.0 * rows * hidden * vocabulary,
        activation_bytes=2 * kept_bytes + 2 * rows * vocabulary * item,
        sends=0,
    )
    return Profile(
        microbatch=job.training.microbatch,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=budget_bytes(
            job.resources.memory_per_worker_bytes, memory_per_worker_bytes
        ),
        layers=(embedding, *blocks, head),
        links=Links(
            intra_node_bytes_per_s=INTRA_NODE_BYTES_PER_S,
            inter_node_bytes_per_s=INTER_NODE_BYTES_PER_S,
            latency_s=LATENCY_S,
        ),
    )
