"""A real master process, with agents and operators that speak its protocol."""

import asyncio
import dataclasses
import json
import random
import signal
from pathlib import Path

import grpc
import pytest
from msgspec.structs import replace

from oobleck.core.job.code import CodePolicy
from oobleck.core.job.file import format_job
from oobleck.core.job.spec import DataSpec
from oobleck.core.messages import Evaluated
from oobleck.proto import control_pb2 as pb
from oobleck.proto import control_pb2_grpc as rpc
from oobleck.proto.protocol import NEWEST
from oobleck.proto.types import NodeStatus
from support import loops
from support.jobs import evaluation, job_spec, job_text, record
from support.live_agent import FakeAgent, all_of, connected, started, told
from support.masters import DEADLINE_S, MasterProcess, master, operator, state_of
from support.sketches import LAYER, model_of


def evaluated(generation: int, step: int, loss: float | None) -> Evaluated:
    return Evaluated(record=replace(evaluation(step, generation), loss=loss))


def lines(state_dir: Path, job_id: str, name: str) -> list[dict]:
    path = state_dir / "jobs" / job_id / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_node_is_lost_and_the_master_killed_and_the_job_ends_well(tmp_path: Path) -> None:
    state = tmp_path / "state"
    running = MasterProcess(state)

    async def before(agents: list[FakeAgent], control: rpc.OperatorStub) -> str:
        job_id = await started(agents, control)
        assign = agents[0].assignments[-1].assign
        assert assign is not None
        assert assign.plan.nodes == ("n1", "n2", "n3", "n4")
        assert assign.rendezvous.host == "127.0.0.1:4001"
        assert agents[3].assignments[-1].worker_incarnations == (agents[3].process,)
        assert agents[3].assignments[-1].assign == assign

        for agent in agents[:2]:
            agent.send_report(evaluated(1, 2, 3.5))
        told(agents, job_id, record(1, 1, 1.0), record(2, 1, 2.0))
        await all_of(agents, lambda a: a.acks.get(job_id) == 2)
        status = await state_of(control, job_id, "running")
        assert (status.committed_step, status.generation, status.can_lose) == (2, 1, 1)
        assert (status.evaluation.step, status.evaluation.loss) == (2, 3.5)

        await agents[2].disconnect()
        agents[3].lost_peer(1)
        survivors = [agents[0], agents[1], agents[3]]
        await all_of(survivors, lambda a: a.planned == 2)
        newer = survivors[0].assignments[-1]
        assert newer.assign is not None
        assert newer.assign.plan.nodes == ("n1", "n2", "n4")
        assert not newer.assign.boundary
        assert newer.version > survivors[0].assignments[-2].version
        status = await state_of(control, job_id, "reconfiguring")
        assert status.generation == 2
        for agent in survivors:
            agent.workers(2)
        told(survivors, job_id, record(3, 2, 3.0))
        await state_of(control, job_id, "running")
        return job_id

    async def after(agents: list[FakeAgent], address: str, job_id: str) -> None:
        survivors = [agents[0], agents[1], agents[3]]
        for agent in survivors:
            await agent.disconnect()
        versions = [agent.assignments[-1].version for agent in survivors]
        for agent in survivors:
            await agent.connect(address)
        async with operator(address) as control:
            await all_of(survivors, lambda a: a.acks.get(job_id) == 3)
            status = await state_of(control, job_id, "running")
            assert status.evaluation.step == 2  # from the file
            for agent in survivors:  # and told again, as to every new session
                agent.send_report(evaluated(1, 2, 3.5))
            # All agents tell all records, in no order, and again.
            words = [(agent, step) for agent in survivors for step in range(2, 21)]
            random.shuffle(words)
            for agent, step in words:
                agent.records(job_id, record(step, 2, float(step)))
            await all_of(survivors, lambda a: a.acks.get(job_id) == 20)
            assert [agent.assignments[-1].version for agent in survivors] == versions
            assert [agent.planned for agent in survivors] == [2, 2, 2]
            for agent in survivors:  # the job's end waits for the evaluation of its last step
                agent.send_report(evaluated(2, 20, None))
                agent.workers(2, finished=True)
            status = await state_of(control, job_id, "succeeded")
            assert (status.evaluation.step, status.evaluation.HasField("loss")) == (20, False)
            await all_of(survivors, lambda a: a.assignments[-1].job_id is None)

    async def test() -> None:
        nonlocal running
        async with connected(running.address, 4) as agents:
            async with operator(running.address) as control:
                job_id = await before(agents, control)
            address = running.address
            running.kill()
            running = MasterProcess(state, listen=address)
            await after(agents, address, job_id)
            events = lines(state, job_id, "events.jsonl")
            assert [event["id"] for event in events] == list(range(1, len(events) + 1))
            assert [event["event"] for event in events] == [
                "submitted",
                "started",
                "node_lost",
                "reconfigured",
                "incident",
                "succeeded",
            ]
            evaluations = lines(state, job_id, "evaluations.jsonl")
            assert [(line["step"], line["loss"], line["generation"]) for line in evaluations] == [
                (2, 3.5, 1),
                (20, None, 2),
            ]
            metrics = lines(state, job_id, "metrics.jsonl")
            assert [line["step"] for line in metrics] == list(range(1, 21))

    try:
        loops.run(test(), limit_s=480)
    finally:
        assert running.close() == 0
    assert "Traceback" not in running.errors.read_text()


async def send_garbage(address: str) -> None:
    """Bytes that are no protobuf message, to a method of each shape."""
    async with grpc.aio.insecure_channel(address) as channel:
        unary = channel.unary_unary("/oobleck.Operator/Submit")
        stream = channel.unary_stream("/oobleck.Operator/WatchJob")
        session = channel.stream_stream("/oobleck.Control/Session")
        for call in (unary(b"\xff\xff"), stream(b"\xff\xff").read(), session([b"\xff"]).read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "message" in refused.value.details()


#: Of a worker's report.
ABOUT = {"job_id": "demo-1", "slot": 0, "incarnation": "ab" * 8}


def test_what_an_agent_of_a_later_release_says_beyond_this_one_is_passed_over(
    tmp_path: Path,
) -> None:
    async def connected(address: str, newest: int) -> FakeAgent:
        agent = FakeAgent(f"n{newest}", newest_protocol=newest)
        await agent.connect(address, beating=newest > NEWEST)
        return agent

    def say(agent: FakeAgent, what: str) -> None:
        if what == "report":
            agent.send(report=json.dumps({**ABOUT, "what": {"type": "novel"}}).encode())
            return
        body = pb.AgentMessage(incarnation=agent.facts.incarnation).SerializeToString()
        unknown = b"\xfa\x3f\x01x"  # field 1023
        agent._outgoing.put_nowait(pb.AgentMessage.FromString(body + unknown))

    async def test(address: str) -> None:
        later = await connected(address, NEWEST + 1)
        for what in ("body", "report"):
            say(later, what)
        later.status = NodeStatus(concern="later words")
        later.tell()
        await state_told(address, later.name, "later words")
        assert later.ended is None
        await later.disconnect()
        for what in ("body", "report"):
            agent = await connected(address, NEWEST)
            # Nothing else: the reason is lost where the session ends during a write.
            say(agent, what)
            await agent.until(lambda agent=agent: agent.ended)  # type: ignore[misc]
            assert agent.ended is not None
            assert agent.ended.code() is grpc.StatusCode.INVALID_ARGUMENT
            await agent.disconnect()

    async def state_told(address: str, name: str, reason: str) -> None:
        async with operator(address) as control, asyncio.timeout(DEADLINE_S):
            while True:
                nodes = (await control.ListNodes(pb.ListNodesRequest())).nodes
                (node,) = (node for node in nodes if node.node == name)
                if reason in node.reason:
                    assert node.protocol == NEWEST
                    return
                await asyncio.sleep(0.05)

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_who_is_refused_and_how(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        async with connected(address, 1) as agents, operator(address) as control:
            twin = FakeAgent("n1")
            await twin.connect(address)
            # For good only once the other one has been heard since.
            while twin.refused is None or twin.refused.temporary:
                await twin.disconnect()
                agents[0].tell()
                await asyncio.sleep(0.05)
                await twin.connect(address)
            assert twin.refused.reason == (
                "node name n1 is in use by a live agent (pid 4242, host testhost); "
                "choose another --name"
            )
            await twin.disconnect()

            for oldest, newest, reason in (
                (0, 0, "speaks protocol 0 and this master protocol 1: upgrade Oobleck on"),
                (7, 9, "speaks protocols 7 to 9 and this master protocol 1: upgrade the master"),
            ):
                apart = FakeAgent("n2", newest_protocol=newest)
                apart.protocol = oldest
                await apart.connect(address)
                assert apart.refused is not None
                assert not apart.refused.temporary
                assert reason in apart.refused.reason
                await apart.disconnect()

            for changes, field in (
                ({"node": "No Name!"}, "register: node name 'No Name!' is not allowed"),
                ({"worker_slots": 0}, "register: worker_slots: 0"),
                ({"device": "abacus"}, "register: 'abacus' is not one of cpu, cuda"),
                ({"memory_per_worker_bytes": 0}, "register: memory_per_worker_bytes"),
            ):
                broken = FakeAgent("n3", **changes)
                await broken.connect(address)
                assert broken.ended is not None
                assert broken.ended.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert broken.ended.details().startswith(field)
                await broken.disconnect()

            for request, wanted in (
                (control.GetJob(pb.JobRequest(job_id="none-7")), "no job 'none-7'"),
                (
                    control.CancelJob(pb.CancelRequest(request_id="c", job_id="none-7")),
                    "no job 'none-7'",
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError, match=wanted) as refused:
                    await request
                assert refused.value.code() is grpc.StatusCode.NOT_FOUND
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await control.Submit(pb.SubmitRequest(request_id="r", job="name: [1"))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await send_garbage(address)
            nodes = (await control.ListNodes(pb.ListNodesRequest())).nodes
            assert [(node.node, node.state) for node in nodes] == [("n1", "live")]

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)
    assert "Traceback" not in running.errors.read_text()


def test_a_request_that_is_repeated_gives_the_same_job_and_jobs_queue(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        async with operator(address) as control:
            first = await control.Submit(pb.SubmitRequest(request_id="a", job=job_text()))
            again = await control.Submit(pb.SubmitRequest(request_id="a", job=job_text()))
            other = await control.Submit(pb.SubmitRequest(request_id="b", job=job_text()))
            assert (first.job_id, again.job_id, other.job_id) == ("demo-1", "demo-1", "demo-2")
            assert first.warning.startswith("no node is ready; start oobleck-agent")
            jobs = (await control.ListJobs(pb.ListJobsRequest())).jobs
            assert [job.state for job in jobs] == ["waiting for nodes", "queued"]
            assert jobs[0].reason.startswith("no node is ready")
            assert jobs[1].reason == "job demo-1 has its turn"
            cancelled = await control.CancelJob(pb.CancelRequest(request_id="c1", job_id="demo-1"))
            assert cancelled.state == "cancelled"
            again = await control.CancelJob(pb.CancelRequest(request_id="c1", job_id="demo-1"))
            assert again.state == "cancelled"
            follow = pb.EventsRequest(job_id="demo-1", follow=True)
            events = [json.loads(e.json)["event"] async for e in control.Events(follow)]
            assert events == ["submitted", "waiting", "cancelled"]

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_a_request_that_is_repeated_is_not_judged_anew(tmp_path: Path) -> None:
    """Its first answer may have been lost, and the nodes that run its code since."""
    own = model_of(LAYER, LAYER)
    text = format_job(dataclasses.replace(job_spec("demo"), model=own, data=DataSpec(python="a:b")))

    async def test(address: str) -> None:
        runs = FakeAgent("n1", code=CodePolicy(allows=("*",)))
        refuses = FakeAgent("n2", code=CodePolicy())
        async with operator(address) as control:
            await runs.connect(address)
            await refuses.connect(address)
            first = await control.Submit(pb.SubmitRequest(request_id="a", job=text))
            assert first.warning.startswith("left out of the job: jobs may not load a:b")
            await runs.disconnect()
            again = await control.Submit(pb.SubmitRequest(request_id="a", job=text))
            assert again.job_id == first.job_id
            with pytest.raises(grpc.aio.AioRpcError, match="no node runs the job: jobs may"):
                await control.Submit(pb.SubmitRequest(request_id="b", job=text))
            await refuses.disconnect()

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_a_job_in_fp8_needs_gpus_with_such_products(tmp_path: Path) -> None:
    spec = job_spec("demo")
    training = dataclasses.replace(spec.training, precision="fp8")
    text = format_job(dataclasses.replace(spec, training=training))

    async def test(address: str) -> None:
        kinds = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3")
        old, new = (
            FakeAgent(f"n{n}", device_kind=f"cuda {kind}") for n, kind in enumerate(kinds, 1)
        )
        async with operator(address) as control:
            await old.connect(address)
            with pytest.raises(grpc.aio.AioRpcError, match="no node runs the job: NVIDIA A100"):
                await control.Submit(pb.SubmitRequest(request_id="a", job=text))
            await new.connect(address)
            found = await control.Submit(pb.SubmitRequest(request_id="b", job=text))
            assert found.warning.startswith("left out of the job: NVIDIA A100-SXM4-80GB has no")
            await old.disconnect()
            await new.disconnect()

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_an_agent_that_does_not_read_holds_nobody_up(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        deaf = FakeAgent("n9", worker_slots=3)
        await deaf.connect(address, reading=False)
        async with connected(address, 4) as agents, operator(address) as control:
            job_id = await started(agents, control, job_text(200))
            for step in range(1, 200):
                told(agents, job_id, record(step, 1, float(step)))
                deaf.records(job_id, record(step, 1, float(step)))
            await all_of(agents, lambda a: a.acks.get(job_id) == 199)
            # What it was not asked to do, it is told: its slots differ from the others'.
            nodes = (await control.ListNodes(pb.ListNodesRequest())).nodes
            (idle,) = [node for node in nodes if node.node == "n9"]
            assert idle.reason == (
                "kept idle: job demo-1 uses nodes with 1 worker slots, this one has 3"
            )
        await deaf.disconnect()

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_many_records_cost_few_acknowledgements(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        async with connected(address, 4) as agents, operator(address) as control:
            job_id = await started(agents, control)
            heard = agents[1].acks_heard
            begun = asyncio.get_running_loop().time()
            for step in range(1, 16):
                told(agents, job_id, record(step, 1, float(step)))
                await asyncio.sleep(0.05)
            await all_of(agents, lambda a: a.acks.get(job_id) == 15)
            took_s = asyncio.get_running_loop().time() - begun
            # The first at once, then one in half a second.
            assert agents[1].acks_heard - heard <= 2 + took_s / 0.5

    with master(tmp_path) as running:
        loops.run(test(running.address), limit_s=480)


def test_the_newest_stream_of_an_agent_replaces_the_older(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        async with connected(address, 4) as agents, operator(address) as control:
            job_id = await started(agents, control)
            told(agents, job_id, record(1, 1, 1.0))
            await state_of(control, job_id, "running")
            twin = FakeAgent("n2", incarnation=agents[1].facts.incarnation)
            twin.assignments, twin.process = list(agents[1].assignments), agents[1].process
            twin.workers(1)
            await twin.connect(address)
            await agents[1].until(lambda: agents[1].refused)
            assert agents[1].refused.temporary
            await twin.until(lambda: twin.planned == 1)
            told([agents[0], twin], job_id, record(2, 1, 2.0))
            await twin.until(lambda: twin.acks.get(job_id) == 2)
            assert (await state_of(control, job_id, "running")).generation == 1
            await twin.disconnect()

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_a_master_that_was_stopped_convicts_nobody(tmp_path: Path) -> None:
    async def test(running: MasterProcess) -> None:
        async with connected(running.address, 4) as agents, operator(running.address) as control:
            job_id = await started(agents, control)
            told(agents, job_id, record(1, 1, 1.0))
            await state_of(control, job_id, "running")
            running.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(5.0)  # longer than the lease of 4 s; there is nothing to wait for
            running.process.send_signal(signal.SIGCONT)
            told(agents, job_id, record(2, 1, 2.0))
            await all_of(agents, lambda a: a.acks.get(job_id) == 2)
            status = await state_of(control, job_id, "running")
            assert status.generation == 1
            nodes = (await control.ListNodes(pb.ListNodesRequest())).nodes
            assert [node.state for node in nodes] == ["live"] * 4

    with master(tmp_path / "state") as running:
        loops.run(test(running), limit_s=480)
    assert "leases last as much longer" in running.errors.read_text()
    assert "a node is lost" not in running.errors.read_text()


def test_output_comes_back_by_node_and_rank(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        async with connected(address, 4) as agents, operator(address) as control:
            job_id = await started(agents, control)
            for agent in agents:
                words = [f"hello from {agent.name}", "and more"]
                agent.send(log=pb.LogLines(job_id=job_id, slot=0, lines=words))
                agent.records(job_id, record(1, 1, 1.0))
            await all_of(agents, lambda a: a.acks.get(job_id) == 1)

            async def texts(**request: object) -> list[str]:
                wanted = pb.LogsRequest(job_id=job_id, **request)
                return [line.line async for line in control.Logs(wanted)]

            assert len(await texts()) == 8
            assert await texts(node="n3") == ["hello from n3", "and more"]
            assert await texts(rank=3) == ["hello from n4", "and more"]
            with pytest.raises(grpc.aio.AioRpcError, match="no rank 4"):
                await texts(rank=4)

            call = control.Logs(pb.LogsRequest(job_id=job_id, node="n2", follow=True))
            followed = [(await call.read()).line for _ in range(2)]
            agents[1].send(log=pb.LogLines(job_id=job_id, slot=0, lines=["later"], dropped=7))
            followed += [(await call.read()).line for _ in range(2)]
            assert followed == [
                "hello from n2",
                "and more",
                "[7 lines were dropped here: too many at once]",
                "later",
            ]
            await control.CancelJob(pb.CancelRequest(request_id="c1", job_id=job_id))
            assert await call.read() is grpc.aio.EOF

    with master(tmp_path / "state") as running:
        loops.run(test(running.address), limit_s=480)


def test_who_reads_is_not_told_by_what_a_process_is_known(tmp_path: Path) -> None:
    """Whoever knows a process's incarnation speaks for it."""

    async def test() -> None:
        with master(tmp_path / "state") as running:
            async with (
                connected(running.address, 4) as agents,
                operator(running.address) as control,
            ):
                job_id = await started(agents, control)
                await agents[3].disconnect()
                agents[2].lost_peer(1)
                await all_of(agents[:3], lambda a: a.planned == 2)
                asked = pb.JobRequest(job_id=job_id)
                told = [
                    await control.ListNodes(pb.ListNodesRequest()),
                    await control.ListJobs(pb.ListJobsRequest()),
                    await control.GetJob(asked),
                    await control.WatchJob(asked).read(),
                    *[one async for one in control.Events(pb.EventsRequest(job_id=job_id))],
                ]
                assert sum(len(node.workers) for node in told[0].nodes) >= 3
                said = b"".join(one.SerializeToString() for one in told)
                assert [a.process for a in agents if a.process.encode() in said] == []

    loops.run(test())
