"""Metrics of the agent and of its workers, read from what it knows of them. Must not know how they
are shown."""

from collections.abc import Iterable, Iterator

import psutil

from oobleck.agent.state import NodeState
from oobleck.agent.worker import WorkerState
from oobleck.core.ids import NodeName
from oobleck.host.metrics.families import Family, Reading, single

_SLOT = ("slot",)

BUILD = Family(
    "gauge", "oobleck_agent_info", "1; the labels tell node and version.", ("node", "version")
)
HEARD = Family("gauge", "oobleck_agent_connected", "1 while a master hears the agent.")
LEAVING = Family("gauge", "oobleck_agent_leaving", "1 once the agent was told to end.")
SLOTS = Family("gauge", "oobleck_agent_worker_slots", "Workers that the node has room for.")
UP = Family("gauge", "oobleck_worker_up", "1 where others can call the slot's worker.", _SLOT)
FAILED = Family(
    "gauge", "oobleck_worker_start_failed", "1 where no worker of the job is started again.", _SLOT
)
GENERATION = Family(
    "gauge", "oobleck_worker_generation", "Newest plan that the worker has entered.", _SLOT
)
STEP = Family(
    "gauge", "oobleck_worker_committed_step", "Newest step that the worker has committed.", _SLOT
)
COMPUTED = Family(
    "counter",
    "oobleck_worker_compute_seconds_total",
    "Time that the worker has computed in whole steps; it begins anew with each generation.",
    _SLOT,
)
PEAK = Family(
    "gauge",
    "oobleck_worker_device_memory_peak_bytes",
    "Most memory on the worker's device at a time since its generation began.",
    _SLOT,
)
RESIDENT = Family(
    "gauge", "oobleck_worker_resident_memory_bytes", "Main memory that the worker takes.", _SLOT
)
PROCESSOR = Family(
    "counter",
    "oobleck_worker_processor_seconds_total",
    "Processor time of the worker's process.",
    _SLOT,
)


def read(state: NodeState, node: NodeName, version: str) -> Iterator[Reading]:
    yield Reading(BUILD, {(node, version): 1})
    yield single(HEARD, state.alone_since is None)
    yield single(LEAVING, state.leave_at is not None or state.shutting_down)
    yield single(SLOTS, state.slot_count)
    workers = {worker.slot: worker for worker in state.serving()}
    up = {(str(n),): float(n in workers and workers[n].card != "") for n in range(state.slot_count)}
    yield Reading(UP, up)
    failed = {(str(n),): float(slot.failed is not None) for n, slot in enumerate(state.slots)}
    yield Reading(FAILED, failed)
    there = workers.values()
    yield Reading(GENERATION, {(str(worker.slot),): worker.entered for worker in there})
    steps = {(str(w.slot),): w.committed_step for w in there if w.committed_step is not None}
    yield Reading(STEP, steps)
    computed = {(str(w.slot),): w.compute.seconds for w in there if w.compute is not None}
    yield Reading(COMPUTED, computed)
    peaks = {(str(w.slot),): w.memory.peak_bytes for w in there if w.memory is not None}
    yield Reading(PEAK, peaks)
    yield from _processes(there)


def _processes(workers: Iterable[WorkerState]) -> Iterator[Reading]:
    resident, processor = {}, {}
    for worker in workers:
        if worker.pid is None:
            continue
        try:
            process = psutil.Process(worker.pid)
            times = process.cpu_times()
            resident[str(worker.slot),] = process.memory_info().rss
            processor[str(worker.slot),] = times.user + times.system
        except psutil.Error:  # it has just ended
            continue
    yield Reading(RESIDENT, resident)
    yield Reading(PROCESSOR, processor)
