"""Profiles from arithmetic alone, for jobs without a measurement.

Times come from FLOPs and bytes divided by a machine's rates. On the nominal machine only their
proportions are meaningful. Byte counts are right for every kind of model. Must not know more of the
machine.
"""

from collections.abc import Sequence
from dataclasses import replace

from oobleck.core.job.description import LayerSketch
from oobleck.core.job.families import family_of
from oobleck.core.job.family import Counts, LayerCount, decode_config, dense_block
from oobleck.core.job.model import ModelSpec, OwnModelSpec
from oobleck.core.job.spec import JobSpec, TrainingSpec, fit_float8
from oobleck.core.profile import LayerProfile, Links, Profile
from oobleck.core.sharing import sharing_sizes, with_exchanges
from oobleck.planner.profile.machine import NOMINAL, Machine
from oobleck.planner.profile.memory import (
    ACTIVATION_ITEM_BYTES,
    LOSS_CHUNK,
    STATE_ITEM_BYTES,
    budget_bytes,
    heap_and_mapped,
    moved_bytes,
    narrow_bytes,
    state_bytes,
    with_holes,
)

#: Memory rate of the nominal worker.
_NOMINAL_BYTES_PER_S = 5e9
#: Times that a forward reads or writes each byte that it keeps: with kernels of torch, and with
#: compiled ones, which combine neighbouring operations.
_PASSES = 2
_COMPILED_PASSES = 1
#: Bytes read or written per number that is rounded to float8: a pass finds the scale and one
#: rounds. Kernels of torch need three for that, in float32, and so many bytes of memory.
_CAST_BYTES = 21
_COMPILED_CAST_BYTES = 5
_CAST_WORKING_BYTES = 5
#: Times that an update reads or writes each byte of the state. Norm, clip and AdamW read and write
#: weights, gradients and moments; then the gradients are cleared.
_UPDATE_PASSES = 2.25

_TOKEN_BYTES = 8


def estimate_profile(
    job: JobSpec,
    *,
    gpus_per_node: int,
    memory_per_worker_bytes: int,
    machine: Machine = NOMINAL,
) -> Profile:
    """Estimate the profile of `job`'s model, with times for each number of GPUs that divides a
    micro-batch.

    A margin is taken off `memory_per_worker_bytes` (see `oobleck.planner.profile.memory`). The
    job's own memory budget, where given, replaces it without a margin.
    """
    links = Links(
        intra_node_bytes_per_s=machine.intra_node_bytes_per_s,
        inter_node_bytes_per_s=machine.inter_node_bytes_per_s,
        latency_s=machine.latency_s,
    )
    sizes = sharing_sizes(job.training.microbatch, gpus_per_node)
    if isinstance(job.model, OwnModelSpec):
        layers = _own_layers(job, job.model, machine)
    else:
        layers = _layers(job, machine)
    return Profile(
        microbatch=job.training.microbatch,
        gpus_per_node=gpus_per_node,
        gpu_memory_bytes=budget_bytes(
            job.resources.memory_per_worker_bytes, memory_per_worker_bytes
        ),
        layers=tuple(
            with_exchanges(
                _shared(
                    with_sums(layer, job.training),
                    sizes if job.model.may_share(number) else (1,),
                    machine,
                ),
                links,
                gathered_bytes(job, number, layer.parameter_bytes),
            )
            for number, layer in enumerate(layers)
        ),
        links=replace(
            links, intra_node_bytes_per_s=machine.link_bytes_per_s or links.intra_node_bytes_per_s
        ),
    )


def _layers(job: JobSpec, machine: Machine) -> tuple[LayerProfile, ...]:
    blocks = (_block(job, f"block{number}", machine) for number in range(_built_in(job).layers))
    return (_embedding(job, machine), *blocks, _head(job, machine))


def flops_per_token(job: JobSpec) -> float:
    """Return the operations of a step per token: forward and backward, without recomputation. The
    model is one known by its kind."""
    model = _built_in(job)
    counts, blocks = layer_counts(model), model.layers
    return 3.0 * (counts.embedding.flops + blocks * counts.block.flops + counts.head.flops)


def _built_in(job: JobSpec) -> ModelSpec:
    """Return the job's model, which is known by its kind."""
    assert isinstance(job.model, ModelSpec)
    return job.model


def _shared(layer: LayerProfile, sizes: Sequence[int], machine: Machine) -> LayerProfile:
    """Return the layer with times for each number of GPUs, which share its rows evenly."""
    return replace(
        layer,
        forward_s={gpus: layer.forward_s[1] / gpus for gpus in sizes},
        backward_s={gpus: layer.backward_s[1] / gpus for gpus in sizes},
        update_s=_update_s(layer.state_bytes, sizes, machine),
    )


def _update_s(state_bytes: int, sizes: Sequence[int], machine: Machine) -> dict[int, float]:
    """Return the time of the update for each number of GPUs; empty for a nominal worker."""
    rate = machine.memory_bytes_per_s
    if rate is None:
        return {}
    return {gpus: _UPDATE_PASSES * state_bytes / rate / gpus for gpus in sizes}


def _moving_s(count: float, machine: Machine, *, nominal: bool) -> float:
    """Return the time to read or write so many bytes. `nominal`: whether it counts on a nominal
    worker too."""
    rate = machine.memory_bytes_per_s
    if rate is None:
        return count / _NOMINAL_BYTES_PER_S if nominal else 0.0
    return count / rate


def _own_layers(job: JobSpec, model: OwnModelSpec, machine: Machine) -> tuple[LayerProfile, ...]:
    """Build the layers of a user's model from its description."""
    description = model.description
    last = len(description.order) - 1
    return tuple(
        _own_layer(
            job,
            f"layer{number}",
            sketch,
            machine,
            input_bytes=job.training.microbatch * description.input_of(number).row_bytes,
            last=number == last,
        )
        for number, sketch in enumerate(description.layers)
    )


def _own_layer(
    job: JobSpec,
    name: str,
    sketch: LayerSketch,
    machine: Machine,
    *,
    input_bytes: int,
    last: bool,
) -> LayerProfile:
    rows, item = job.training.microbatch, STATE_ITEM_BYTES[job.training.precision]
    output_bytes = 0 if last else rows * sketch.output.message_bytes
    kept_bytes = max(input_bytes, rows * sketch.kept_bytes)
    # Reading and writing numbers takes time even where nothing is multiplied.
    products_s = rows * sketch.flops / machine.flops_per_s(job.training)
    moving_s = _moving_s(kept_bytes, machine, nominal=True)
    forward_s = products_s + moving_s + machine.least_s
    again = job.training.recompute == "layer"
    # Messages of both directions, posted ahead; the largest gradient; recomputed activations.
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
        moved_bytes=moved_bytes(sketch.parameters, job.training),
        sum_bytes=sketch.parameters * item,
        tied_bytes=sketch.tied * item,
        activation_bytes=activation_bytes,
        working_bytes=with_holes(heap, kept),
        mapped_bytes=mapped,
        output_bytes=output_bytes,
    )


def _rows(job: JobSpec) -> int:
    """Return the tokens of a micro-batch."""
    return job.training.microbatch * _built_in(job).sequence_length


def layer_counts(model: ModelSpec) -> Counts:
    """Return the arithmetic of each kind of layer."""
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
            # Plus weight and bias of two layer norms.
            parameters=matrices + 4 * hidden,
            flops=2.0 * matrices + 4.0 * length * hidden,
            linear=dense_block(hidden, 4 * hidden, ""),
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


def _embedding(job: JobSpec, machine: Machine) -> LayerProfile:
    counted = layer_counts(_built_in(job)).embedding
    return _layer(
        job,
        "embedding",
        counted,
        machine,
        activation_bytes=_rows(job) * _TOKEN_BYTES + _kept_bytes(job, counted),
        # Messages of both directions, and the gradient of all embeddings, used or not.
        blocks=[*[_hidden_bytes(job)] * 5, _wide_bytes(job, counted.parameters)],
        output_bytes=_hidden_bytes(job),
        tied_bytes=_tied_bytes(job),
        wide=True,
    )


def _block(job: JobSpec, name: str, machine: Machine) -> LayerProfile:
    counted = layer_counts(_built_in(job)).block
    kept_bytes = _kept_bytes(job, counted)
    return _layer(
        job,
        name,
        counted,
        machine,
        activation_bytes=kept_bytes,
        # Messages of both directions, posted ahead. Gradients replace the kept activations one by
        # one. The largest matrix has its own gradient before it is added.
        blocks=[
            *[_hidden_bytes(job)] * 4,
            *_hidden_blocks(job, 2 * kept_bytes // 5),
            _narrow_bytes(job, counted.parameters) // 3,
        ],
        output_bytes=_hidden_bytes(job),
        passes=_COMPILED_PASSES if job.training.compile else _PASSES,
    )


def _head(job: JobSpec, machine: Machine) -> LayerProfile:
    model = _built_in(job)
    counted = layer_counts(model).head
    chunk_bytes = _wide_bytes(job, min(LOSS_CHUNK, _rows(job) * model.vocabulary))
    return _layer(
        job,
        "head",
        counted,
        machine,
        activation_bytes=_kept_bytes(job, counted),
        # A piece of the loss is in memory with the logits, then their gradient with the weight's.
        blocks=[max(chunk_bytes, _narrow_bytes(job, counted.parameters))],
        output_bytes=0,
        tied_bytes=_tied_bytes(job),
    )


def _kept_bytes(job: JobSpec, counted: LayerCount) -> int:
    """Return the bytes of a micro-batch kept from a layer's forward to its backward."""
    rows = _rows(job)
    narrow, wide = _narrow_bytes(job, counted.kept), _wide_bytes(job, counted.kept_wide)
    return rows * (narrow + wide + counted.masks)


def _narrow_bytes(job: JobSpec, numbers: int) -> int:
    """Return the bytes of so many numbers in the type that layers compute in."""
    return numbers * ACTIVATION_ITEM_BYTES[job.training.precision]


def _wide_bytes(job: JobSpec, numbers: int) -> int:
    """Return the bytes of so many numbers in the type of the trained weights."""
    return numbers * STATE_ITEM_BYTES[job.training.precision]


def _hidden_blocks(job: JobSpec, size: int) -> list[int]:
    """Split so many bytes of activations into blocks of one hidden state, the most common size."""
    count, rest = divmod(size, _hidden_bytes(job))
    return [_hidden_bytes(job)] * count + [rest]


def _tied_bytes(job: JobSpec) -> int:
    """Return the bytes of the token embedding where the head shares it; else 0."""
    model = _built_in(job)
    return _wide_bytes(job, model.vocabulary * model.hidden) if model.tied else 0


def _hidden_bytes(job: JobSpec) -> int:
    """Return the bytes that a layer sends to the next one."""
    return _narrow_bytes(job, _rows(job) * _built_in(job).hidden)


def _layer(
    job: JobSpec,
    name: str,
    counted: LayerCount,
    machine: Machine,
    *,
    activation_bytes: int,
    blocks: Sequence[int],
    output_bytes: int,
    tied_bytes: int = 0,
    wide: bool = False,
    passes: int = _PASSES,
) -> LayerProfile:
    """Build the profile of a layer. `wide`: it computes with the weights in their trained type;
    `passes`: times that its forward reads or writes each byte that it keeps."""
    narrow = 0 if wide else narrow_bytes(counted.parameters, job.training.precision)
    products_s = _rows(job) * counted.flops / machine.flops_per_s(job.training)
    moved = passes * activation_bytes + (0 if wide else narrow)
    wide_s = products_s + _moving_s(moved, machine, nominal=False)
    forward_s, weights_s = wide_s, wide_s
    if job.training.precision == "fp8":
        each = _COMPILED_CAST_BYTES if job.training.compile else _CAST_BYTES
        weights, taken = float8_weights(counted)
        casts = (weights + _rows(job) * taken) * each
        gain_s = machine.float8_gain_s(2.0 * weights * _rows(job))
        forward_s += _moving_s(casts, machine, nominal=False) - gain_s
        if job.training.fp8_recipe != "rowwise_with_gw_hp" and fit_float8(_rows(job)):
            weights_s = forward_s
        # The larger factor of a product: a third of the weights, or half of what they take.
        factor = max(weights // 3, _rows(job) * taken // 2)
        blocks = [*blocks, factor * (1 if job.training.compile else _CAST_WORKING_BYTES)]
    if machine.is_gpu:
        forward_s = max(forward_s, machine.least_s)
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
        backward_s={1: (1 + again) * forward_s + max(forward_s, weights_s)},
        parameter_bytes=_wide_bytes(job, counted.parameters),
        state_bytes=state_bytes(counted.parameters, job.training) + narrow,
        moved_bytes=moved_bytes(counted.parameters, job.training),
        sum_bytes=_wide_bytes(job, counted.parameters),
        tied_bytes=tied_bytes,
        activation_bytes=activation_bytes,
        working_bytes=with_holes(heap, kept),
        mapped_bytes=mapped,
        output_bytes=output_bytes,
    )


def float8_weights(counted: LayerCount) -> tuple[int, int]:
    """Return the number of a layer's weights that multiply in float8, and of the numbers per token
    that they take."""
    fitting = [
        [one for one in group if fit_float8(one.inputs, one.outputs)] for group in counted.linear
    ]
    weights = sum(one.inputs * one.outputs for group in fitting for one in group)
    return weights, sum(group[0].inputs for group in fitting if group)


def with_sums(layer: LayerProfile, training: TrainingSpec) -> LayerProfile:
    """Return `layer`, profiled with full gradient sums, for the job's kind of sums. Sums in fewer
    bytes need a copy of half the bytes beside them while they are under way."""
    if training.gradient_sums == "full":
        return layer
    return replace(
        layer,
        gradient_bytes=layer.parameter_bytes // 2,
        sum_bytes=layer.sum_bytes + layer.sum_bytes // 2,
        tied_bytes=layer.tied_bytes + layer.tied_bytes // 2,
    )


def gathered_bytes(job: JobSpec, number: int, parameter_bytes: int) -> int:
    """Return the bytes of the weights of layer `number` as it computes with them.

    In a bf16 or fp8 job the weights of a built-in model, except for its embedding, have half the
    bytes of the trained ones.
    """
    narrow = job.training.narrow and isinstance(job.model, ModelSpec) and number > 0
    return parameter_bytes // 2 if narrow else parameter_bytes
