"""The training steps of a single worker, in this process: the real executor over real links."""

import contextlib
import socket
from collections.abc import Iterator

import torch

from oobleck.core.ids import JobId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import Launch, ToWorker
from oobleck.host.ipc.channel import Channel
from oobleck.planner.programs.compiler.own import compile_own
from oobleck.worker.checkpoint.saver import Saver
from oobleck.worker.context import WorkerContext
from oobleck.worker.data.dataset import Dataset
from oobleck.worker.data.opening import Prefetcher
from oobleck.worker.preparation.preparing import Preparing
from oobleck.worker.runtime.control import Control, FaultInjector
from oobleck.worker.runtime.timeline import Stopwatch, Timeline
from oobleck.worker.state.model_state import ModelState
from oobleck.worker.state.progress import TrainingProgress
from oobleck.worker.step.executor import Executor
from oobleck.worker.transport.connect import Connector
from support.director import make_plan, worker_named
from support.meeting import Party

_HOST = torch.device("cpu")


@contextlib.contextmanager
def training(job: JobSpec, device: torch.device = _HOST) -> Iterator[Executor]:
    """Holds all layers, before the first step. `device`: what it computes on."""
    worker = worker_named("a")
    plan = make_plan(1, [[("a", job.model.layer_count)]], [job.training.microbatches])
    launch = Launch(
        worker=worker,
        job_id=JobId("job-1"),
        job=job,
        address="127.0.0.1",
        agent_pid=0,
        device_kind="cpu",
    )
    data = Dataset(job.data, job.model.sequence_length, job.model.vocabulary)
    prefetcher = Prefetcher(data, job.training)
    own, agents = socket.socketpair()
    with own, agents, Party(1) as party:
        (transport,) = party.meet()
        control = Control(Channel(own, ToWorker))
        connector = Connector(launch)
        connector.device = device
        context = WorkerContext(
            worker=worker,
            job=job,
            job_id=launch.job_id,
            control=control,
            faults=FaultInjector(launch, control),
            timeline=Timeline(),
            stopwatch=Stopwatch.on(connector.device),
            connector=connector,
            links=party.links[0],
            state=ModelState(job, device),
            progress=TrainingProgress(),
            records=control.records,
            chunk_bytes=launch.chunk_bytes,
            data=data.fingerprint,
            base=b"",
            inputs=b"",
        )
        for layer in range(job.model.layer_count):
            context.state.initialise(layer)
        program = compile_own(plan, worker, tied=job.model.ties)
        preparing = Preparing(context)
        yield Executor(context, plan, program, transport, prefetcher, Saver(context), preparing)
    prefetcher.close()
