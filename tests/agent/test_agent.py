"""The agent as a process: a scripted master on one side, stand-in workers on the other.

Real sockets, real forks and real kills; only torch and the master's mind are missing.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from msgspec.structs import replace as replace_struct

from oobleck.core.codec import encode
from oobleck.core.ids import NodeName, WorkerId
from oobleck.core.job.file import format_job
from oobleck.core.messages import (
    Assign,
    Failed,
    LinkMeasured,
    LinkPair,
    Measure,
    Measured,
    PeerLost,
    PhaseReached,
    Rendezvous,
)
from oobleck.core.profile import LinkMeasurement
from oobleck.host.detection import Detection
from oobleck.proto import control_pb2 as pb
from oobleck.proto.detection import keepalive_options
from oobleck.proto.health import ALIVE, CHECK, READY
from oobleck.proto.protocol import NEWEST, OLDEST
from oobleck.proto.status import read_status
from oobleck.proto.types import Head, Hung, WorkerExited
from support import loops
from support.commands import start_agent
from support.folders import SUPPORT
from support.scripted_master import QUICK, ScriptedMaster, Stream, job, plan
from support.waiting import PATIENCE_S, all_gone, until


class Agent:
    def __init__(self, master: str, workers: int = 1) -> None:
        self.process = start_agent(master, "n1", workers, errors=subprocess.PIPE)
        self.family: set[psutil.Process] = set()

    def descendants(self) -> set[psutil.Process]:
        """The processes below the agent; remembered, so that an orphan is found too."""
        self.family |= set(psutil.Process(self.process.pid).children(recursive=True))
        return self.family

    async def gone(self) -> None:
        """All processes below the agent have ended."""
        await asyncio.to_thread(all_gone, self.family)

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    async def has_grown_to(self, count: int) -> None:
        """There are as many processes below the agent."""
        below = f"{count} processes below the agent"
        await asyncio.to_thread(until, lambda: len(self.descendants()) >= count, below)
        assert len(self.family) == count


@asynccontextmanager
async def cluster(
    workers: int = 1, detection: Detection = QUICK
) -> AsyncIterator[tuple[ScriptedMaster, Agent, Stream]]:
    """A scripted master and an agent whose session is welcomed."""
    async with ScriptedMaster.running() as master:
        agent = Agent(master.address, workers)
        try:
            stream = await master.next_session()
            await stream.welcome(detection)
            if keepalive_options(detection) != keepalive_options(QUICK):
                # It opens another channel, with these.
                stream = await master.next_session()
                await stream.welcome(detection)
            yield master, agent, stream
        finally:
            if agent.process.poll() is None:
                agent.descendants()
                agent.process.send_signal(signal.SIGINT)
                assert await agent.ended() == 0
            await agent.gone()
            assert agent.process.stderr is not None
            errors = agent.process.stderr.read()
            agent.process.stderr.close()
            assert "Traceback" not in errors, errors


def scenario(body: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Runs an asynchronous test."""

    def run() -> None:
        loops.run(asyncio.wait_for(body(), 480))  # type: ignore[arg-type]

    run.__doc__, run.__name__ = body.__doc__, body.__name__
    return run


@scenario
async def test_a_job_from_assignment_to_its_end() -> None:
    async with cluster(workers=2) as (_, _, stream):
        assert stream.register.facts.node == "n1"
        assert stream.register.facts.address == "127.0.0.1"
        await stream.assign("demo-1", job("demo", steps=5))
        workers = await stream.ready(2)
        incarnations = tuple(worker.incarnation for worker in workers)
        await stream.assign(
            "demo-1",
            job("demo", steps=5),
            version=2,
            placement=plan(1, "n1", slots=2),
            incarnations=incarnations,
        )
        await stream.workers(lambda ws: len(ws) == 2 and all(w.finished for w in ws))
        assert stream.steps() == [1, 2, 3, 4, 5], "rank 0 is here: each record once, in order"
        assert sorted(report.what.phase for report in stream.reports(PhaseReached)) == sorted(
            ["aborted", "joined", "transferred"] * 2
        )
        await stream.assign(version=3)
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 2)
        assert all(report.what.exit_code == 0 for report in stream.reports(WorkerExited))


@scenario
async def test_a_killed_worker_is_reported_and_replaced() -> None:
    async with cluster() as (_, _, stream):
        await stream.assign("demo-1", job("demo"))
        (first,) = await stream.ready()
        os.kill(first.pid, signal.SIGKILL)
        (second,) = await stream.workers(
            lambda ws: len(ws) == 1 and ws[0].incarnation != first.incarnation and ws[0].card != ""
        )
        (report,) = stream.reports(WorkerExited)
        assert report.incarnation == first.incarnation
        assert report.what.signal == signal.SIGKILL
        assert report.what.log_tail == "worker n1/0 faults=2"
        assert second.pid != first.pid


@scenario
async def test_a_plan_for_the_process_that_died_does_not_reach_its_replacement() -> None:
    async with cluster() as (_, _, stream):
        await stream.assign("demo-1", job("demo"))
        (first,) = await stream.ready()
        os.kill(first.pid, signal.SIGKILL)
        (second,) = await stream.workers(
            lambda ws: len(ws) == 1 and ws[0].incarnation != first.incarnation and ws[0].card != ""
        )
        for generation, incarnation in ((1, first.incarnation), (2, second.incarnation)):
            await stream.assign(
                "demo-1",
                job("demo"),
                version=1 + generation,
                placement=plan(generation, "n1"),
                incarnations=(incarnation,),
            )
        await stream.until(lambda m: len(stream.reports(PhaseReached)) == 3)
        assert {report.what.generation for report in stream.reports(PhaseReached)} == {2}


@scenario
async def test_a_worker_that_fails_is_reported_in_its_words_and_not_replaced() -> None:
    async with cluster() as (_, _, stream):
        await stream.assign("fails-1", job("fails"))
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 1)
        (failed,) = stream.reports(Failed)
        assert (failed.what.kind, failed.what.message) == ("user", "the data is missing")
        assert stream.reports(WorkerExited)[0].what.exit_code == 3
        before = len(stream.heard)
        await stream.until(lambda m: sum(m.HasField("status") for m in stream.heard[before:]) >= 3)
        assert len(stream.reports(WorkerExited)) == 1


@scenario
async def test_a_worker_that_exits_amid_the_users_code_is_the_jobs_failure() -> None:
    async with cluster() as (_, _, stream):
        await stream.assign("exits-1", job("exits"))
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 1)
        (failed,) = stream.reports(Failed)
        assert (failed.what.kind, failed.what.message) == (
            "user",
            "model: layer 1 (Net): the user's code ended the process with status 5 (its last line: "
            "libgomp: Thread creation failed)",
        )
        before = len(stream.heard)
        await stream.until(lambda m: sum(m.HasField("status") for m in stream.heard[before:]) >= 3)
        assert len(stream.reports(WorkerExited)) == 1


@scenario
async def test_why_a_slot_stays_empty_is_told_again_to_a_master_that_came_back() -> None:
    async with cluster() as (master, _, stream):
        await stream.assign("ails-1", job("ails"))
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 1)
        (failed,) = stream.reports(Failed)
        again = await master.restart()
        await again.until(lambda m: again.reports(Failed) == [failed])


@scenario
async def test_a_worker_that_keeps_quitting_is_not_forked_in_a_tight_loop() -> None:
    async with cluster() as (_, agent, stream):
        await stream.assign("quits-1", job("quits"))
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 4)
        tail = stream.reports(WorkerExited)[0].what.log_tail.split("\n")
        assert tail == [f"line {n}" for n in range(10, 30)]
        agent.process.send_signal(signal.SIGINT)
        assert await agent.ended() == 0
        assert agent.process.stderr is not None
        logged = agent.process.stderr.read().splitlines()
    ends = [line.split()[0] for line in logged if "worker ended" in line]
    third, fourth = (datetime.fromisoformat(moment) for moment in ends[2:4])
    assert fourth - third >= timedelta(seconds=0.99), "by the agent's own clock"


@scenario
async def test_a_worker_that_takes_no_time_is_told_of_once_and_says_nothing_to_the_master() -> None:
    async with cluster() as (_, agent, stream):
        spec = job("timeless", steps=5)
        await stream.assign("timeless-1", spec)
        (worker,) = await stream.ready()
        placed = plan(1, "n1")
        await stream.assign(
            "timeless-1", spec, placement=placed, incarnations=(worker.incarnation,)
        )
        (worker,) = await stream.workers(lambda ws: len(ws) == 1 and ws[0].finished)
        assert (worker.compute_steps, worker.compute_s) == (0, 0.0)
        agent.process.send_signal(signal.SIGINT)
        assert await agent.ended() == 0
        assert agent.process.stderr is not None
        logged = agent.process.stderr.read().splitlines()
    (line,) = [line for line in logged if "implausible compute time" in line]
    assert "0.0 s in 1 steps" in line


@scenario
async def test_the_warm_process_dies_and_all_is_built_up_again() -> None:
    async with cluster(workers=2) as (_, agent, stream):
        await stream.assign("demo-1", job("demo"))
        before = await stream.ready(2)
        (warm,) = psutil.Process(agent.process.pid).children()
        warm.kill()
        after = await stream.workers(
            lambda ws: (
                len(ws) == 2
                and all(w.card for w in ws)
                and not {w.pid for w in ws} & {w.pid for w in before}
            )
        )
        assert {report.what.signal for report in stream.reports(WorkerExited)} == {signal.SIGKILL}
        assert len(after) == 2


@scenario
async def test_steps_go_on_while_the_master_is_away_and_arrive_afterwards() -> None:
    async with cluster() as (master, _, stream):
        spec = job("demo", steps=60)
        await stream.assign("demo-1", spec)
        (worker,) = await stream.ready()
        await stream.assign(
            "demo-1", spec, placement=plan(1, "n1"), incarnations=(worker.incarnation,)
        )
        await stream.until(lambda m: len(stream.steps()) >= 5)
        await master.stop()
        await asyncio.sleep(0.5)  # the worker takes steps meanwhile
        await master.start()
        again = await master.next_session()
        assert again.incarnation == stream.incarnation
        assert again.register.status.workers[0].pid == worker.pid
        assert again.register.status.generation == 1
        await again.welcome()
        await again.say(ack=pb.Ack(job_id="demo-1", through_step=3))
        await again.until(lambda m: 60 in again.steps())
        assert again.steps() == sorted(set(again.steps())), "no gap, no repeat in one session"
        assert again.steps()[-1] == 60
        assert set(stream.steps()) | set(again.steps()) == set(range(1, 61))


@scenario
async def test_an_agent_that_is_none_of_the_first_two_holds_its_records_back() -> None:
    async with cluster() as (_, _, stream):
        spec = job("demo", steps=3)
        await stream.assign("demo-1", spec)
        (worker,) = await stream.ready()
        three = plan(1, "n0", "n00", "n1")
        await stream.assign("demo-1", spec, placement=three, incarnations=(worker.incarnation,))
        await stream.workers(lambda ws: any(w.finished for w in ws))
        assert stream.steps() == []
        await stream.say(ack=pb.Ack(job_id="demo-1", through_step=2))
        await stream.until(lambda m: stream.steps() != [])
        assert stream.steps() == [3]


@scenario
async def test_what_was_measured_is_told_and_told_again_to_a_master_that_came_back() -> None:
    async with cluster() as (master, _, stream):
        pair = LinkPair(
            scope="inter_node",
            workers=(WorkerId(NodeName("n1"), 0), WorkerId(NodeName("n2"), 0)),
            rendezvous=Rendezvous(host="127.0.0.1:20000", prefix="p"),
        )
        await stream.assign("demo-1", job("demo"), measure=Measure(attempt=1, meetings=(pair,)))
        await stream.until(lambda m: len(stream.reports(LinkMeasured)) == 1)
        again = await master.restart()
        await again.until(lambda m: len(again.reports(LinkMeasured)) == 1)
        for heard in (stream, again):
            (measured,) = heard.reports(Measured)
            (link,) = heard.reports(LinkMeasured)
            assert (measured.what.attempt, measured.what.problem) == (1, "no torch")
            assert link.what == LinkMeasured(
                attempt=1,
                scope="inter_node",
                link=LinkMeasurement(scope="inter_node", latency_s=0.001, bytes_per_s=1e9),
            )


@scenario
async def test_a_loss_is_told_again_to_a_master_that_came_back() -> None:
    async with cluster() as (master, _, stream):
        await stream.assign("loses-1", job("loses"))
        (worker,) = await stream.ready()
        await stream.assign(
            "loses-1", job("loses"), placement=plan(1, "n1"), incarnations=(worker.incarnation,)
        )
        await stream.until(lambda m: len(stream.reports(PeerLost)) == 1)
        again = await master.restart()
        await again.until(lambda m: len(again.reports(PeerLost)) == 1)


@scenario
async def test_how_a_worker_ended_is_told_again_until_one_after_it_has_committed() -> None:
    """What went into a stream that was dead by then is lost."""
    async with cluster() as (master, _, stream):
        await stream.assign("demo-1", job("demo"))
        (first,) = await stream.ready()
        os.kill(first.pid, signal.SIGKILL)
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 1)
        again = await master.restart()
        await again.until(lambda m: len(again.reports(WorkerExited)) == 1)
        assert again.reports(WorkerExited) == stream.reports(WorkerExited)
        (second,) = await again.ready()
        await again.assign(
            "demo-1", job("demo"), placement=plan(1, "n1"), incarnations=(second.incarnation,)
        )
        await again.until(lambda m: again.steps())
        last = await master.restart()
        await last.until(lambda m: last.steps())
        assert not last.reports(WorkerExited)


@scenario
async def test_output_beyond_the_bound_is_counted_not_lost_silently() -> None:
    async with cluster() as (_, _, stream):
        await stream.assign("chatty-1", job("chatty"))
        await stream.until(lambda m: "line 4999" in m.log.lines)
        logs = [message.log for message in stream.heard if message.HasField("log")]
        lines = sum(len(log.lines) for log in logs)
        assert lines + sum(log.dropped for log in logs) == 5001


@scenario
async def test_heartbeats_come_without_any_news() -> None:
    async with cluster() as (_, _, stream):
        await stream.until(lambda m: sum(m.HasField("status") for m in stream.heard) >= 3)


@pytest.mark.parametrize("failing", [1, 4])
def test_a_fork_that_fails_is_tried_again_and_costs_no_other_worker(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STANDIN_FORKS_TO_FAIL", str(failing))

    async def body() -> None:
        async with cluster(workers=2) as (_, agent, stream):
            await agent.has_grown_to(1)
            (warm,) = agent.family
            await stream.assign("demo-1", job("demo"))
            await stream.ready(2)
            assert warm.is_running()
            assert stream.reports(WorkerExited) == []

    loops.run(body())


@scenario
async def test_a_registration_that_is_no_good_is_not_repeated() -> None:
    async with ScriptedMaster.running() as master:
        agent = Agent(master.address)
        stream = await master.next_session()
        await agent.has_grown_to(1)
        await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "register.workers: too many")
        assert await agent.ended() == 2
        assert agent.process.stderr is not None
        with agent.process.stderr as errors:
            text = errors.read()
        assert text.endswith("oobleck-agent: refused by the master: register.workers: too many\n")
        assert "WARNING agent.session" not in text


@scenario
async def test_refused_for_good_ends_with_the_reason() -> None:
    async with ScriptedMaster.running() as master:
        agent = Agent(master.address)
        stream = await master.next_session()
        await stream.say(refused=pb.Refused(reason="another agent is called n1; use --name"))
        assert await agent.ended() == 2
        assert agent.process.stderr is not None
        with agent.process.stderr as errors:
            text = errors.read()
        assert "WARNING agent.session" not in text
        assert text.strip().split("\n")[-1] == (
            "oobleck-agent: refused by the master: another agent is called n1; use --name"
        )


@scenario
async def test_refused_for_now_tries_again() -> None:
    async with ScriptedMaster.running() as master:
        agent = Agent(master.address)
        stream = await master.next_session()
        await stream.say(refused=pb.Refused(reason="replaying the journal", temporary=True))
        again = await master.next_session()
        await again.welcome()
        agent.process.send_signal(signal.SIGINT)
        assert await agent.ended() == 0
        assert agent.process.stderr is not None
        agent.process.stderr.close()


HEAD = Head(
    cluster="aa" * 8,
    history="bb" * 8,
    term=2,
    begun_by="cc" * 8,
    start="ee" * 8,
    sequence=10,
)


@scenario
async def test_a_head_of_an_earlier_term_is_not_followed_and_records_stay() -> None:
    async with cluster() as (master, _, stream):
        await stream.assign("demo-1", job("demo"), head=HEAD)
        (worker,) = await stream.ready()
        await stream.assign(
            "demo-1",
            job("demo"),
            placement=plan(1, "n1"),
            incarnations=(worker.incarnation,),
            head=HEAD,
        )
        await stream.until(lambda m: m.HasField("records"))
        earlier = replace_struct(HEAD, term=1, begun_by="dd" * 8, sequence=99)
        again = await master.restart()
        assert again.register.acted_on == HEAD
        await again.assign(head=earlier)  # no job: it would end the worker
        await again.assign(head=replace_struct(HEAD, begun_by="dd" * 8))
        await again.until(lambda m: m.HasField("records"))
        third = await master.restart_unwelcome()
        await third.welcome(head=earlier)
        await asyncio.wait_for(third.ended.wait(), PATIENCE_S)
        fourth = await master.next_session()
        assert fourth.register.status.worker(0).incarnation == worker.incarnation
        await fourth.welcome(head=replace_struct(HEAD, term=3, begun_by="dd" * 8))
        await fourth.assign(head=replace_struct(HEAD, term=3, begun_by="dd" * 8))
        await fourth.workers(lambda workers: not workers)


@scenario
async def test_an_agent_that_trains_outlives_a_refusal_but_not_its_revocation() -> None:
    async with ScriptedMaster.running() as master:
        agent = Agent(master.address)
        stream = await master.next_session()
        await stream.welcome()
        await stream.assign("demo-1", job("demo"))
        (worker,) = await stream.ready()
        again = await master.restart_unwelcome()
        await again.say(refused=pb.Refused(reason="protocol", temporary=False))
        third = await master.next_session()
        assert third.register.status.worker(0).incarnation == worker.incarnation
        agent.descendants()
        await third.say(refused=pb.Refused(reason="gone", temporary=False, revoked=True))
        assert await agent.ended() == 2
        await agent.gone()
        assert agent.process.stderr is not None
        assert "refused by the master: gone" in agent.process.stderr.read()
        agent.process.stderr.close()


@scenario
async def test_an_agent_says_what_job_it_trains() -> None:
    async with cluster() as (_, _, stream):
        await stream.assign("demo-1", job("demo"))
        for number, job_id, text in (
            (1, "demo-1", format_job(job("demo"), defaults=False)),
            (2, "other-1", ""),
        ):
            await stream.say(tell_job=pb.TellJob(number=number, job_id=job_id))
            told = await stream.until(lambda m, n=number: m.job_told.number == n)
            assert told.job_told.job == text


@scenario
async def test_sigint_stops_workers_even_deaf_ones_within_the_grace() -> None:
    async with cluster(workers=2) as (_, agent, stream):
        await stream.assign("deaf-1", job("deaf"))
        await stream.ready(2)
        assert len(agent.descendants()) == 3
        agent.process.send_signal(signal.SIGINT)
        assert await agent.ended() == 0
        await agent.gone()


def test_what_workers_are_forked_from_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    broken.touch()
    monkeypatch.setenv("STANDIN_BROKEN", str(broken))

    async def body() -> None:
        async with ScriptedMaster.running() as master:
            agent = Agent(master.address)
            stream = await master.next_session()
            await stream.welcome()
            told = await stream.until(lambda m: m.status.failed_starts == 3)
            assert told.status.trouble == (
                "what workers are forked from has ended 3 times before it was ready; the last "
                "time: exit 1: ImportError: libcublas.so.12: cannot open shared object file"
            )
            broken.unlink()
            before = len(stream.heard)
            await stream.until(
                lambda m: (
                    m.HasField("status") and not m.status.trouble and m in stream.heard[before:]
                )
            )
            agent.process.send_signal(signal.SIGINT)
            assert await agent.ended() == 0
            assert agent.process.stderr is not None
            assert "ImportError" in agent.process.stderr.read()
            agent.process.stderr.close()

    scenario(body)()


def test_a_node_with_a_sick_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_SAMPLES", str(SUPPORT / "gpu_samples.jsonl"))

    async def body() -> None:
        async with cluster() as (_, _, stream):
            told = await stream.until(lambda m: bool(m.status.sick))
            assert "GPU 0000:b3:00.0: Xid 79, it has fallen off the bus" in told.status.sick
            assert "GPU 0000:3b:00.0: Xid 94" in told.status.concern

    scenario(body)()


@scenario
async def test_sigterm_ends_the_agent_when_the_work_has_moved_off() -> None:
    async with cluster(workers=2) as (_, agent, stream):
        await stream.assign("demo-1", job("demo"))
        await stream.ready(2)
        agent.process.send_signal(signal.SIGTERM)
        told = await stream.until(lambda m: m.HasField("status") and m.status.leaving)
        assert len(told.status.workers) == 2, "it goes on with its part"
        await stream.say(assignment=pb.Assignment(version=2, drained=True))
        assert await agent.ended() == 0
        await agent.gone()


def test_a_node_is_ready_while_a_master_hears_it_and_it_does_not_drain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEALTH_LISTEN", "127.0.0.1:0")

    async def body() -> None:
        async with ScriptedMaster.running() as master:
            agent = Agent(master.address)
            asked = partial(probed, await asyncio.to_thread(health_of, agent.process))
            assert await asked(ALIVE)
            assert not await asked(READY)
            stream = await master.next_session()
            await stream.welcome()
            await stream.assign("demo-1", job("demo"))
            await stream.ready()
            assert await asked(READY)
            agent.process.send_signal(signal.SIGTERM)
            await stream.until(lambda m: m.HasField("status") and m.status.leaving)
            assert (await asked(ALIVE), await asked(READY)) == (True, False)
            await stream.say(assignment=pb.Assignment(version=2, drained=True))
            assert await agent.ended() == 0
            assert agent.process.stderr is not None
            agent.process.stderr.close()

    scenario(body)()


def health_of(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    lines = (re.search(r"health is served.* address=(\S+)", line) for line in process.stderr)
    return next(told[1] for told in lines if told is not None)


async def probed(address: str, service: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(CHECK, response_deserializer=HealthCheckResponse.FromString)
        request = HealthCheckRequest(service=service).SerializeToString()
        return bool((await call(request, timeout=240)).status == HealthCheckResponse.SERVING)


@scenario
async def test_a_second_sigterm_ends_it_at_once() -> None:
    async with cluster(workers=2) as (_, agent, stream):
        await stream.assign("demo-1", job("demo"))
        await stream.ready(2)
        agent.process.send_signal(signal.SIGTERM)
        await stream.until(lambda m: m.HasField("status") and m.status.leaving)
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.ended() == 0


@scenario
async def test_sigterm_ends_an_agent_whose_master_is_gone() -> None:
    async with cluster(detection=replace(QUICK, answer_s=1.0)) as (master, agent, stream):
        spec = job("demo")
        await stream.assign("demo-1", spec)
        (worker,) = await stream.ready()
        two = plan(1, "n0", "n1")
        await stream.assign("demo-1", spec, placement=two, incarnations=(worker.incarnation,))
        await stream.workers(lambda ws: any(w.committed_step > 0 for w in ws))
        await master.stop()
        agent.process.send_signal(signal.SIGTERM)
        assert await agent.ended() == 0
        await agent.gone()
        assert agent.process.stderr is not None
        assert "no master has been there for 1 s" in agent.process.stderr.read()


@scenario
async def test_sigint_is_told_to_the_master_before_anything_else() -> None:
    async with cluster(workers=2) as (_, agent, stream):
        await stream.assign("demo-1", job("demo"))
        await stream.ready(2)
        agent.process.send_signal(signal.SIGINT)
        told = await stream.until(lambda m: m.HasField("status") and m.status.ending)
        assert not told.status.workers
        before = stream.heard[: stream.heard.index(told)]
        assert not any(m.HasField("report") and m.report.HasField("exited") for m in before)
        await stream.until(lambda m: len(stream.reports(WorkerExited)) == 2)
        assert await agent.ended() == 0


@pytest.mark.parametrize("state", ["idle", "working"])
def test_kill_9_of_the_agent_leaves_nothing_behind(state: str) -> None:
    async def body() -> None:
        async with cluster(workers=2) as (_, agent, stream):
            expected = 1
            if state == "working":
                await stream.assign("deaf-1", job("deaf"))
                await stream.ready(2)
                expected = 3
            await agent.has_grown_to(expected)
            agent.process.kill()
            await agent.ended()
            await agent.gone()

    loops.run(body())


#: A hang is found within two seconds, which a machine's own delays are not.
WATCHFUL = replace(QUICK, lease_s=2.0, ping_every_s=1.0, ping_timeout_s=1.0, hang_s=2.0)


@scenario
async def test_a_worker_that_gives_no_sign_of_life_is_given_up_and_replaced() -> None:
    async with cluster(detection=WATCHFUL) as (_, _, stream):
        await stream.assign("demo-1", job("mute"))
        (first,) = await stream.ready()
        await stream.until(lambda m: bool(stream.reports(WorkerExited)))
        (hung,) = stream.reports(Hung)
        assert hung.incarnation == first.incarnation
        assert re.fullmatch(r"the process does not answer for \d+ s", hung.what.reason)
        assert stream.reports(WorkerExited)[0].what.signal == signal.SIGKILL
        await stream.workers(lambda ws: len(ws) == 1 and ws[0].incarnation != first.incarnation)


@scenario
async def test_an_agent_that_was_paused_itself_blames_no_worker() -> None:
    async with cluster(detection=WATCHFUL) as (master, agent, stream):
        await stream.assign("demo-1", job("demo"))
        (worker,) = await stream.ready()
        agent.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * WATCHFUL.hang_s)
        agent.process.send_signal(signal.SIGCONT)
        streams, before = [stream], len(stream.heard)
        while sum(m.HasField("status") for s in streams for m in s.heard) < before + 5:
            # Heartbeats, between which it asks its worker. It may take the master's silence
            # meanwhile for the end of the session.
            if not master.waiting.empty():
                streams.append(await master.next_session())
                await streams[-1].welcome(WATCHFUL)
            await asyncio.sleep(0.02)
        assert [r for s in streams for kind in (Hung, WorkerExited) for r in s.reports(kind)] == []
        statuses = [read_status(m.status) for m in streams[-1].heard if m.HasField("status")]
        assert statuses[-1].workers[0].incarnation == worker.incarnation


@scenario
async def test_what_a_master_of_a_later_release_says_is_told_or_kept() -> None:
    async with cluster() as (master, _, stream):
        register = stream.heard_first.register
        assert (register.protocol, register.newest_protocol) == (OLDEST, NEWEST)
        assert register.versions.engine == "", "as the stand-in's configuration has it"
        # A key that this release does not know: it says so, and what it was told before stands.
        await stream.assign("demo-1", job("demo"))
        (worker,) = await stream.ready()
        text = json.loads(format_job(job("demo"))) | {"novel": 1}
        novel = pb.Assignment(version=2, job_id="demo-1", job=json.dumps(text))
        await stream.say(assignment=novel)
        told = await stream.until(lambda m: "novel" in m.status.trouble)
        assert told.status.trouble.startswith("what the master wants is not understood: assignment")
        assert told.status.trouble.endswith("upgrade Oobleck here")
        assert [w.incarnation for w in told.status.workers] == [worker.incarnation]

        # What it may pass over comes back whole to a master that lost its journal's end.
        assign = Assign(
            plan=plan(1, "n1"),
            rendezvous=Rendezvous(host="127.0.0.1:20000", prefix="p"),
            boundary=False,
        )
        values = json.loads(encode(assign)) | {"novel": [1, 2]}
        packed = zlib.compress(encode(values))
        known = pb.Assignment(
            version=3, job_id="demo-1", job=format_job(job("demo")), assign=packed,
            worker_incarnations=[worker.incarnation],
        )  # fmt: skip
        later = known.SerializeToString() + b"\xfa\x3f\x05novel"  # field 1023, a text
        await stream.say(assignment=pb.Assignment.FromString(later))
        await stream.until(lambda m: m.status.generation == 1 and not m.status.trouble)
        again = await master.restart()
        running = again.heard_first.register.running
        assert running.assign == packed
        assert running.job == ""
        assert b"novel" in running.SerializeToString()
        assert again.register.running is not None
        assert again.register.running.assign == assign
