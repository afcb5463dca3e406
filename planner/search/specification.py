"""Node specification: the template sizes that a cluster needs (Oobleck §4.1.1)."""

from dataclasses import replace
from functools import lru_cache

from oobleck.core.errors import ModelTooLarge, PlanInfeasible
from oobleck.core.profile import MOST_BYTES, Profile
from oobleck.core.units import are, count, enough_bytes, format_bytes
from oobleck.planner.search.templates import feasible_sizes

#: Resolution of missing memory in messages, as a part of it.
_MEMORY_STEPS = 1000


def node_specification(
    profile: Profile,
    *,
    nodes: int,
    fault_tolerance: int,
    min_nodes: int = 1,
    shadows: bool = False,
) -> range:
    """Return the template sizes: n0 and the following sizes, as far as `nodes` nodes can use them.

    n0 is the fewest nodes, at least `min_nodes`, that hold the model. The largest is what the other
    `fault_tolerance` pipelines leave, nodes - fault_tolerance * n0 (§4.1.1), but at least 2 n0 - 1.
    Only n0 .. 2 n0 - 1 make up every number of nodes from n0 on; a cluster with exactly the nodes
    it needs would miss a size after its first loss. No size exceeds the number of layers or of
    nodes, or leaves a gap.

    With `shadows` n0 nodes, if more than `fault_tolerance`, are accepted here; the plan decides
    (`oobleck.planner.search.firstplan`). Raises PlanInfeasible with the missing bytes or nodes.
    """
    for name, value, least in (
        ("nodes", nodes, 1),
        ("fault_tolerance", fault_tolerance, 0),
        ("min_nodes", min_nodes, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    layers = len(profile.layers)
    sizes = feasible_sizes(profile, min(nodes, layers))
    if not any(size >= min_nodes for size in sizes):
        sizes = feasible_sizes(profile, layers)
    if not sizes:
        raise ModelTooLarge(_memory_cause(profile))
    usable = [size for size in sizes if size >= min_nodes]
    if not usable:
        raise ModelTooLarge(
            f"a pipeline cannot have {min_nodes} nodes: the model of {layers} layers "
            f"on {profile.gpus_per_node} workers per node fits {sizes[-1]} at most; lower "
            "min_nodes_per_pipeline"
        )
    smallest = usable[0]
    needed = (fault_tolerance + 1) * smallest
    least = max(smallest, fault_tolerance + 1) if shadows else needed
    if nodes < least:
        cause = _nodes_cause(profile, nodes, fault_tolerance, smallest, min_nodes, least)
        raise PlanInfeasible(cause)
    others = min(fault_tolerance, nodes // smallest - 1)
    largest = min(nodes, max(nodes - others * smallest, 2 * smallest - 1))
    stop = smallest
    while stop in sizes and stop <= largest:
        stop += 1
    return range(smallest, stop)


def on_usable_gpus(profile: Profile, *, gpus: int, min_nodes: int = 1) -> Profile:
    """Return `profile` for training on nodes of `gpus` GPUs, or of as many of these as can be used.

    A stage has no more GPUs than the profile has times for, and a pipeline no more stages than
    layers. So a node may have more GPUs than it can use. `gpus_per_node` of the result is the most
    that fits some pipeline of at least `min_nodes` nodes.
    """
    layers = len(profile.layers)
    most = max(1, min(gpus, sum(max(la.forward_s) for la in profile.layers) // min_nodes))
    found = [replace(profile, gpus_per_node=used) for used in range(most, 0, -1)]
    fitting = (one for one in found if max(feasible_sizes(one, layers), default=0) >= min_nodes)
    return next(fitting, found[0])


def _nodes_cause(
    profile: Profile, nodes: int, fault_tolerance: int, smallest: int, min_nodes: int, least: int
) -> str:
    """Describe how many nodes are missing, and the alternatives."""
    needed = (fault_tolerance + 1) * smallest
    fewer = f", or {least} with memory for shadows" if least < needed else ""
    fixes = [f"add {count(needed - nodes, 'node')}"]
    possible = nodes // smallest - 1
    if possible >= 0:
        fixes.append(f"lower fault_tolerance to {possible}")
    memory = _least_memory(profile, min_nodes, nodes // (fault_tolerance + 1))
    if memory is not None and memory > profile.gpu_memory_bytes:
        fixes.append(f"use workers with {_more_memory(profile, memory)}")
    return (
        f"needs {count(needed, 'node')}{fewer}: fault_tolerance {fault_tolerance} and pipelines of "
        f"at least {count(smallest, 'node')}; {are(nodes)} live; {', '.join(fixes[:-1])}"
        f"{' or ' if len(fixes) > 1 else ''}{fixes[-1]}"
    )


def _memory_cause(profile: Profile) -> str:
    """Describe how much memory per GPU is enough, and for how many nodes."""
    layers = profile.layers
    if any(min(layer.forward_s) > profile.gpus_per_node for layer in layers):
        return (
            f"some layer has no time for {profile.gpus_per_node} workers or fewer: profile it for "
            "those that a node has"
        )
    memory = _least_memory(profile, 1, len(layers))
    if memory is None:
        return (
            f"no cut of {len(layers)} layers uses all {profile.gpus_per_node} workers of a node; "
            "lower --workers-per-node"
        )
    fewest = _sizes_with(profile, memory, len(layers))[0]
    return (
        f"the model does not fit on any number of nodes: a worker needs "
        f"{_more_memory(profile, memory)}, for pipelines of {count(fewest, 'node')}; use workers "
        "with more memory, a smaller microbatch or a smaller model"
    )


def _more_memory(profile: Profile, memory: int) -> str:
    have = profile.gpu_memory_bytes
    return (
        f"at least {enough_bytes(memory)}, {enough_bytes(memory - have)} more than training may "
        f"use of one ({format_bytes(have)})"
    )


@lru_cache(maxsize=16)  # needed repeatedly while a job waits
def _least_memory(profile: Profile, min_nodes: int, most_nodes: int) -> int | None:
    """Return about the least bytes per GPU with which pipelines of `min_nodes` to `most_nodes`
    nodes fit; None: no memory is enough."""
    layers, most = profile.layers, min(most_nodes, len(profile.layers))

    def fit(memory: int) -> bool:
        sizes = _sizes_with(profile, memory, most) if most > 0 else ()
        return max(sizes, default=0) >= min_nodes

    everything = sum(
        layer.state_bytes
        + layer.sum_bytes
        + layer.working_bytes
        + layer.mapped_bytes
        + len(layers) * layer.activation_bytes
        for layer in layers
    )
    low = profile.gpu_memory_bytes
    # With everything, one GPU holds the whole model.
    high = min(max(low, everything), MOST_BYTES)
    if not fit(high):
        return None
    while high - low > max(1, high // _MEMORY_STEPS):
        middle = (low + high) // 2
        if fit(middle):
            high = middle
        else:
            low = middle
    return high


def _sizes_with(profile: Profile, memory_bytes: int, most_nodes: int) -> tuple[int, ...]:
    return feasible_sizes(replace(profile, gpu_memory_bytes=memory_bytes), most_nodes)
