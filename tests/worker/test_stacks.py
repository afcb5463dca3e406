"""A worker that hangs tells where, whatever it hangs in."""

import os
import subprocess
import sys

_SCRIPT = """
import socket, sys, threading, time
from oobleck.host.channel import Channel
from oobleck.host.messages import Assign, Rendezvous, ToWorker
from oobleck.worker import stacks
from oobleck.worker.control import Control
from support.director import make_plan

stacks.ANSWER_S = 0.2
mine, theirs = socket.socketpair()
control = Control(Channel(theirs, ToWorker))
control.start()
agent = Channel(mine, ToWorker)

def push(generation):
    plan = make_plan(generation, [[("a", 3)]], [1])
    agent.send(Assign(plan=plan, rendezvous=Rendezvous(store="", prefix=""), boundary=False))
    control.wait_next(generation - 1)

def hang_here():
    time.sleep(1.0)

push(1)
stacks.answered()
time.sleep(0.5)
print("answered", file=sys.stderr, flush=True)
push(2)
hang_here()
"""


def test_stacks_are_told_where_a_push_is_not_answered() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr
    quiet, _, told = done.stderr.partition("answered\n")
    assert "Thread" not in quiet
    assert "hang_here" in told
    assert "control" in told, "of all threads"
