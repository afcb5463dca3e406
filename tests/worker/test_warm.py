"""The warm process: what it has loaded, and when the kernel has no process to give."""

import os
import signal
import socket
import subprocess
import sys

from bench.support.preloaded import Preloaded, Started
from oobleck.core.ids import Incarnation
from oobleck.core.messages import ChildExited, Fork, Forked, ForkFailed, FromWarm, Warm
from oobleck.host.ipc.channel import Channel, frame
from oobleck.host.ipc.marker import Marker

#: The first fork finds no process left, as under a limit that others have used up. Each worker has
#: a process beside it, as a job's code may start one, that would go on.
PROGRAM = """
import errno, os, time
real, calls = os.fork, []
def fork():
    calls.append(1)
    if len(calls) == 1:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
from oobleck.worker import warm
def configure():
    if len(calls) > 1 and real() == 0:
        time.sleep(60)
        os.write(1, b"outlived the worker")
        os._exit(0)
warm.host_log.configure = configure
warm.main()
"""

#: A step of a job like those of the other tests here, as a worker would take it.
STEP = """
import sys
from oobleck.worker import warm
loaded = set(sys.modules)
import torch
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.worker.models.registry import initialise_parameters
from oobleck.worker.models.registry import build_layer
from oobleck.worker.state import optimizer as optimizers
from oobleck.worker.state.optimizer import update
from oobleck.worker.state.optimizer import Slice
from oobleck.worker.runtime.random import RowKeys
spec = ModelSpec(layers=1, hidden=8, heads=2, sequence_length=4, dropout=0.1)
x = torch.zeros((2, 4), dtype=torch.long)
keys = RowKeys(seed=0, step=1, positions=(0, 1))
for index in range(spec.layer_count):
    layer = build_layer(spec, index)
    initialise_parameters(layer, spec, 0)
    x = layer(x, keys)
x.mean().backward()
for optimizer in (OptimizerSpec(), OptimizerSpec(name="sgd", momentum=0.9)):
    training = TrainingSpec(steps=1, global_batch=2, optimizer=optimizer)
    storage = torch.rand(1 + optimizer.moments, 9)
    update([Slice(storage=storage, gradient=torch.ones(9), decayed=True)], training, 1)
print(*sorted(set(sys.modules) - loaded))
# Before the first worker of a job that names its optimizer.
assert optimizers.load()
loaded = set(sys.modules)
weights = torch.nn.Parameter(torch.zeros(9))
weights.grad = torch.ones(9)
torch.optim.NAdam([weights]).step()
print(*sorted(set(sys.modules) - loaded))
"""


def test_a_step_of_training_loads_nothing_more() -> None:
    # Each worker would load it anew: torch._dynamo alone takes a second.
    done = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stdout.split() == []


def test_a_fork_that_fails_is_told_and_what_the_next_one_started_ends_with_it(
    preloaded: Preloaded,
) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(300)
    process = started(preloaded, PROGRAM, theirs)
    try:
        with ours:
            channel: Channel[FromWarm] = Channel(ours, FromWarm)
            assert isinstance(channel.receive(), Warm)
            told = fork(ours, channel, "first")
            assert told == ForkFailed(
                incarnation=Incarnation("first"), reason="Resource temporarily unavailable"
            )
            answer = fork(ours, channel, "second")
            assert isinstance(answer, Forked)
            assert answer.incarnation == "second"
            ended = channel.receive()
            assert isinstance(ended, ChildExited)
            assert ended.pid == answer.pid
        assert process.wait() == 0
    finally:
        process.close()


def started(preloaded: Preloaded, program: str, end: socket.socket) -> Started:
    """A warm process, with that end of its agent's channel, which is closed here."""
    with end:
        files = [end.fileno(), 1, 2]
        return preloaded.start(
            "support.script", program, environment=os.environ, files=files, timeout_s=120
        )


def fork(ours: socket.socket, channel: "Channel[FromWarm]", incarnation: str) -> FromWarm | None:
    theirs = socket.socketpair()
    reading, writing = os.pipe()
    marker = Marker()
    request = frame(Fork(slot=0, incarnation=Incarnation(incarnation)))
    socket.send_fds(ours, [request], [theirs[1].fileno(), writing, marker.fd])
    answer = channel.receive()
    for end in theirs:
        end.close()
    os.close(writing)
    marker.close()
    with open(reading, "rb") as output:
        assert output.read() == b""  # to its end, when nobody has it open
    return answer


#: A worker, and a process that a job's code has started in it.
HEARD = """
import os, signal, time
from oobleck.host.ipc.channel import Channel
from oobleck.worker import warm
def receive(self):
    if os.getpid() == warm_pid:
        return real(self)
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writing, b"it runs")
        time.sleep(600)
    os.read(reading, 1)
    for pid in (warm_pid, os.getpid(), child):
        os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    os._exit(os.WTERMSIG(status))
warm_pid, real, Channel.receive = os.getpid(), Channel.receive, receive
warm.main()
"""


def test_sigterm_is_the_agents_alone_to_answer(preloaded: Preloaded) -> None:
    """Slurm sends it to all processes of a step; what a worker has started ends by it as ever."""
    ours, theirs = socket.socketpair()
    ours.settimeout(300)
    process = started(preloaded, HEARD, theirs)
    try:
        with ours:
            channel: Channel[FromWarm] = Channel(ours, FromWarm)
            assert isinstance(channel.receive(), Warm)
            assert isinstance(fork(ours, channel, "first"), Forked)
            ended = channel.receive()
            assert isinstance(ended, ChildExited)
            assert (ended.exit_code, ended.signal) == (signal.SIGTERM, None)
        assert process.wait() == 0
    finally:
        process.close()
