"""Plays agent and master for real worker processes: forks them, hands out plans, takes reports.

The engine is tested with it on its own: real processes, real links, real kills, and plans
that the test chooses, down to the cut of every pipeline.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import IO

import msgspec

from bench.support.preloaded import Preloaded
from oobleck.core.ids import Generation, Incarnation, JobId, NodeName, WorkerId
from oobleck.core.job.spec import JobSpec
from oobleck.core.messages import (
    Assign,
    CheckpointSaved,
    ChildExited,
    Committed,
    Evaluated,
    EvaluationRecord,
    Failed,
    FaultRule,
    Finished,
    Fork,
    Forked,
    FromWarm,
    FromWorker,
    Launch,
    PeerLost,
    PhaseReached,
    Ready,
    Recorded,
    Rendezvous,
    Restored,
    Save,
    SaveFailed,
    StepRecord,
    Stop,
    Warm,
)
from oobleck.core.plan import Pipeline, Plan
from oobleck.core.routes import Hold
from oobleck.core.schedules import Schedule
from oobleck.host.ipc.channel import Channel
from oobleck.host.ipc.marker import Marker
from oobleck.worker.transport.links.calls import ANSWER_LIMIT_S
from support import devices
from support.devices import Transport
from support.fake_switch import Switch
from support.folders import SUPPORT
from support.waiting import PATIENCE_S, is_stopped

DEADLINE_S = 400.0


def worker_named(name: str) -> WorkerId:
    """`n` is worker 0 of node n, `n/1` its worker 1."""
    node, _, slot = name.partition("/")
    return WorkerId(NodeName(node), int(slot or 0))


#: A stage: the node, its layers, and its workers (1) where they are more.
Cut = tuple[str, int] | tuple[str, int, int]


def make_plan(
    generation: int,
    cuts: Sequence[Sequence[Cut]],
    shares: Sequence[int],
    *,
    resident: bool = False,
    schedule: Schedule = "1f1b",
) -> Plan:
    """A plan of these pipelines; a node's workers go to its stages in order. `resident`: all
    stages of several workers."""
    pipelines = []
    for cut, share in zip(cuts, shares, strict=True):
        stages, layer = [], 0
        slots: Counter[str] = Counter()
        for node, count, *several in cut:
            first, number = slots[node], (several or [1])[0]
            slots[node] += number
            workers = tuple(WorkerId(NodeName(node), first + i) for i in range(number))
            stages.append(
                Hold(
                    first_layer=layer,
                    last_layer=layer + count - 1,
                    workers=workers,
                    resident=resident and number > 1,
                )
            )
            layer += count
        nodes = tuple(NodeName(node) for node in dict.fromkeys(node for node, *_ in cut))
        pipelines.append(Pipeline(nodes=nodes, stages=tuple(stages), microbatches=share))
    return Plan.of_pipelines(pipelines, generation=Generation(generation), schedule=schedule)


@dataclass
class LiveWorker:
    """One worker process and what it has said."""

    worker: WorkerId
    incarnation: Incarnation
    channel: Channel[FromWorker]
    #: What it writes.
    log: IO[bytes]
    pid: int = 0
    card: str = ""
    said: list[FromWorker] = field(default_factory=list)
    gone: bool = False

    def written(self) -> str:
        return os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")

    def close(self) -> None:
        sys.stderr.write(self.written())
        self.log.close()
        self.channel.close()


#: Which code of its user's each worker runs, of which nothing is asked here.
MARKER = Marker()


class WarmWorkers:
    """A real warm process; serves many directors one after the other. A context manager."""

    def __init__(
        self,
        within: Sequence[str] = (),
        *,
        preloaded: Preloaded | None = None,
        answer_limit_s: float = ANSWER_LIMIT_S,
        before: str = "",
    ) -> None:
        """`within`: the command, if any, that runs it, as in a network of its own; `preloaded`:
        forks it, else it loads its libraries; `answer_limit_s`: that of its workers for each
        other's answer to a call; `before`: a line of Python that it runs first."""
        self.socket, theirs = socket.socketpair()
        self._ended = ExitStack()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "PYTHONPATH": str(SUPPORT.parent),
        }
        asked = ("support.warmed", str(answer_limit_s), before)
        if preloaded is not None:
            started = preloaded.start(
                *asked, environment=environment, files=(theirs.fileno(), 1, 2), timeout_s=PATIENCE_S
            )
            self._ended.callback(started.close)
            self._ended.callback(started.wait)
        else:
            process = subprocess.Popen(
                [*within, sys.executable, "-m", *asked],
                stdin=theirs,
                env=environment,
                start_new_session=True,
            )
            self._ended.callback(process.wait, timeout=PATIENCE_S)
        theirs.close()
        self.channel: Channel[FromWarm] = Channel(self.socket, FromWarm)
        assert isinstance(self.channel.receive(), Warm), "the warm process did not come up"

    def __enter__(self) -> "WarmWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()
        self._ended.close()

    def fork(
        self, incarnation: Incarnation, channel: socket.socket, output: int, job: JobSpec
    ) -> None:
        wanted = Fork(
            slot=0,
            incarnation=incarnation,
            kind=job.model.family,
            compiles=job.training.compile,
            optimizes=job.training.optimizer.code is not None,
        )
        body = msgspec.json.encode(wanted)
        frame = len(body).to_bytes(4, "big") + body
        socket.send_fds(self.socket, [frame], [channel.fileno(), output, MARKER.fd])


class Director:
    """A cluster of workers without agents or master; a context manager that leaves nothing."""

    def __init__(
        self,
        warm: WarmWorkers,
        job: JobSpec,
        faults: Sequence[FaultRule] = (),
        *,
        transport: Transport | None = None,
        device: str | None = None,
        address: str = "127.0.0.1",
        chunk_bytes: int = 64 << 20,
        workers: int = 1,
    ) -> None:
        """`transport`: what goes between the workers on CPUs; a fake stands in NCCL's place
        (support.fake_nccl). `device`: what all workers compute on. None: what tests are run with.
        `address`: of this host; `chunk_bytes`: by which state moves; `workers`:
        of each node."""
        self.job = job
        self._chunk_bytes = chunk_bytes
        self._workers_per_node = workers
        self._device = device or str(devices.device())
        self._transport = transport or devices.transport()
        self.switch = Switch() if self._transport == "nccl" else None
        self.faults = tuple(faults)
        self.records: dict[int, list[StepRecord]] = {}
        self.evaluations: dict[int, list[EvaluationRecord]] = {}
        self.workers: dict[WorkerId, LiveWorker] = {}
        self.exits: dict[int, ChildExited] = {}
        self._meetings = 0
        self._late: tuple[Assign, Sequence[WorkerId]] | None = None
        self._warm = warm
        self._elsewhere: list[WarmWorkers] = []
        self._address = address

    def __enter__(self) -> "Director":
        return self

    def __exit__(self, *_: object) -> None:
        for live in self.workers.values():
            if not live.gone:
                with contextlib.suppress(ProcessLookupError):  # it ended, and was not listened to
                    os.kill(live.pid, signal.SIGKILL)
            live.close()
        if self.switch is not None:
            self.switch.__exit__()

    def _fake(self) -> tuple[str, str, str] | None:
        return ("support.fake_switch", "RemoteMaker", self.switch.path) if self.switch else None

    def start(self, *nodes: str, at: tuple[WarmWorkers, str] | None = None) -> None:
        """Fork one worker per node and wait until they are ready; `at` another host's warm process
        and address."""
        warm, address = at or (self._warm, self._address)
        if warm not in (self._warm, *self._elsewhere):
            self._elsewhere.append(warm)
        names = [worker_named(node) for node in nodes]
        for worker in names:
            incarnation = Incarnation(os.urandom(4).hex())
            mine, theirs = socket.socketpair()
            log = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the worker
            warm.fork(incarnation, theirs, log.fileno(), self.job)
            theirs.close()
            if worker in self.workers:
                self.workers[worker].close()
            live = LiveWorker(worker, incarnation, Channel(mine, FromWorker), log)
            self.workers[worker] = live
            live.channel.send(
                Launch(
                    worker=worker,
                    job_id=JobId("test-1"),
                    job=self.job,
                    address=address,
                    agent_pid=0,
                    device=self._device,
                    device_kind=self._device,
                    allow_code=("*",),
                    faults=self.faults,
                    stage_everything=self._transport == "staged",
                    chunk_bytes=self._chunk_bytes,
                    workers=self._workers_per_node,
                    nccl=self._fake(),
                )
            )
        self.wait(lambda: all(self.workers[name].card for name in names), "workers ready")

    def assign(
        self,
        plan: Plan,
        *,
        boundary: bool = False,
        restore: bool = False,
        anew: bool = False,
        leaving: Sequence[str] = (),
        handover: bool = False,
        host_of: str | None = None,
        late: Sequence[str] = (),
    ) -> None:
        """Push `plan` to all its workers and to those that are `leaving`. They meet at the
        worker of the node `host_of`; None: at the first one. Those that are `late` hear of it once
        `push_late` is called."""
        self._meetings += 1
        hosts = plan.workers if host_of is None else [worker_named(host_of)]
        card = next(self.workers[w].card for w in hosts if not self.workers[w].gone)
        message = Assign(
            plan=plan,
            rendezvous=Rendezvous(
                host=card,
                prefix=f"meeting-{self._meetings}",
                cards=tuple(self.workers[worker].card for worker in plan.workers),
            ),
            boundary=boundary,
            restore=restore,
            anew=anew,
            leaving=tuple(map(worker_named, leaving)),
            handover=handover,
        )
        self._late = message, tuple(map(worker_named, late))
        for worker in (*plan.workers, *message.leaving):
            if worker not in self._late[1]:
                self._push(message, worker)

    def push_late(self) -> None:
        """Push the newest plan to those that have not heard of it."""
        assert self._late is not None, "something was assigned"
        message, workers = self._late
        for worker in workers:
            self._push(message, worker)

    def _push(self, message: Assign, worker: WorkerId) -> None:
        with contextlib.suppress(OSError):  # killed a moment ago
            self.workers[worker].channel.send(message)

    def wish_checkpoint(self, plan: Plan, number: int) -> None:
        for worker in plan.workers:
            self.workers[worker].channel.send(Save(number=number))

    def kill(self, node: str, signum: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.workers[worker_named(node)].pid, signum)

    def let_go(self, node: str) -> None:
        """Have a worker go on that stops itself by a scripted fault, once it stands there."""
        pid = self.workers[worker_named(node)].pid
        self.wait(lambda: is_stopped(pid), f"{node} stopped")
        os.kill(pid, signal.SIGCONT)

    def has_faulted(self, worker: str) -> bool:
        """Whether a scripted fault has struck the worker, which logs it."""
        return "scripted fault" in self.workers[worker_named(worker)].written()

    def has_stopped_at(self, node: str, point: str) -> bool:
        """Whether a scripted fault has struck the worker at just that point."""
        written = self.workers[worker_named(node)].written()
        return any("scripted fault" in line and point in line for line in written.splitlines())

    def stop(self) -> None:
        for live in self.workers.values():
            if not live.gone:
                with contextlib.suppress(OSError):  # killed a moment ago
                    live.channel.send(Stop(reason="test over"))
        self.wait(lambda: all(live.gone for live in self.workers.values()), "workers gone")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Take in messages until `condition` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"timed out waiting for: {what}; {self.describe()}"
            self._pump(min(remaining, 0.2))

    def wait_a_moment(self, span_s: float) -> None:
        """Take in what comes within that time."""
        self._pump(span_s)

    def wait_finished(self, plan: Plan) -> None:
        self.wait(
            lambda: all(self.said(worker, Finished, plan.generation) for worker in plan.workers),
            f"generation {plan.generation} finished",
        )

    def said(
        self, worker: WorkerId, kind: type[FromWorker], generation: Generation | None = None
    ) -> list[FromWorker]:
        return [
            message
            for message in self.workers[worker].said
            if isinstance(message, kind)
            and (generation is None or getattr(message, "generation", None) == generation)
        ]

    def describe(self) -> str:
        return "; ".join(
            f"{worker}{' gone' if live.gone else ''}: {live.said[-3:]}"
            for worker, live in self.workers.items()
        )

    def losses(self) -> dict[int, float | None]:
        """Loss by step. All records of a step agree on its samples, and those of one generation on
        everything: a step that one lost had committed alone may be done again, on other routes."""
        for step, records in self.records.items():
            seen = {(r.generation, r.loss, r.grad_norm) for r in records}
            assert len(seen) == len({r.generation for r in records}), f"step {step}: {records}"
            assert len({r.samples_digest for r in records}) == 1, f"step {step}: {records}"
        newest = {s: max(r, key=lambda one: one.generation) for s, r in self.records.items()}
        return {step: record.loss for step, record in sorted(newest.items())}

    def _pump(self, timeout_s: float) -> None:
        channels = {live.channel.fileno(): live for live in self.workers.values() if not live.gone}
        warms = {warm.channel.fileno(): warm for warm in (self._warm, *self._elsewhere)}
        ready, _, _ = select.select([*channels, *warms], [], [], timeout_s)
        for fileno in ready:
            if fileno in warms:
                self._from_warm(warms[fileno])
            else:
                self._from_worker(channels[fileno])

    def _from_warm(self, warm: WarmWorkers) -> None:
        message = warm.channel.receive()
        assert message is not None, "the warm process died"
        match message:
            case Forked(incarnation=incarnation, pid=pid):
                for live in self.workers.values():
                    if live.incarnation == incarnation:
                        live.pid = pid
            case ChildExited(pid=pid):
                self.exits[pid] = message
            case Warm():
                pass

    def _from_worker(self, live: LiveWorker) -> None:
        message = live.channel.receive()
        if message is None:
            live.gone = True
            return
        live.said.append(message)
        match message:
            case Ready(card=card):
                live.card = card
            case Committed(record=record):
                self.records.setdefault(record.step, []).append(record)
            case Evaluated(record=record):
                self.evaluations.setdefault(record.step, []).append(record)
            case Failed(message=text):
                raise AssertionError(f"{live.worker} failed: {text}")
            case CheckpointSaved() | SaveFailed() | Restored():
                pass
            case PhaseReached() | PeerLost() | Finished() | Recorded():
                pass
