"""The warm process when the kernel has no process to give."""

import os
import socket
import subprocess
import sys

from oobleck.host.channel import Channel, frame
from oobleck.host.messages import Fork, Forked, ForkFailed, FromWarm, Warm
from oobleck.planner.ids import Incarnation

#: The first fork finds no process left, as under a limit that others have used up.
PROGRAM = """
import errno, os
real, calls = os.fork, []
def fork():
    calls.append(1)
    if len(calls) == 1:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return real()
os.fork = fork
from oobleck.worker import warm
warm.main()
"""


def test_a_fork_that_fails_is_told_and_the_next_one_works() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdin=theirs)
    theirs.close()
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
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def fork(ours: socket.socket, channel: "Channel[FromWarm]", incarnation: str) -> FromWarm | None:
    theirs = socket.socketpair()
    reading, writing = os.pipe()
    request = frame(Fork(slot=0, incarnation=Incarnation(incarnation)))
    socket.send_fds(ours, [request], [theirs[1].fileno(), writing])
    answer = channel.receive()
    for end in theirs:
        end.close()
    os.close(reading)
    os.close(writing)
    return answer
