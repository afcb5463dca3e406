"""Profiles through a real master process: measured, stored, over its death, named, and refused."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from oobleck.core.job.file import format_job
from oobleck.core.messages import LinkMeasured, Measured
from oobleck.core.profile import LinkMeasurement, format_profile, parse_profile
from oobleck.master.storage.ledger import read_profiles
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.proto import control_pb2 as pb
from support import loops
from support.jobs import job_spec
from support.live_agent import FakeAgent
from support.masters import MasterProcess, master, operator
from support.scenario import measurement

SPEC = job_spec("demo", measure=1)
PROFILE = format_profile(estimate_profile(SPEC, gpus_per_node=1, memory_per_worker_bytes=1 << 30))


async def all_of(agents: list[FakeAgent], condition: Callable[[FakeAgent], object]) -> None:
    await asyncio.gather(*(agent.until(lambda a=agent: condition(a)) for agent in agents))


def answer(agent: FakeAgent, *, link: bool) -> None:
    agent.send_report(Measured(attempt=1, measurement=measurement(0.25)))
    if link:
        wire = LinkMeasurement(scope="inter_node", latency_s=1e-4, bytes_per_s=1e9)
        agent.send_report(LinkMeasured(attempt=1, scope="inter_node", link=wire))


def test_a_master_that_dies_while_the_model_is_measured_goes_on_with_it(tmp_path: Path) -> None:
    state = tmp_path / "state"
    running = MasterProcess(state)

    async def test() -> None:
        nonlocal running
        agents = [FakeAgent(f"n{number}") for number in range(1, 5)]
        try:
            for agent in agents:
                await agent.connect(running.address)
            async with operator(running.address) as control:
                request = pb.SubmitRequest(request_id="r", job=format_job(SPEC))
                job_id = (await control.Submit(request)).job_id
                await all_of(agents, lambda a: a.assignments and a.assignments[-1].job_id)
                for agent in agents:
                    agent.workers()
                await all_of(agents, lambda a: a.assignments[-1].measure is not None)
                wish = agents[0].assignments[-1].measure
                assert wish is not None
                (pair,) = wish.meetings
                assert [worker.node for worker in pair.workers] == ["n1", "n2"]
                assert pair.rendezvous.host == "127.0.0.1:4001"
                assert (await control.GetJob(pb.JobRequest(job_id=job_id))).state == "profiling"
                with pytest.raises(grpc.aio.AioRpcError, match="nothing is measured so far"):
                    await control.GetProfile(pb.JobRequest(job_id=job_id))
            address = running.address
            running.kill()
            for agent in agents:
                await agent.disconnect()
            running = MasterProcess(state, listen=address)
            for agent in agents:
                await agent.connect(address)
                assert agent.assignments[-1].measure in (wish, None)
            for number, agent in enumerate(agents):
                answer(agent, link=number == 0)
            await all_of(agents, lambda a: a.planned == 1)
            async with operator(address) as control:
                reply = await control.GetProfile(pb.JobRequest(job_id=job_id))
            profile = parse_profile(reply.profile)
            assert [layer.forward_s[1] for layer in profile.layers] == [0.25] * 8
            stored = state / "profiles" / f"{reply.key}.json"
            assert parse_profile(stored.read_bytes()) == profile
            assert "date" in json.loads(stored.read_text())["measured"]
        finally:
            for agent in agents:
                await agent.disconnect()

    loops.run(asyncio.wait_for(test(), 480))
    running.close()
    assert "Traceback" not in running.errors.read_text()


def test_a_measurement_that_lacks_a_worker_is_for_its_job_alone(tmp_path: Path) -> None:
    async def test(address: str) -> None:
        agents = [FakeAgent(f"n{number}") for number in range(1, 5)]
        try:
            for agent in agents:
                await agent.connect(address)
            async with operator(address) as control:
                request = pb.SubmitRequest(request_id="r", job=format_job(SPEC))
                job_id = (await control.Submit(request)).job_id
                await all_of(agents, lambda a: a.assignments and a.assignments[-1].job_id)
                for agent in agents:
                    agent.workers()
                await all_of(agents, lambda a: a.assignments[-1].measure is not None)
                for number, agent in enumerate(agents[:3]):
                    answer(agent, link=number == 0)
                agents[3].send_report(Measured(attempt=1, measurement=None, problem="too warm"))
                await all_of(agents, lambda a: a.planned == 1)
                reply = await control.GetProfile(pb.JobRequest(job_id=job_id))
                assert reply.key == ""
                assert json.loads(reply.profile)["measured"]["missing"] == ["n4/0: too warm"]
                events = control.Events(pb.EventsRequest(job_id=job_id))
                told = [json.loads(event.json) async for event in events]
                (chosen,) = [record for record in told if record["event"] == "profile"]
                assert chosen["reason"] == (
                    "measured by 3 workers; n4/0: too warm; it is not stored"
                )
        finally:
            for agent in agents:
                await agent.disconnect()

    with master(tmp_path / "state") as running:
        loops.run(asyncio.wait_for(test(running.address), 480))
    assert not list((tmp_path / "state").glob("profiles/*"))
    assert "Traceback" not in running.errors.read_text()


def test_a_profile_comes_with_the_job_that_names_it_and_fits(tmp_path: Path) -> None:
    named = format_job(SPEC).replace('"measure"', '"/profiles/p.json"')
    unfit = json.loads(PROFILE)
    unfit["layers"].pop()
    wider = json.loads(PROFILE)
    for layer in wider["layers"]:
        layer["parameter_bytes"] *= 4

    async def test(address: str) -> None:
        async with operator(address) as control:
            for fields, wanted in (
                ({"job": named}, "profile: the text of /profiles/p.json did not come"),
                ({"job": named, "profile": "{"}, "profile: /profiles/p.json: not a valid profile"),
                ({"job": named, "profile": json.dumps(unfit)}, "has 7 layers, and the model has 8"),
                ({"job": named, "profile": PROFILE, "profile_only": True}, "set it to measure"),
                (
                    {"job": named.replace("/profiles/p.json", "estimate"), "profile_only": True},
                    "profile: is estimate; to measure the model, set it to measure",
                ),
                (
                    {"job": named, "profile": json.dumps(wider)},
                    "layers[0].parameter_bytes: ",
                ),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await control.Submit(pb.SubmitRequest(request_id="r", **fields))
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert wanted in (refused.value.details() or "")
            request = pb.SubmitRequest(request_id="r", job=named, profile=PROFILE)
            job_id = (await control.Submit(request)).job_id
            status = await control.GetJob(pb.JobRequest(job_id=job_id))
            assert status.profile == "file"
            reply = await control.GetProfile(pb.JobRequest(job_id=job_id))
            assert parse_profile(reply.profile) == parse_profile(PROFILE)

    with master(tmp_path / "state") as running:
        loops.run(asyncio.wait_for(test(running.address), 480))
    assert "Traceback" not in running.errors.read_text()


def test_a_stored_file_that_is_no_profile_is_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "profiles"
    folder.mkdir(parents=True)
    (folder / "broken.json").write_text('{"microbatch": 1')
    os.mkfifo(folder / "pipe.json")
    (folder / "folder.json").mkdir()
    (folder / "good.json").write_text(PROFILE)
    found = read_profiles(folder)
    assert found.profiles == {"good": parse_profile(PROFILE)}
    assert sorted(found.unusable) == ["broken", "folder", "pipe"]
    with master(tmp_path / "state") as running:
        pass
    errors = running.errors.read_text()
    assert "stored profile passed over" in errors
    assert "it is not JSON text" in errors
    assert "Traceback" not in errors
