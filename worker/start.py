"""Start of a worker: checks of the job on this node, then the context of all generations.

Owns the order of these steps: loader processes are forked before any thread starts, and code of the
user's runs only where its errors count as this node's. Must not know generations.
"""

import hashlib

import torch

from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Launch
from oobleck.host.address import is_loopback
from oobleck.host.system.memory import total_memory
from oobleck.worker.checkpoint.location import check_place
from oobleck.worker.checkpoint.output import check_writable
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.opening import Data, HeldOut, open_dataset, start_loaders
from oobleck.worker.models.own import check_code
from oobleck.worker.models.registry import check_weights
from oobleck.worker.profiling.preflight import on_this_node, preflight
from oobleck.worker.runtime import code
from oobleck.worker.runtime.control import Control, FaultInjector
from oobleck.worker.runtime.device import clock_of
from oobleck.worker.runtime.errors import NodeError
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state import optimizer, precision
from oobleck.worker.state.layout import check_no_decay
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import TrainingProgress
from oobleck.worker.transport.connect import Connector
from oobleck.worker.transport.links.hub import Links


def start(launch: Launch, control: Control) -> tuple[WorkerContext, Data]:
    """Check the job on this node; return the worker's context and data.

    Raise DataError or NodeError if this node lacks the data or the device, JobError if the model
    cannot be built or saved.
    """
    job = launch.job
    if launch.no_code:
        raise NodeError(launch.no_code)
    code.allow(launch.allow_code)
    loaders = start_loaders(job)  # first: a fork beside threads may hang
    connector = Connector(launch)
    torch.set_float32_matmul_precision(job.training.float32_matmul)
    _check_places(job)
    precision.check(job, connector.device)
    # On CPUs the check by the node's first worker holds for all its workers.
    alike = connector.device.type == "cpu" and launch.worker.slot > 0
    with on_this_node(job, control, launch.ready_by):
        check_code(job)
        optimizer.check(job.training.optimizer)
        evaluation = job.evaluation
        share = (evaluation.fraction or 0.0) if evaluation else 0.0
        dataset = open_dataset(job, job.data, loaders, held_out=share)
        held_out = HeldOut(job, evaluation, dataset, loaders) if evaluation else None
        passed = launch.passed or alike
        preflight(job, connector.device, dataset, passed=passed, workers=launch.workers)
    check_no_decay(job.model, job.training.optimizer.no_decay)
    data = Data(dataset=dataset, held_out=held_out)
    return _make_context(launch, control, connector, data), data


def _check_places(job: JobSpec) -> None:
    """Raise JobError or NodeError unless output and checkpoints have a usable place."""
    if job.output is not None:
        check_writable(job.output)
    if job.checkpoint is not None:
        check_place(job.checkpoint)


def _make_context(
    launch: Launch, control: Control, connector: Connector, data: Data
) -> WorkerContext:
    """Return the context; open the links. Raise DataError if initial weights are missing."""
    job, device = launch.job, connector.device
    weights = check_weights(job.model)
    return WorkerContext(
        worker=launch.worker,
        job=job,
        job_id=launch.job_id,
        control=control,
        faults=FaultInjector(launch, control),
        timeline=Timeline(clock_of(device)),
        stopwatch=Stopwatch.on(device),
        connector=connector,
        links=Links(
            launch.address,
            silence_s=launch.silence_s,
            sealed=job.seals_links(on_loopback=is_loopback(launch.address)),
            # It costs no honest peer its link: one so far ahead would exhaust this worker's memory.
            most_early_bytes=total_memory() // (2 * launch.workers),
        ),
        state=ModelState(job, device),
        progress=TrainingProgress(),
        records=control.records,
        chunk_bytes=launch.chunk_bytes,
        data=data.dataset.fingerprint,
        base=weights if job.model.rests_on_files else b"",
        inputs=_inputs(data.fingerprint, weights),
    )


def _inputs(data: bytes, weights: bytes) -> bytes:
    """Return one SHA-256 for the data and the initial weights, or the data's if there are none."""
    return hashlib.sha256(data + weights).digest() if weights else data
