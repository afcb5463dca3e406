"""A profile from arithmetic alone, for a job that nobody has measured yet.

Times come from FLOPs over a nominal rate, so only their proportions mean something; byte counts
are true for every kind of model. Must not know the machine beyond its memory.
"""

from collections.abc import Sequence
from dataclasses import replace

from oobleck.planner.job.description import LayerSketch
from oobleck.planner.job.families import Counts, LayerCount, decode_config, family_of
from oobleck.planner.job.model import ModelSpec
from oobleck.planner.job.own import OwnModelSpec
from oobleck.planner.job.spec import JobSpec
from oobleck.planner.profile.memory import (
    ACTIVATION_ITEM_BYTES,
    LOSS_CHUNK,
    STATE_ITEM_BYTES,
    budget_bytes,
    heap_and_mapped,
    narrow_bytes,
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
#: Memory of the nominal worker, and what a layer takes at least.
BYTES_PER_S = 5e9
LEAST_S = 1e-6

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
    layers = _own_layers(job, job.model) if isinstance(job.model, OwnModelSpec) else _layers(job)
    return Profile(
        microbatch=job.training.microbatch,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=budget_bytes(
            job.resources.memory_per_worker_bytes, memory_per_worker_bytes
        ),
        layers=tuple(
            with_exchanges(_shared(layer, sizes if job.model.may_share(number) else (1,)), links)
            for number, layer in enumerate(layers)
        ),
        links=links,
    )


def _layers(job: JobSpec) -> tuple[LayerProfile, ...]:
    blocks = (_block(job, f"block{number}") for number in range(_built_in(job).layers))
    return (_embedding(job), *blocks, _head(job))


def _built_in(job: JobSpec) -> ModelSpec:
    """The job's, which is known by its kind."""
    assert isinstance(job.model, ModelSpec)
    return job.model


def _shared(layer: LayerProfile, sizes: Sequence[int]) -> LayerProfile:
    """With the times of each number of GPUs, none of which has more rows than its share."""
    return replace(
        layer,
        forward_s={gpus: layer.forward_s[1] / gpus for gpus in sizes},
        backward_s={gpus: layer.backward_s[1] / gpus for gpus in sizes},
    )


def _own_layers(job: JobSpec, model: OwnModelSpec) -> tuple[LayerProfile, ...]:
    """Of a model of the user's, as its description has them."""
    description = model.description
    last = len(description.order) - 1
    return tuple(
        _own_layer(
            job,
            f"layer{number}",
            sketch,
            input_bytes=job.training.microbatch * description.input_of(number).row_bytes,
            last=number == last,
        )
        for number, sketch in enumerate(description.layers)
    )


def _own_layer(
    job: JobSpec, name: str, sketch: LayerSketch, *, input_bytes: int, last: bool
) -> LayerProfile:
    rows, item = job.training.microbatch, STATE_ITEM_BYTES[job.training.precision]
    output_bytes = 0 if last else rows * sketch.output.message_bytes
    kept_bytes = max(input_bytes, rows * sketch.kept_bytes)
    # Numbers that are read and written take time too where nothing is multiplied.
    forward_s = rows * sketch.flops / FLOPS_PER_S + kept_bytes / BYTES_PER_S + LEAST_S
    again = job.training.recompute == "layer"
    # Messages of both directions, posted ahead; the largest gradient; what is computed again.
    blocks = [input_bytes] * 2 + [output_bytes] * 2 + [sketch.largest * item, 2 * kept_bytes // 5]
    activation_bytes = kept_bytes
    if again:
        activation_bytes = input_bytes
        blocks.append(kept_bytes)
    heap, mapped = heap_and_mapped(blocks)
    kept, _ = heap_and_mapped([activation_bytes])
    return LayerProfile(
        name=name,
        forward_s={1: forward_s},
        backward_s={1: (2 + again) * forward_s},
        parameter_bytes=sketch.parameters * item,
        state_bytes=state_bytes(sketch.parameters, job.training) + sketch.constant_bytes,
        sum_bytes=sketch.parameters * item,
        tied_bytes=sketch.tied * item,
        activation_bytes=activation_bytes,
        working_bytes=with_holes(heap, kept),
        mapped_bytes=mapped,
        output_bytes=output_bytes,
    )


def _rows(job: JobSpec) -> int:
    """Tokens of a micro-batch."""
    return job.training.microbatch * _built_in(job).sequence_length


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
            kept=16 * hidden,
            masks=2 * hidden if model.dropout else 0,
        ),
        head=LayerCount(
            parameters=2 * hidden + vocabulary * hidden,
            flops=2.0 * hidden * vocabulary,
            kept=2 * hidden + vocabulary,
        ),
    )


def _embedding(job: JobSpec) -> LayerProfile:
    counted = _counts(_built_in(job)).embedding
    return _layer(
        job,
        "embedding",
        counted,
        activation_bytes=_rows(job) * _TOKEN_BYTES + _kept_bytes(job, counted),
        # Messages of both directions, and the gradient of all embeddings, used or not.
        blocks=[*[_hidden_bytes(job)] * 5, _wide_bytes(job, counted.parameters)],
        output_bytes=_hidden_bytes(job),
        tied_bytes=_tied_bytes(job),
        wide=True,
    )


def _block(job: JobSpec, name: str) -> LayerProfile:
    counted = _counts(_built_in(job)).block
    kept_bytes = _kept_bytes(job, counted)
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
            _narrow_bytes(job, counted.parameters) // 3,
        ],
        output_bytes=_hidden_bytes(job),
    )


def _head(job: JobSpec) -> LayerProfile:
    model = _built_in(job)
    counted = _counts(model).head
    chunk_bytes = _wide_bytes(job, min(LOSS_CHUNK, _rows(job) * model.vocabulary))
    return _layer(
        job,
        "head",
        counted,
        activation_bytes=_kept_bytes(job, counted),
        # A piece of the loss is there with the logits, then their gradient with the weight's.
        blocks=[max(chunk_bytes, _narrow_bytes(job, counted.parameters))],
        output_bytes=0,
        tied_bytes=_tied_bytes(job),
    )


def _kept_bytes(job: JobSpec, counted: LayerCount) -> int:
    """Of a micro-batch, from a layer's forward to its backward."""
    rows = _rows(job)
    narrow, wide = _narrow_bytes(job, counted.kept), _wide_bytes(job, counted.kept_wide)
    return rows * (narrow + wide + counted.masks)


def _narrow_bytes(job: JobSpec, numbers: int) -> int:
    """In the type that layers compute in."""
    return numbers * ACTIVATION_ITEM_BYTES[job.training.precision]


def _wide_bytes(job: JobSpec, numbers: int) -> int:
    """In the type of what is trained."""
    return numbers * STATE_ITEM_BYTES[job.training.precision]


def _hidden_blocks(job: JobSpec, size: int) -> list[int]:
    """So many bytes of activations in blocks of one hidden state each, as most are."""
    count, rest = divmod(size, _hidden_bytes(job))
    return [_hidden_bytes(job)] * count + [rest]


def _tied_bytes(job: JobSpec) -> int:
    """Of the token embedding, where the head shares it."""
    model = _built_in(job)
    return _wide_bytes(job, model.vocabulary * model.hidden) if model.tied else 0


def _hidden_bytes(job: JobSpec) -> int:
    """What a layer hands to the next one."""
    return _narrow_bytes(job, _rows(job) * _built_in(job).hidden)


def _layer(
    job: JobSpec,
    name: str,
    counted: LayerCount,
    *,
    activation_bytes: int,
    blocks: Sequence[int],
    output_bytes: int,
    tied_bytes: int = 0,
    wide: bool = False,
) -> LayerProfile:
    """`wide`: it computes with the weights as they are trained."""
    narrow = 0 if wide else narrow_bytes(counted.parameters, job.training.precision)
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
        parameter_bytes=_wide_bytes(job, counted.parameters),
        state_bytes=state_bytes(counted.parameters, job.training) + narrow,
        sum_bytes=_wide_bytes(job, counted.parameters),
        tied_bytes=tied_bytes,
        activation_bytes=activation_bytes,
        working_bytes=with_holes(heap, kept),
        mapped_bytes=mapped,
        output_bytes=output_bytes,
    )
