"""A profile from arithmetic alone, for a job that nobody has measured yet.

Times come from FLOPs over a nominal rate, so only their proportions mean something; byte counts
are true for every kind of model. Must not know the machine beyond its memory.
"""

from collections.abc import Sequence
from dataclasses import replace

from oobleck.planner.job.families import Counts, LayerCount, decode_config, family_of
from oobleck.planner.job.spec import JobSpec, ModelSpec
from oobleck.planner.profile.memory import (
    ACTIVATION_ITEM_BYTES,
    STATE_ITEM_BYTES,
    budget_bytes,
    heap_and_mapped,
    state_bytes,
    with_holes,
)
from oobleck.planner.profile.profile import LayerProfile, Links, Profile
from oobleck.planner.profile.sharing import sharing_sizes, with_exchanges

#: A nominal worker and wire: one CPU core, and loopback or a 25 Gbit/s network.
FLOPS_PER_S = 20e9
INTRA_NODE_BYTES_PER_S = 4e9
INTER_NODE_BYTES_PER_S = 3e9
LATENCY_S = 1e-4

_TOKEN_BYTES = 8


def estimate_profile(job: JobSpec, *, gpus_per_node: int, memory_per_worker_bytes: int) -> Profile:
    """The profile of `job`'s model; times for each number of GPUs that divides a micro-batch.

    A margin goes off `memory_per_worker_bytes` (see `oobleck.planner.profile.memory`); the job's
    own memory budget, where given, takes its place as it stands.
    """
    links = Links(
        intra_node_bytes_per_s=INTRA_NODE_BYTES_PER_S,
        inter_node_bytes_per_s=INTER_NODE_BYTES_PER_S,
        latency_s=LATENCY_S,
    )
    sizes = sharing_sizes(job.training.microbatch, gpus_per_node)
    layers = (
        _embedding(job),
        *(_block(job, f"block{number}") for number in range(job.model.layers)),
        _head(job),
    )
    return Profile(
        microbatch=job.training.microbatch,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=budget_bytes(
            job.resources.memory_per_worker_bytes, memory_per_worker_bytes
        ),
        layers=tuple(with_exchanges(_shared(layer, sizes), links) for layer in layers),
        links=links,
    )


def _shared(layer: LayerProfile, sizes: Sequence[int]) -> LayerProfile:
    """With the times of each number of GPUs, none of which has more rows than its share."""
    return replace(
        layer,
        forward_s={gpus: layer.forward_s[1] / gpus for gpus in sizes},
        backward_s={gpus: layer.backward_s[1] / gpus for gpus in sizes},
    )


def _rows(job: JobSpec) -> int:
    """Tokens of a micro-batch."""
    return job.training.microbatch * job.model.sequence_length


def _counts(model: ModelSpec) -> Counts:
    """The arithmetic of each kind of layer."""
    family = family_of(model.kind)
    if family is not None:
        return family.count(decode_config(model.config), model.sequence_length)
    hidden, length, vocabulary = model.hidden, model.sequence_length, model.vocabulary
    # qkv, projection, 4x MLP up and down
    matrices = 12 * hidden * hidden
    return Counts(
        embedding=LayerCount(
            parameters=(vocabulary + length) * hidden,
            flops=2.0 * hidden,
            masks=hidden if model.dropout else 0,
        ),
        block=LayerCount(
            # and weight and bias of two layer norms
            parameters=matrices + 4 * hidden,
            flops=2.0 * matrices + 4.0 * length * hidden,
            # qkv, attention output, MLP (up, GELU); norms and residuals
            kept=12 * hidden,
            kept_wide=4 * hidden,
            masks=2 * hidden if model.dropout else 0,
        ),
        head=LayerCount(
            parameters=2 * hidden + vocabulary * hidden,
            flops=2.0 * hidden * vocabulary,
            kept=hidden,
            kept_wide=hidden + vocabulary,
        ),
    )


def _embedding(job: JobSpec) -> LayerProfile:
    counted = _counts(job.model).embedding
    return _layer(
        job,
        "embedding",
        counted,
        activation_bytes=_rows(job) * _TOKEN_BYTES + _kept_bytes(job, counted),
        # Messages of both directions, and the gradient of all embeddings, used or not.
        blocks=[*[_hidden_bytes(job)] * 5, _gradient_bytes(job, counted)],
        output_bytes=_hidden_bytes(job),
        tied_bytes=_tied_bytes(job),
    )


def _block(job: JobSpec, name: str) -> LayerProfile:
    counted = _counts(job.model).block
    kept_bytes = _kept_bytes(job, counted) + _cast_bytes(job, counted)
    return _layer(
        job,
        name,
        counted,
        activation_bytes=kept_bytes,
        # Messages of both directions, posted ahead; gradients replace what was kept one by one; the
        # largest matrix's own, before it is added.
        blocks=[
            *[_hidden_bytes(job)] * 4,
            *_hidden_blocks(job, 2 * kept_bytes // 5),
            _gradient_bytes(job, counted) // 3,
        ],
        output_bytes=_hidden_bytes(job),
    )


def _head(job: JobSpec) -> LayerProfile:
    counted = _counts(job.model).head
    logits_bytes = _rows(job) * counted.kept_wide * STATE_ITEM_BYTES[job.training.precision]
    return _layer(
        job,
        "head",
        counted,
        activation_bytes=_kept_bytes(job, counted) + _cast_bytes(job, counted),
        # The logits' gradient is there with the logits, then with the weight's.
        blocks=[logits_bytes, max(logits_bytes, _gradient_bytes(job, counted))],
        output_bytes=0,
        tied_bytes=_tied_bytes(job),
    )


def _kept_bytes(job: JobSpec, counted: LayerCount) -> int:
    """Of a micro-batch, from a layer's forward to its backward."""
    precision = job.training.precision
    narrow, wide = ACTIVATION_ITEM_BYTES[precision], STATE_ITEM_BYTES[precision]
    return _rows(job) * (counted.kept * narrow + counted.kept_wide * wide + counted.masks)


def _cast_bytes(job: JobSpec, counted: LayerCount) -> int:
    """The layer's matrices as autocast leaves them to the backward, for every micro-batch."""
    precision = job.training.precision
    return counted.parameters * ACTIVATION_ITEM_BYTES[precision] if precision == "bf16" else 0


def _hidden_blocks(job: JobSpec, size: int) -> list[int]:
    """So many bytes of activations in blocks of one hidden state each, as most are."""
    count, rest = divmod(size, _hidden_bytes(job))
    return [_hidden_bytes(job)] * count + [rest]


def _gradient_bytes(job: JobSpec, counted: LayerCount) -> int:
    return counted.parameters * STATE_ITEM_BYTES[job.training.precision]


def _tied_bytes(job: JobSpec) -> int:
    """Of the token embedding, where the head shares it."""
    model = job.model
    item = STATE_ITEM_BYTES[job.training.precision]
    return model.vocabulary * model.hidden * item if model.tied else 0


def _hidden_bytes(job: JobSpec) -> int:
    """Between stages everything travels in the precision of the weights."""
    return _rows(job) * job.model.hidden * STATE_ITEM_BYTES[job.training.precision]


def _layer(
    job: JobSpec,
    name: str,
    counted: LayerCount,
    *,
    activation_bytes: int,
    blocks: Sequence[int],
    output_bytes: int,
    tied_bytes: int = 0,
) -> LayerProfile:
    precision = job.training.precision
    forward_s = _rows(job) * counted.flops / FLOPS_PER_S
    again = job.training.recompute == "layer"
    if again:
        input_bytes = min(activation_bytes, _hidden_bytes(job))
        blocks = [*blocks, *_hidden_blocks(job, activation_bytes - input_bytes)]
        activation_bytes = input_bytes
    heap, mapped = heap_and_mapped(blocks)
    kept, _ = heap_and_mapped(_hidden_blocks(job, activation_bytes))
    return LayerProfile(
        name=name,
        forward_s={1: forward_s},
        backward_s={1: (2 + again) * forward_s},
        parameter_bytes=counted.parameters * STATE_ITEM_BYTES[precision],
        state_bytes=state_bytes(counted.parameters, job.training),
        sum_bytes=counted.parameters * STATE_ITEM_BYTES[precision],
        tied_bytes=tied_bytes,
        activation_bytes=activation_bytes,
        working_bytes=with_holes(heap, kept),
        mapped_bytes=mapped,
        output_bytes=output_bytes,
    )
