"""The operator: asks until there is an answer, as `oobleck` does, with the same request id."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
from simulation.clockwork import Process
from simulation.network import Aborted, Context
from simulation.trainer import DISK_ERROR
from simulation.watch import GONE, Broken

from oobleck.core.ids import JobId, NodeName
from oobleck.core.job.file import format_job
from oobleck.core.job.spec import JobSpec
from oobleck.master.api.operator_service import OperatorService
from oobleck.master.inbox import MasterEnded
from oobleck.master.state.job import Job
from oobleck.master.storage.disk import StorageFailed
from oobleck.proto import control_pb2 as pb

if TYPE_CHECKING:
    from simulation.machines import MasterHost
    from simulation.world import World

#: An operator asks again where no answer has come in this time.
ANSWER_S = 3.0
#: And looks so often for jobs that the head does not know. One that it cannot adopt for so long is
#: ended.
_LOOK_S, _ADOPTS_S = 2.0, 30.0


_NOT_NOW = grpc.StatusCode.FAILED_PRECONDITION


async def _answer(
    ask: Callable[[OperatorService, Any], Awaitable[Any]], service: OperatorService
) -> Any:
    """None: the master ended before there was one, or cannot store now."""
    try:
        return await ask(service, Context())
    except Aborted as refused:
        return refused
    except (MasterEnded, StorageFailed):
        return None


class Operator:
    def __init__(self, world: "World") -> None:
        self._world = world
        self.process = Process(world.loop, "operator")
        self._busy = 0
        #: What it has been answered, by number of the submission.
        self.jobs: dict[int, JobId] = {}
        self._cancelled: set[JobId] = set()
        self._adopted: set[JobId] = set()
        self._asked = 0
        self._saves: dict[JobId, list[int]] = {}
        self.process.spawn(self._look_after_held())

    @property
    def idle(self) -> bool:
        return self._busy == 0

    def _later(self, delay_s: float, act: Callable[[], Awaitable[None]]) -> None:
        self._busy += 1

        async def run() -> None:
            await asyncio.sleep(delay_s)
            await act()
            self._busy -= 1

        self.process.spawn(run())

    async def _ask(self, ask: Callable[[OperatorService, Any], Awaitable[Any]]) -> Any:
        """The answer, whichever master it comes from. Raises Aborted where it is refused."""
        while True:
            master = self._world.master
            if master is not None and master.process.alive:
                service = OperatorService(master.core)
                task = master.process.spawn(_answer(ask, service))
                await asyncio.sleep(self._world.delay_s())
                await asyncio.wait((task,), timeout=ANSWER_S)
                # An answer may get lost on its way.
                if task.done() and not task.cancelled() and self._world.draw.random() > 0.1:
                    answer = task.result()
                    if isinstance(answer, Aborted):
                        raise answer
                    if answer is not None:
                        return answer
            await asyncio.sleep(self._world.draw.uniform(0.1, 1.0))

    def submit_later(self, number: int, delay_s: float, spec: JobSpec) -> None:
        async def act() -> None:
            request = pb.SubmitRequest(request_id=f"submit-{number}", job=format_job(spec))
            reply = await self._ask(lambda service, context: service.Submit(request, context))
            self.jobs[number] = JobId(reply.job_id)

        self._later(delay_s, act)

    def submit_to(self, head: "MasterHost", spec: JobSpec) -> None:
        """Whatever comes of it."""
        request = pb.SubmitRequest(request_id="other", job=format_job(spec))
        service = OperatorService(head.core)
        head.process.spawn(_answer(lambda to, context: to.Submit(request, context), service))

    async def _look_after_held(self) -> None:
        """Adopt jobs that the head does not know, or end them where that cannot be."""
        since: dict[JobId, float] = {}
        while True:
            await asyncio.sleep(_LOOK_S)
            state = self._world.state
            held = () if state is None or self._world.stand_in is not None else tuple(state.held)
            since = {job_id: since.get(job_id, self._world.loop.clock) for job_id in held}
            for job_id in held:
                await self._take_over(job_id, since[job_id])

    async def _take_over(self, job_id: JobId, since: float) -> None:
        self._asked += 1
        adopt = pb.AdoptRequest(request_id=f"adopt-{self._asked}", job_id=job_id)
        end = pb.CancelRequest(request_id=f"end-{self._asked}", job_id=job_id)
        try:
            state = self._world.state
            waits = state is not None and job_id in state.jobs
            if waits and self._world.loop.clock >= since + _ADOPTS_S:
                await self._cancel(job_id)  # it waits in the queue, and others have the turn
            elif self._world.loop.clock < since + _ADOPTS_S:
                await self._ask(lambda service, context: service.AdoptJob(adopt, context))
                self._adopted.add(job_id)
            else:
                await self._ask(lambda service, context: service.CancelUnknownJob(end, context))
        except Aborted as refused:
            self._world.note(f"job {job_id} is not taken over: {refused.details}")
            if refused.code not in (_NOT_NOW, grpc.StatusCode.NOT_FOUND):
                raise

    def cancel_later(self, delay_s: float, number: int) -> None:
        async def act() -> None:
            if number in self.jobs:
                await self._cancel(self.jobs[number])

        self._later(delay_s, act)

    def cancel_now(self, job_id: JobId) -> None:
        self._later(0.0, lambda: self._cancel(job_id))

    async def _cancel(self, job_id: JobId) -> None:
        request = pb.CancelRequest(request_id=f"cancel-{job_id}", job_id=job_id)
        self._cancelled.add(job_id)
        try:
            await self._ask(lambda service, context: service.CancelJob(request, context))
        except Aborted as refused:
            self._check_unknown(refused)

    def _check_unknown(self, refused: Aborted) -> None:
        """Another head need not know what this one was told. Raises `refused`."""
        if refused.code is not grpc.StatusCode.NOT_FOUND or not self._world.has_replaced_head:
            raise refused

    def save_later(self, delay_s: float, number: int) -> None:
        async def act() -> None:
            if number not in self.jobs:
                return
            self._asked += 1
            request = pb.SaveCheckpointRequest(
                request_id=f"save-{self._asked}", job_id=self.jobs[number]
            )
            try:
                reply = await self._ask(
                    lambda service, context: service.SaveCheckpoint(request, context)
                )
            except Aborted as refused:
                if refused.code is not _NOT_NOW:
                    self._check_unknown(refused)
                return
            self._saves.setdefault(self.jobs[number], []).append(reply.number)

        self._later(delay_s, act)

    def drain_later(self, delay_s: float, name: NodeName, *, force: bool) -> None:
        def ask(request_id: str) -> Callable[[OperatorService, Any], Awaitable[Any]]:
            request = pb.DrainNodesRequest(
                request_id=request_id, nodes=[name], reason="upkeep", force=force
            )
            return lambda service, context: service.DrainNodes(request, context)

        self._about_node_later(delay_s, ask)

    def undrain_later(self, delay_s: float, name: NodeName) -> None:
        def ask(request_id: str) -> Callable[[OperatorService, Any], Awaitable[Any]]:
            request = pb.UndrainNodeRequest(request_id=request_id, node=name)
            return lambda service, context: service.UndrainNode(request, context)

        self._about_node_later(delay_s, ask)

    def _about_node_later(
        self,
        delay_s: float,
        ask: Callable[[str], Callable[[OperatorService, Any], Awaitable[Any]]],
    ) -> None:
        self._asked += 1
        request_id = f"node-{self._asked}"

        async def act() -> None:
            try:
                await self._ask(ask(request_id))
            except Aborted as refused:
                if refused.code is not grpc.StatusCode.NOT_FOUND:  # it has never registered
                    raise

        self._later(delay_s, act)

    # ---- what must have come of it

    def check_end(self, job: Job) -> None:
        ledger = self._world.ledger(job.id)
        steps = job.spec.training.steps
        asked_for = job.id in self.jobs.values() or job.id in self._adopted
        if not asked_for and not self._world.has_replaced_head:
            raise Broken(f"{job.id} was submitted twice")
        if job.state == "cancelled" and job.id not in self._cancelled:
            raise Broken(f"{job.id} was cancelled, which nobody asked for")
        # Without what hangs alone has, there is no way on; nor where processes end again and again.
        fruitless = self._world.hung or self._world.flapped
        known = fruitless and "without a committed step" in job.reason
        known |= DISK_ERROR in job.reason or GONE in job.reason
        # So a liar says of itself, whom the others cannot do without.
        liar = self._world.liar
        known |= liar is not None and job.reason in ("no", f"no (on {liar})")
        if job.state == "failed" and job.id not in self._world.fails_at and not known:
            raise Broken(f"{job.id} failed: {job.reason}")
        if job.state == "succeeded":
            missing = set(range(1, steps + 1)) - ledger.steps
            if missing and not ledger.is_split:
                raise Broken(f"{job.id} succeeded without steps {sorted(missing)}")
        self._check_metrics(job)

    def _check_metrics(self, job: Job) -> None:
        """metrics.jsonl: each committed step once, in order, none left out but for those before a
        checkpoint that everybody who knew of them died with, before the master was told, and
        those whose records everybody who had them died with."""
        path = self._world.config.job_directory(job.id) / "metrics.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        records = [msgspec.json.decode(line) for line in lines]
        for record in records:
            true = (record["loss"], record["grad_norm"]) == (1.0 / record["step"], 1.0)
            if not true and record.get("told_by", "") != self._world.liar:
                raise Broken(f"metrics.jsonl of {job.id} has {record}, which nobody saw")
        found = [record["step"] for record in records]
        if self._world.liar is not None and job.rollback.resumed_step > 0:
            return  # alone, a liar may say that the job began at a checkpoint
        first, ledger = job.rollback.resumed_step + 1, self._world.ledger(job.id)
        last = job.spec.training.steps if job.state == "succeeded" else max(found, default=0)
        restored = self._world.watch.restored.get(job.id, 0)
        book = self._world.book(self._world.config.state_dir)
        whole = [
            step
            for step in range(first, last + 1)
            if step in found or (step > restored and not ledger.may_lack(step, book))
        ]
        if found != whole:
            raise Broken(f"metrics.jsonl of {job.id} has steps {found}")
        lacking = set(range(first, last + 1)) - set(found)
        told = {step for lost in job.lost.last for step in lost.steps}
        if lacking != told and not job.journal_cut_at:
            raise Broken(f"{job.id} lacks the records of {lacking}, and tells of {told}")
