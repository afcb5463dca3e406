"""Machines as planning sees them, and the quick answers that follow from them.

Pure and remembered. Must not know plans, nor how long it takes to make them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from oobleck.core.errors import ModelTooLarge, PlanInfeasible
from oobleck.core.job.spec import JobSpec
from oobleck.core.profile import InvalidProfile, Profile
from oobleck.master.state.job import Job
from oobleck.master.state.node import Node
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.planner.profile.machine import slowest_of
from oobleck.planner.profile.memory import budget_bytes
from oobleck.planner.search.specification import node_specification, on_usable_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Properties of the nodes that a plan may use."""

    worker_slots: int
    memory_bytes: int
    #: Names of what their workers compute on.
    device_kinds: frozenset[str] = frozenset()
    #: The job's profile; None: the estimate.
    profile: Profile | None = None

    @classmethod
    def of(cls, job: Job, nodes: Sequence[Node]) -> "Machines":
        """The weakest of `nodes` counts, since any of them may get any stage."""
        if not nodes:
            raise PlanInfeasible("no node is ready; start oobleck-agent on the machines to use")
        limit = job.spec.resources.memory_per_worker_bytes
        return cls(
            worker_slots=nodes[0].facts.worker_slots,
            memory_bytes=limit or min(node.facts.memory_per_worker_bytes for node in nodes),
            device_kinds=frozenset(node.facts.device_kind for node in nodes),
            profile=job.profiling.chosen.profile if job.profiling.chosen is not None else None,
        )


@lru_cache(maxsize=32)
def profile_on(spec: JobSpec, machines: Machines) -> Profile:
    """The job's profile, or its estimate, with the memory and the GPUs that can be used.

    Raises ModelTooLarge.
    """
    limit = spec.resources.memory_per_worker_bytes
    try:
        if machines.profile is not None:
            memory = budget_bytes(limit, machines.memory_bytes)
            profile = replace(machines.profile, gpu_memory_bytes=memory)
        else:
            profile = estimate_profile(
                spec,
                gpus_per_node=machines.worker_slots,
                memory_per_worker_bytes=machines.memory_bytes,
                machine=slowest_of(machines.device_kinds, spec.training),
            )
    except InvalidProfile as error:  # of a model beyond all machines
        raise ModelTooLarge(f"the model's profile: {error}") from error
    return on_usable_gpus(
        profile, gpus=machines.worker_slots, min_nodes=spec.resources.min_nodes_per_pipeline
    )


def template_sizes(spec: JobSpec, machines: Machines, nodes: int) -> range:
    """Numbers of nodes of the templates that `nodes` nodes need. Raises PlanInfeasible."""
    sizes = _template_sizes(spec, machines, nodes)
    if isinstance(sizes, PlanInfeasible):
        raise sizes.with_traceback(None)
    return sizes


@lru_cache(maxsize=128)
def _template_sizes(spec: JobSpec, machines: Machines, nodes: int) -> range | PlanInfeasible:
    """A job that waits for nodes asks in every iteration, so the refusal is remembered too."""
    try:
        return node_specification(
            profile_on(spec, machines),
            nodes=nodes,
            fault_tolerance=spec.fault_tolerance,
            min_nodes=spec.resources.min_nodes_per_pipeline,
            shadows=spec.recovery.shadows == "auto",
        )
    except PlanInfeasible as refusal:
        return refusal
