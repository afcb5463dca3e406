"""A double of workers for a real agent: real forks and channels, without torch or training.

Its workers are ready at once, enter every plan they are given, and commit steps as fast as the
job's seed says (milliseconds per step). What they do beyond that is set by the job's name:

- `fails`, `ails`: says Failed(user), or Failed(node), after Launch, and exits with 3.
- `deaf`: ignores Stop and SIGTERM.
- `exits`: exits with code 5 amid code of the user's, and says why.
- `quits`: exits with code 7 right after Launch, having printed 30 lines.
- `loses`: reports PeerLost after entering a plan.
- `mute`: gives no sign of life once it is ready.
- `timeless`: says that it computes, and that it takes no time.
- `chatty`: prints 5000 lines at its start.

STANDIN_FORKS_TO_FAIL in the environment: so many forks fail first. STANDIN_BROKEN: it has a library
that cannot be loaded as long as a file of that name is there.
"""

import faulthandler
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import NoReturn

from oobleck.core.ids import Generation
from oobleck.core.messages import (
    Alive,
    Ask,
    Assign,
    ChildExited,
    Committed,
    ComputeTime,
    Failed,
    Finished,
    Fork,
    Forked,
    ForkFailed,
    Launch,
    LinkMeasured,
    Measure,
    Measured,
    PeerLost,
    PhaseReached,
    Ready,
    Stop,
    ToWarm,
    ToWorker,
    Warm,
)
from oobleck.core.profile import LinkMeasurement
from oobleck.host.ipc.channel import Channel
from oobleck.host.ipc.marker import Marker
from oobleck.host.system.process import die_with_parent
from support.jobs import record


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def work(channel: Channel[ToWorker], marker: Marker) -> int:
    launch = channel.receive()
    if not isinstance(launch, Launch):
        return 1
    say(f"worker {launch.worker} faults={len(launch.faults)}")
    name = launch.job.name
    if name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if name in ("fails", "ails"):
        kind = "user" if name == "fails" else "node"
        channel.send(Failed(kind=kind, message="the data is missing"))
        return 3
    if name == "exits":
        marker.write("model: layer 1 (Net)")
        say("libgomp: Thread creation failed")
        return 5
    if name == "quits":
        say("\n".join(f"line {n}" for n in range(30)))
        return 7
    if name == "chatty":
        say("\n".join(f"line {n}" for n in range(5000)))
    channel.send(Ready(pid=os.getpid(), card=f"{launch.address}:{20000 + launch.worker.slot}"))
    generation, step = Generation(0), 0
    pause_s = launch.job.training.seed / 1000
    while True:
        running = generation > 0 and step < launch.job.training.steps
        readable, _, _ = select.select([channel], [], [], pause_s if running else None)
        if readable:
            match channel.receive():
                case None:
                    return 0
                case Ask() if name != "mute":
                    doing = "forward" if running else "wait for the plan"
                    channel.send(Alive(beats=step, doing=doing, waiting=not running))
                case Stop() if name != "deaf":
                    return 0
                case Measure(attempt=attempt, meetings=meetings):
                    # That it fails is an answer too.
                    channel.send(Measured(attempt=attempt, measurement=None, problem="no torch"))
                    for pair in meetings:
                        link = LinkMeasurement(scope=pair.scope, latency_s=0.001, bytes_per_s=1e9)
                        channel.send(LinkMeasured(attempt=attempt, scope=pair.scope, link=link))
                case Assign(plan=plan):
                    generation = plan.generation
                    for phase in ("aborted", "joined", "transferred"):
                        channel.send(
                            PhaseReached(
                                generation=generation,
                                phase=phase,  # type: ignore[arg-type]
                                committed_step=step if phase == "joined" else None,
                            )
                        )
                    if name == "loses":
                        channel.send(PeerLost(generation=generation, step=1, detail="n2/0 closed"))
                case _:
                    pass
        elif running:
            step += 1
            compute = ComputeTime(steps=step, seconds=0.0) if name == "timeless" else None
            channel.send(
                Committed(record=record(step, generation, time.time(), 0.01), compute=compute)
            )
            if step == launch.job.training.steps:
                channel.send(Finished(generation=generation, step=step))


def become_worker(channel_fd: int, output_fd: int, marker_fd: int, warm_pid: int) -> NoReturn:
    os.setsid()
    die_with_parent(warm_pid)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    faulthandler.register(signal.SIGUSR1)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(output_fd)
    status = 1
    try:
        status = work(Channel(socket.socket(fileno=channel_fd), ToWorker), Marker(marker_fd))
    finally:
        sys.stdout.flush()
        os._exit(status)


def main() -> None:
    die_with_parent(os.getppid())
    if os.path.exists(os.environ.get("STANDIN_BROKEN", "")):
        raise ImportError("libcublas.so.12: cannot open shared object file")
    agent: Channel[ToWarm] = Channel(socket.socket(fileno=os.dup(0)), ToWarm)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    forks_to_fail = int(os.environ.get("STANDIN_FORKS_TO_FAIL", "0"))
    agent.send(Warm(pid=os.getpid()))
    while True:
        readable, _, _ = select.select([agent, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
            reap(agent)
        if agent in readable:
            request = agent.receive()
            if request is None:
                return
            assert isinstance(request, Fork)
            channel_fd, output_fd, marker_fd = agent.take_descriptors()
            if forks_to_fail:
                forks_to_fail -= 1
                agent.send(ForkFailed(incarnation=request.incarnation, reason="no more processes"))
                for fd in (channel_fd, output_fd, marker_fd):
                    os.close(fd)
                continue
            warm_pid = os.getpid()
            if (pid := os.fork()) == 0:
                agent.close()
                become_worker(channel_fd, output_fd, marker_fd, warm_pid)
            for fd in (channel_fd, output_fd, marker_fd):
                os.close(fd)
            agent.send(Forked(incarnation=request.incarnation, pid=pid))


def reap(agent: Channel[ToWarm]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        killed = os.WIFSIGNALED(status)
        agent.send(
            ChildExited(
                pid=pid,
                exit_code=None if killed else os.waitstatus_to_exitcode(status),
                signal=os.WTERMSIG(status) if killed else None,
            )
        )


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the agent is gone
        main()
