"""Node specification: which template sizes a cluster needs (Oobleck §4.1.1)."""

from dataclasses import replace

from oobleck.planner.errors import PlanInfeasible
from oobleck.planner.profile import Profile
from oobleck.planner.templates import feasible_sizes
from oobleck.planner.units import are, count, format_bytes


def node_specification(
    profile: Profile, *, nodes: int, fault_tolerance: int, min_nodes: int = 1
) -> range:
    """The sizes n0 .. min(nodes - fault_tolerance * n0, number of layers), as far as they fit.

    n0 is the fewest nodes, `min_nodes` at least, that hold the model. Raises PlanInfeasible with
    the bytes or the nodes that are missing.
    """
    for name, value, least in (
        ("nodes", nodes, 1),
        ("fault_tolerance", fault_tolerance, 0),
        ("min_nodes", min_nodes, 1),
    ):
        if value < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")
    sizes = feasible_sizes(profile, len(profile.layers))
    if not sizes:
        raise PlanInfeasible(_memory_cause(profile))
    usable = [size for size in sizes if size >= min_nodes]
    if not usable:
        raise PlanInfeasible(
            f"a pipeline cannot have {min_nodes} nodes: the model of {len(profile.layers)} layers "
            f"on {profile.gpus_per_node} GPUs per node fits {sizes[-1]} at most; lower "
            "min_nodes_per_pipeline"
        )
    smallest = usable[0]
    needed = (fault_tolerance + 1) * smallest
    if nodes < needed:
        raise PlanInfeasible(
            f"needs {count(needed, 'node')}: fault_tolerance {fault_tolerance} and pipelines of at "
            f"least {count(smallest, 'node')}; {are(nodes)} live"
        )
    stop = smallest
    while stop in sizes and stop <= nodes - fault_tolerance * smallest:
        stop += 1
    return range(smallest, stop)


def _memory_cause(profile: Profile) -> str:
    """How much memory per GPU would do, at any number of nodes."""
    have = profile.gpu_memory_bytes
    if any(min(layer.forward_s) > profile.gpus_per_node for layer in profile.layers):
        return (
            f"some layer has no time for {profile.gpus_per_node} GPUs or fewer: profile it for "
            "the GPUs that a node has"
        )
    low, high = have, have
    layers = profile.layers
    everything = sum(layer.state_bytes + len(layers) * layer.activation_bytes for layer in layers)
    while high < everything:  # from here on one GPU would hold the whole model
        high *= 2
    if not feasible_sizes(replace(profile, gpu_memory_bytes=high), len(layers)):
        return (
            f"no cut of {len(layers)} layers uses all {profile.gpus_per_node} GPUs of a node; use "
            f"fewer GPUs per node"
        )
    while high - low > 1:
        middle = (low + high) // 2
        if feasible_sizes(replace(profile, gpu_memory_bytes=middle), len(layers)):
            high = middle
        else:
            low = middle
    return (
        f"the model does not fit on any number of nodes: a GPU needs at least {format_bytes(high)} "
        f"({high} bytes), {high - have} bytes more than gpu_memory_bytes ({have}); use GPUs with "
        "more memory, a smaller microbatch or a smaller model"
    )
