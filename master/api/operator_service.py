"""Operators' side of the service: submit, cancel, watch.

Every refusal is a status code with one line that says the fix. Streams read the state when it
changes and send the news, so a slow reader delays no other task.
"""

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import grpc

from oobleck.core.codec import encode
from oobleck.core.errors import PlanInfeasible
from oobleck.core.ids import JobId, NodeName, WorkerId
from oobleck.core.job.file import parse_job
from oobleck.core.job.spec import JobSpec
from oobleck.core.profile import Profile, format_profile, parse_profile
from oobleck.host.storage.backup import Summary
from oobleck.host.versions import installed
from oobleck.master.api.access import MOST_DETAILS, caller
from oobleck.master.api.view import (
    head_status,
    held_note,
    job_status,
    node_info,
    node_state,
    problem_of,
)
from oobleck.master.api.wheels import Wheels
from oobleck.master.clients.examinations import Busy, Wish
from oobleck.master.clients.requests import Requests, node_request
from oobleck.master.clients.timelines import NoTimeline
from oobleck.master.loop import Master
from oobleck.master.planning.client import planning
from oobleck.master.rules.adoption import NotAdopted
from oobleck.master.rules.first_plan import code_refused, shortfall
from oobleck.master.rules.questions import is_undecided, outlook
from oobleck.master.state.job import ENDED, Job
from oobleck.master.storage.archive import Line
from oobleck.master.storage.backup import Capture
from oobleck.master.storage.event_lines import is_of_credentials
from oobleck.master.storage.records import read_steps
from oobleck.master.tracking import check_installed
from oobleck.planner.profile.measurement import check_fits
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.examinations import finding_message

if TYPE_CHECKING:
    from oobleck.host.security.pki import Identity

Context = grpc.aio.ServicerContext[Any, Any]

#: Bytes of a job, which agents send back to a master that lost it. The description of a user's
#: model of hundreds of unlike layers fits.
MOST_JOB_BYTES = 448 << 10
_REQUEST_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
#: Most characters of a refusal that names all nodes.
_MOST_REFUSED = 4 * MOST_DETAILS
#: Most known names in the refusal of an unknown name.
_MOST_NAMES = 8
#: Seconds that the answer to a drain waits for the plan without the node; operators' deadlines are
#: longer.
_FATE_S = 3.0
#: Characters of log files read at a time, outside the event loop's thread.
_CHARACTERS_AT_A_TIME = 16 << 10


class OperatorService(rpc.OperatorServicer):
    def __init__(self, master: Master) -> None:
        self._master = master
        self._wheels = Wheels(master.config.code)

    def _requests(self, context: Context) -> Requests:
        return self._master.requests.of(caller(context))

    async def _job(self, job_id: str, context: Context) -> Job:
        job = self._master.state.jobs.get(JobId(job_id))
        if job is None:
            known = ", ".join(list(self._master.state.jobs)[-5:]) or "none yet"
            text = f"no job {job_id[:80]!r}; known jobs: {known}"
            if JobId(job_id) in self._master.state.held:
                text = held_note(self._master.state, JobId(job_id))
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return job

    @property
    def _problem(self) -> str:
        return problem_of(self._master.state, self._master.problem)

    def _status(self, job: Job) -> pb.JobStatus:
        status = job_status(self._master.state, job, self._master.config, self._master.now())
        status.problem = self._problem
        return status

    async def Submit(self, request: pb.SubmitRequest, context: Context) -> pb.SubmitReply:
        await _check_request_id(request.request_id, context)
        try:
            # In a thread, since a long text takes seconds, in which the loop must serve agents.
            spec, profile = await asyncio.to_thread(_read_submission, request)
            check_installed(spec)
            self._wheels.check(spec)
        except ValueError as error:  # also InvalidJob
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MOST_DETAILS])
        refused, by_all = code_refused(self._master.state, spec)
        if by_all and request.request_id not in self._master.state.requests:
            text = f"no node runs the job: {refused}"[:_MOST_REFUSED]
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        job_id = await self._requests(context).submit(
            request.request_id, spec, profile=profile, profile_only=request.profile_only
        )
        job = self._master.state.jobs.get(job_id)  # an ended job may be forgotten
        left_out = f"left out of the job: {refused}" if refused else ""
        lacking = "" if job is None else shortfall(self._master.state, job)
        warning = "; ".join(text for text in (left_out, lacking) if text)
        return pb.SubmitReply(job_id=job_id, warning=warning)

    async def PutCode(
        self, requests: AsyncIterator[pb.CodeChunk], context: Context
    ) -> pb.CodeReply:
        try:
            digest = await self._wheels.put(chunk.data async for chunk in requests)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error)[:MOST_DETAILS])
        return pb.CodeReply(sha256=digest)

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsReply:
        jobs = self._master.state.jobs.values()
        return pb.ListJobsReply(
            jobs=[self._status(job) for job in jobs],
            problem=self._problem,
            head=head_status(self._master.state),
        )

    async def GetJob(self, request: pb.JobRequest, context: Context) -> pb.JobStatus:
        return self._status(await self._job(request.job_id, context))

    async def WatchJob(
        self, request: pb.JobRequest, context: Context
    ) -> AsyncIterator[pb.JobStatus]:
        job = await self._job(request.job_id, context)
        sent: pb.JobStatus | None = None
        while True:
            changed = self._master.changes.next
            ended = job.state in ENDED
            status = self._status(job)
            if status != sent:
                sent = status
                yield status
            if ended:
                return
            await self._master.changes.after(changed)

    async def CancelJob(self, request: pb.CancelRequest, context: Context) -> pb.JobStatus:
        job = await self._job(request.job_id, context)
        await _check_request_id(request.request_id, context)
        await self._requests(context).cancel(request.request_id, job.id)
        return self._status(job)

    async def AdoptJob(self, request: pb.AdoptRequest, context: Context) -> pb.AdoptReply:
        await _check_request_id(request.request_id, context)
        try:
            lost = await self._master.adoptions.adopt(
                request.request_id,
                JobId(request.job_id),
                self._requests(context),
                self._wheels.has,
            )
        except NotAdopted as why:
            text = f"job {request.job_id[:80]}: {why}"[:MOST_DETAILS]
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return pb.AdoptReply(lost=lost)

    async def CancelUnknownJob(
        self, request: pb.CancelRequest, context: Context
    ) -> pb.CancelUnknownReply:
        await _check_request_id(request.request_id, context)
        job_id, state = JobId(request.job_id), self._master.state
        nodes = await self._requests(context).end_unknown(job_id)
        if not nodes:
            known = ", ".join(state.held) or "none"
            text = f"no node trains an unknown job {request.job_id[:80]!r}; such jobs: {known}"
            if job_id in state.held:  # the job waits in the queue
                text = held_note(state, job_id)
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return pb.CancelUnknownReply(nodes=nodes)

    async def SaveCheckpoint(
        self, request: pb.SaveCheckpointRequest, context: Context
    ) -> pb.SaveCheckpointReply:
        job = await self._job(request.job_id, context)
        await _check_request_id(request.request_id, context)
        why = ""
        if request.request_id in job.saves.numbers:
            pass  # a repeated request gets the same answer, whatever has happened since
        elif job.spec.checkpoint is None:
            why = "takes no checkpoints: submit it with checkpoint.path in its job file"
        elif job.state in ENDED:
            why = f"is {job.state}: it trains no more"
        if why:
            text = f"job {job.id} {why}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        return pb.SaveCheckpointReply(
            number=await self._requests(context).save(request.request_id, job.id)
        )

    async def GetProfile(self, request: pb.JobRequest, context: Context) -> pb.ProfileReply:
        job = await self._job(request.job_id, context)
        chosen = job.profiling.chosen
        if chosen is None or chosen.profile is None:
            why = chosen.reason if chosen is not None else "nothing is measured so far"
            text = f"job {job.id} has no profile: {why}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        text = format_profile(chosen.profile, {**chosen.notes, "key": chosen.key})
        return pb.ProfileReply(profile=text, key=chosen.key)

    async def GetPlanning(self, request: pb.JobRequest, context: Context) -> pb.PlanningReply:
        job = await self._job(request.job_id, context)
        try:
            if job.state in ENDED:
                raise PlanInfeasible(f"job {job.id} is {job.state}: nothing is planned any more")
            state = self._master.state
            expected = outlook(state, job, self._master.now())
            asked = planning(job, state.candidates(job), expected)
            return pb.PlanningReply(planning=encode(asked))
        except PlanInfeasible as infeasible:
            text = str(infeasible)[:MOST_DETAILS]
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)

    async def GetTimeline(self, request: pb.TimelineRequest, context: Context) -> pb.TimelineReply:
        job = await self._job(request.job_id, context)
        try:
            trace = await self._master.timelines.trace(job, max(1, request.steps))
        except NoTimeline as reason:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(reason))
        self._requests(context).check()  # the caller may have been revoked meanwhile
        return pb.TimelineReply(trace=trace.decode())

    async def ListNodes(self, request: pb.ListNodesRequest, context: Context) -> pb.ListNodesReply:
        state, now, unix = self._master.state, self._master.now(), self._master.unix()
        nodes = [node_info(state, node, now, unix) for _, node in sorted(state.nodes.items())]
        return pb.ListNodesReply(nodes=nodes, problem=self._problem, head=head_status(state))

    async def DrainNodes(
        self, request: pb.DrainNodesRequest, context: Context
    ) -> pb.DrainNodesReply:
        await _check_request_id(request.request_id, context)
        if not request.nodes:
            text = "nodes: is empty; name one at least"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        state, names = self._master.state, [NodeName(name) for name in dict.fromkeys(request.nodes)]
        for name in names:
            # A repeated request may have nodes that are forgotten meanwhile.
            if node_request(request.request_id, name) not in state.node_requests:
                await self._node(request.request_id, name, context)
        await self._requests(context).drain(
            request.request_id, names, request.reason, force=request.force
        )
        await self._fate_of(names)
        return pb.DrainNodesReply(
            nodes=[
                node_info(state, state.nodes[name], self._master.now(), self._master.unix())
                for name in names
                if name in state.nodes
            ]
        )

    async def _fate_of(self, names: Sequence[NodeName]) -> None:
        """Wait until the planner has decided whether the nodes' work can move off them, for at most
        `_FATE_S`."""
        state = self._master.state
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FATE_S):
                while any(
                    is_undecided(state, state.nodes[name]) for name in names if name in state.nodes
                ):
                    await self._master.changes.next.wait()

    async def UndrainNode(self, request: pb.UndrainNodeRequest, context: Context) -> pb.NodeInfo:
        node = await self._node(request.request_id, request.node, context)
        await self._requests(context).undrain(request.request_id, node)
        return await self._node_info(node, context)

    async def ForgetNode(self, request: pb.ForgetNodeRequest, context: Context) -> pb.NodeForgotten:
        state = self._master.state
        # A repeated request may find the node forgotten.
        if request.request_id not in state.node_requests:
            await self._node(request.request_id, request.node, context)
        node = NodeName(request.node)
        if why := await self._requests(context).forget(request.request_id, node):
            text = f"node {node} is {node_state(state.nodes[node])}, and kept: {why}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text[:MOST_DETAILS])
        return pb.NodeForgotten()

    async def _node(self, request_id: str, name: str, context: Context) -> NodeName:
        await _check_request_id(request_id, context)
        if NodeName(name) not in self._master.state.nodes:
            text = f"no node {name[:80]!r}; known nodes: {_nearest(name, self._master.state.nodes)}"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return NodeName(name)

    async def _node_info(self, name: NodeName, context: Context) -> pb.NodeInfo:
        state = self._master.state
        node = state.nodes.get(name)
        if node is None:  # the node was lost, and is forgotten meanwhile
            await context.abort(grpc.StatusCode.NOT_FOUND, f"node {name} has just been forgotten")
        return node_info(state, node, self._master.now(), self._master.unix())

    async def Events(
        self, request: pb.EventsRequest, context: Context
    ) -> AsyncIterator[pb.EventRecord]:
        if not request.job_id:
            async for record in self._cluster_events(caller(context), follow=request.follow):
                yield record
            return
        job = await self._job(request.job_id, context)
        offset = 0
        while True:
            changed = self._master.changes.next
            ended = job.state in ENDED
            while True:
                lines, offset = self._master.archive.events.read(job.id, offset)
                for line in lines:
                    yield pb.EventRecord(json=line)
                if not lines:
                    break
            if ended or not request.follow:
                return
            await self._master.changes.after(changed)

    async def _cluster_events(
        self, identity: "Identity | None", *, follow: bool
    ) -> AsyncIterator[pb.EventRecord]:
        last, viewer = 0, identity is not None and identity.role == "viewer"
        while True:
            changed = self._master.changes.next
            for number, line in self._master.cluster_events(last):
                last = number
                for_operators = is_of_credentials(line)
                if not (viewer and for_operators):
                    yield pb.EventRecord(json=line, for_operators=for_operators)
            if not follow:
                return
            await self._master.changes.after(changed)

    async def Metrics(
        self, request: pb.MetricsRequest, context: Context
    ) -> AsyncIterator[pb.MetricsLines]:
        job = await self._job(request.job_id, context)
        archive, step = self._master.archive, max(1, request.from_step)
        log = archive.evaluations(job.id) if request.evaluations else archive.metrics(job.id)
        while True:
            changed = self._master.changes.next
            # Lines of an ended job may still wait for space on the disk.
            ended = job.state in ENDED and log.is_stored
            stored = log.stored_step
            while step <= stored:
                lines, step = await asyncio.to_thread(read_steps, log.path, step)
                if lines:
                    yield pb.MetricsLines(json=lines)
                else:  # steps without records, such as those before a checkpoint
                    step = stored + 1
            if ended or not request.follow:
                return
            await self._master.changes.after(changed)

    async def Logs(self, request: pb.LogsRequest, context: Context) -> AsyncIterator[pb.LogLine]:
        job = await self._job(request.job_id, context)
        workers = await self._workers(job, request, context)

        def wanted(worker: WorkerId) -> bool:
            if workers is not None and worker not in workers:
                return False
            return not request.node or worker.node == request.node

        with self._master.archive.logs.follow(job.id, wanted) as follower:
            past = self._master.archive.logs.snapshot(job.id, wanted, request.since)
            while lines := await asyncio.to_thread(_take, past):
                for line in lines:
                    yield _log_line(line)
            while request.follow:
                changed = self._master.changes.next
                ended = job.state in ENDED
                while (new := follower.take()) is not None:
                    yield _log_line(new)
                if ended:
                    return
                await self._master.changes.after(changed)

    async def Examine(
        self, request: pb.ExamineRequest, context: Context
    ) -> AsyncIterator[pb.Finding]:
        known = self._master.state.nodes
        for name in request.nodes:
            if NodeName(name) not in known:
                text = f"no node {name[:80]!r}; known nodes: {_nearest(name, known)}"
                await context.abort(grpc.StatusCode.NOT_FOUND, text)
        wish = Wish(
            nodes=tuple(map(NodeName, dict.fromkeys(request.nodes))),
            data=tuple(request.data),
            checkpoints=tuple(request.checkpoints),
            pairs=request.pairs,
            problem=self._master.problem,
        )
        try:
            async with contextlib.aclosing(self._master.examinations.examine(wish)) as findings:
                async for finding in findings:
                    yield finding_message(finding)
        except Busy as busy:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(busy))

    async def Backup(
        self, request: pb.BackupRequest, context: Context
    ) -> AsyncIterator[pb.BackupPart]:
        parts = _backup(self._master, output=not request.no_output)
        try:
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield part
        except OSError as error:
            text = f"the state directory cannot be read: {error}"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text[:MOST_DETAILS])

    async def _workers(
        self, job: Job, request: pb.LogsRequest, context: Context
    ) -> frozenset[WorkerId] | None:
        """Return the worker of the asked rank; None: all workers."""
        if not request.HasField("rank"):
            return None
        workers = job.current.made.plan.workers if job.current.made is not None else ()
        if request.rank >= len(workers):
            text = f"no rank {request.rank}: the job's plan has {len(workers)} workers"
            await context.abort(grpc.StatusCode.NOT_FOUND, text)
        return frozenset({workers[request.rank]})


def _nearest(name: str, known: Iterable[str]) -> str:
    """List the known names, those that share the longest prefix with `name` first. Only some are
    listed, since a cluster has more than fit into an answer."""

    def alike(one: str) -> int:
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, name, strict=False))
        )

    near = sorted(known, key=lambda one: (-alike(one), one))
    more = len(near) - _MOST_NAMES
    return ", ".join(near[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "") or "none yet"


async def _check_request_id(request_id: str, context: Context) -> None:
    if _REQUEST_ID.fullmatch(request_id) is None:
        text = "request_id: is not 1 to 64 letters, digits, '-' and '_'"
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)


def _read_submission(request: pb.SubmitRequest) -> tuple[JobSpec, Profile | None]:
    """Parse a submitted job, and its profile where it names one. Raises ValueError."""
    if (size := len(request.job.encode())) > MOST_JOB_BYTES:
        raise ValueError(f"job: has {size} bytes; at most {MOST_JOB_BYTES} are a job")
    spec = parse_job(request.job)
    if not spec.model.known:
        raise ValueError("model: its layers are not described; submit it with 'oobleck submit'")
    optimizer = spec.training.optimizer
    if optimizer.code is not None and not optimizer.described:
        raise ValueError(
            "training.optimizer: the class is not described; submit it with 'oobleck submit'"
        )
    return spec, _read_profile(spec, request)


def _read_profile(spec: JobSpec, request: pb.SubmitRequest) -> Profile | None:
    """Parse the profile that the job names; None: it names no file. Raises ValueError."""
    if request.profile_only and spec.profile != "measure":
        raise ValueError(f"profile: is {spec.profile}; to measure the model, set it to measure")
    if spec.profile_path is None:
        return None
    if not request.profile:
        raise ValueError(
            f"profile: the text of {spec.profile} did not come with the job; submit it with "
            "'oobleck submit'"
        )
    try:
        profile = parse_profile(request.profile)
        check_fits(profile, spec)
    except ValueError as error:
        raise ValueError(f"profile: {spec.profile}: {error}") from error
    return profile


def _take(lines: Iterator[Line]) -> list[Line]:
    found, room = list[Line](), _CHARACTERS_AT_A_TIME
    while room > 0 and (line := next(lines, None)) is not None:
        found.append(line)
        room -= len(line.text)
    return found


def _log_line(line: Line) -> pb.LogLine:
    return pb.LogLine(node=line.worker.node, slot=line.worker.slot, line=line.text, time=line.time)


async def _backup(master: Master, *, output: bool) -> AsyncGenerator[pb.BackupPart, None]:
    """Yield the files of one point in parts, then its summary; threads read them. Raises
    StorageFailed, OSError."""
    with contextlib.closing(Capture(master.config.state_dir, output=output)) as capture:
        await asyncio.to_thread(capture.look)
        while not capture.fix():
            await asyncio.to_thread(capture.look)
        summary = Summary(
            release=installed().oobleck,
            cluster=master.config.cluster,
            sequence=master.committed(),
            time=master.unix(),
            output=output,
        )
        parts = capture.parts()
        while (part := await asyncio.to_thread(lambda: next(parts, None))) is not None:
            yield pb.BackupPart(path=part.path, data=part.data, sha256=part.sha256)
        yield pb.BackupPart(summary=encode(summary))
