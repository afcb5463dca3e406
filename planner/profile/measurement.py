"""Measurements by workers, and the profile of the whole model made from them.

Owns the types of a measurement, how several are combined, and the key under which measurements are
reused. Must not know how anything is measured.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from oobleck.core.codec import encode
from oobleck.core.job.model import AnyModel, ModelSpec
from oobleck.core.job.spec import JobSpec, Recompute
from oobleck.core.profile import (
    BYTES,
    InvalidProfile,
    LayerProfile,
    LinkMeasurement,
    Links,
    Measurement,
    Profile,
)
from oobleck.core.sharing import with_exchanges
from oobleck.core.units import count
from oobleck.planner.profile.estimate import estimate_profile, gathered_bytes, with_sums
from oobleck.planner.profile.machine import NOMINAL

#: Version of the method of measuring, a part of the key.
_METHOD = 6
_TIMES = ("forward_s", "backward_s", "backward_input_s", "update_s")
#: Byte counts that follow from the model alone, and their tolerance in a profile.
_COMPARED = ("parameter_bytes", "output_bytes")
_SAME_BYTES = 0.01


def profile_key(
    job: JobSpec,
    *,
    devices: Collection[str],
    worker_slots: int,
    workers_per_host: int,
    several_nodes: bool,
) -> str:
    """Return the name, usable for a file, under which measurements of this model on such machines
    are reused.

    `workers_per_host`: most workers that compute on one host at a time, over all of its nodes. They
    share its memory and cores, and are measured under that load. `several_nodes`: a link between
    nodes can be measured.
    """
    training = job.training
    matters = {
        "method": _METHOD,
        "model": _without_weights(job.model),
        "microbatch": training.microbatch,
        "precision": training.precision,
        "float32_matmul": training.float32_matmul,
        "recompute": training.recompute,
        "optimizer": (training.optimizer.label, training.optimizer.moments),
        "devices": sorted(set(devices)),
        "worker_slots": worker_slots,
        "workers_per_host": workers_per_host,
        "several_nodes": several_nodes,
    }
    if training.gradient_sums != "full":
        matters["gradient_sums"] = training.gradient_sums
    if training.precision == "fp8":
        matters["fp8_recipe"] = training.fp8_recipe
    if training.compile:
        matters["compile"] = True
    digest = hashlib.sha256(encode(matters)).hexdigest()[:16]
    return f"{job.model.label}-b{training.microbatch}-{training.precision}-{digest}"


def _without_weights(model: AnyModel) -> AnyModel:
    return replace(model, weights=None) if isinstance(model, ModelSpec) else model


def assemble_profile(
    job: JobSpec,
    measurements: Sequence[Measurement],
    links: Iterable[LinkMeasurement],
    *,
    gpus_per_node: int,
    memory_bytes: int,
) -> tuple[Profile, dict[str, object]]:
    """Return the profile of `job`'s model, and notes on how it was made.

    The median counts among devices of one kind, and the slowest among kinds: any worker may get any
    stage. `memory_bytes`: memory of a worker that training may use. Raises ValueError where
    measurements contradict each other.
    """
    if not measurements:
        raise ValueError("nothing was measured")
    wires, filled = _links(links)
    order = job.model.order
    if any(len(m.kinds) != 1 + max(order) for m in measurements):
        raise ValueError("not each kind of the model's layers was measured")
    kinds = []
    for kind in range(1 + max(order)):
        profiled = _combine([(m.device, m.kinds[kind]) for m in measurements])
        profiled = with_sums(profiled, job.training)
        gathered = gathered_bytes(job, order.index(kind), profiled.parameter_bytes)
        kinds.append(with_exchanges(profiled, wires, gathered))
    names = [layer.name for layer in _expected(job)]
    try:
        profile = Profile(
            microbatch=job.training.microbatch,
            gpus_per_node=gpus_per_node,
            gpu_memory_bytes=memory_bytes,
            layers=tuple(
                replace(kinds[kind], name=name) for kind, name in zip(order, names, strict=True)
            ),
            links=wires,
        )
    except InvalidProfile as error:  # such as times of a faulty clock
        raise ValueError(f"the measurement makes no sense: {error}") from error
    notes = {
        "devices": sorted({m.device for m in measurements}),
        "torch": sorted({m.torch for m in measurements}),
        "workers": len(measurements),
        "precision": job.training.precision,
        "microbatch": job.training.microbatch,
        **filled,
    }
    return profile, notes


def _combine(measured: Sequence[tuple[str, LayerProfile]]) -> LayerProfile:
    layers = [layer for _, layer in measured]
    by_device: dict[str, list[LayerProfile]] = {}
    for device, layer in measured:
        by_device.setdefault(device, []).append(layer)

    def slowest(times_of: Callable[[LayerProfile], Mapping[int, float]]) -> dict[int, float]:
        allowed = set.intersection(*(set(times_of(layer)) for layer in layers))
        return {
            gpus: max(
                median(times_of(layer)[gpus] for layer in alike) for alike in by_device.values()
            )
            for gpus in sorted(allowed)
        }

    forward_s, backward_s, backward_input_s, update_s = (
        slowest(lambda layer, name=name: getattr(layer, name))  # type: ignore[misc]
        for name in _TIMES
    )
    return LayerProfile(
        name=layers[0].name,
        forward_s=forward_s,
        backward_s=backward_s,
        # The median of the part may exceed the median of the whole backward.
        backward_input_s={g: min(s, backward_s[g]) for g, s in backward_input_s.items()},
        update_s=update_s,
        **{name: max(getattr(layer, name) for layer in layers) for name in BYTES},
    )


def _links(measured: Iterable[LinkMeasurement]) -> tuple[Links, dict[str, object]]:
    """Return the links, and which of them are not measured. A missing link gets the other one's
    numbers, or the estimate."""
    by_scope = {link.scope: link for link in measured}
    intra, inter = by_scope.get("intra_node"), by_scope.get("inter_node")
    if intra is None and inter is None:
        links = Links(
            intra_node_bytes_per_s=NOMINAL.intra_node_bytes_per_s,
            inter_node_bytes_per_s=NOMINAL.inter_node_bytes_per_s,
            latency_s=NOMINAL.latency_s,
        )
        return links, {"intra_node_link": "estimated", "inter_node_link": "estimated"}
    either = inter or intra
    assert either is not None, "one of them is there"
    links = Links(
        intra_node_bytes_per_s=(intra or either).bytes_per_s,
        inter_node_bytes_per_s=(inter or either).bytes_per_s,
        latency_s=either.latency_s,
    )
    return links, {
        "intra_node_link": "measured" if intra else "the inter-node link's",
        "inter_node_link": "measured" if inter else "the intra-node link's",
    }


def check_fits(profile: Profile, job: JobSpec) -> None:
    """Check `profile` against `job`'s model; raises ValueError where they do not match or it lacks
    a time that training needs."""
    model = job.model
    if len(profile.layers) != model.layer_count:
        parts = ""
        if isinstance(model, ModelSpec):
            parts = f" (embedding, {count(model.layers, 'block')}, head)"
        raise ValueError(
            f"the profile has {count(len(profile.layers), 'layer')}, and the model has "
            f"{model.layer_count}{parts}; profile this model"
        )
    if profile.microbatch != job.training.microbatch:
        raise ValueError(
            f"the profile was measured with microbatch {profile.microbatch}, and the job has "
            f"{job.training.microbatch}; profile again, or set training.microbatch to that"
        )
    expected = _expected(job)
    for number, (layer, wanted) in enumerate(zip(profile.layers, expected, strict=True)):
        # The head's output is not sent, so its bytes are not compared.
        for name in _COMPARED if number < len(expected) - 1 else _COMPARED[:1]:
            has, should = getattr(layer, name), getattr(wanted, name)
            if abs(has - should) > _SAME_BYTES * should:
                raise ValueError(
                    f"layers[{number}].{name}: {has}, and that layer of the job's model has "
                    f"{should}: it is a profile of another model or precision; profile this model"
                )
        if abs(layer.state_bytes - wanted.state_bytes) > _SAME_BYTES * wanted.state_bytes:
            raise ValueError(
                f"layers[{number}].state_bytes: {layer.state_bytes}, and with the job's optimizer "
                f"({_optimizer(job)}) that layer has {wanted.state_bytes}: it is a profile for "
                "another optimizer; profile again, or set training.optimizer to that one"
            )
        if max(layer.forward_s) > 1 and not model.may_share(number):
            raise ValueError(
                f'layers[{number}].forward_s["{max(layer.forward_s)}"]: that layer of the job\'s '
                "model draws random numbers, as dropout does, or has hooks of gradients or code "
                "for the rows of a whole micro-batch, so that it is never shared by workers of a "
                'node; leave in all of its times the entry "1" alone'
            )
    if not isinstance(model, ModelSpec):
        return  # a user's layer may keep any number of bytes
    recompute = job.training.recompute
    for number, layer in enumerate(profile.layers[1:-1], 1):
        kind: Recompute = "layer" if _keeps_input_alone(layer) else "none"
        if kind != recompute:
            raise ValueError(
                f"layers[{number}].activation_bytes: {layer.activation_bytes}, as with recompute "
                f"{kind}, and the job has {recompute}; profile again, or set training.recompute "
                f"to {kind}"
            )


def _optimizer(job: JobSpec) -> str:
    optimizer = job.training.optimizer
    return f"{optimizer.label}, {count(optimizer.moments, 'moment')}"


def _keeps_input_alone(block: LayerProfile) -> bool:
    """Return whether a block keeps only its input. Otherwise a transformer block keeps at least ten
    times as much, in every precision.
    """
    return block.activation_bytes < 2 * block.output_bytes


def check_measured(profile: Profile, job: JobSpec, *, gpus_per_node: int) -> None:
    """Check that `assemble_profile` could have made `profile` for `job` on nodes of so many GPUs;
    raises ValueError."""
    check_fits(profile, job)
    if profile.gpus_per_node != gpus_per_node:
        raise ValueError(
            f"gpus_per_node: {profile.gpus_per_node}, and the nodes have {gpus_per_node}"
        )
    for number, (layer, wanted) in enumerate(zip(profile.layers, _expected(job), strict=True)):
        if 1 not in layer.forward_s:
            raise ValueError(f'layers[{number}].forward_s["1"]: is missing, and it is measured')
        if layer.name != wanted.name:
            raise ValueError(
                f"layers[{number}].name: {layer.name!r}, and the model has {wanted.name!r} there"
            )


def _expected(job: JobSpec) -> tuple[LayerProfile, ...]:
    """Return the names and byte counts of `job`'s model."""
    return estimate_profile(job, gpus_per_node=1, memory_per_worker_bytes=1 << 30).layers
