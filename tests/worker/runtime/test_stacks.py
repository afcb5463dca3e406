"""A worker that hangs tells where, whatever it hangs in."""

import os
import subprocess
import sys
from pathlib import Path

_SCRIPT = """
import os, socket, sys, threading, time
from oobleck.host.ipc.channel import Channel
from oobleck.core.messages import Assign, Rendezvous, ToWorker
from oobleck.worker.runtime import control as module
from oobleck.worker.runtime.control import Control
from support.director import make_plan

module.ANSWER_S = 0.3
mine, theirs = socket.socketpair()
control = Control(Channel(theirs, ToWorker))
control.start()
agent = Channel(mine, ToWorker)
generation = 0

def push():
    global generation
    generation += 1
    plan = make_plan(generation, [[("a", 3)]], [1])
    agent.send(Assign(plan=plan, rendezvous=Rendezvous(host="", prefix=""), boundary=False))
    control.wait_next(generation - 1)

def hang_here(size):
    while os.fstat(2).st_size == size:
        time.sleep(0.02)

in_time = False
while not in_time:
    print("pushed", file=sys.stderr, flush=True)
    began = time.monotonic()
    push()
    control.answered()
    in_time = time.monotonic() - began < module.ANSWER_S
    time.sleep(2 * module.ANSWER_S)
print("answered", file=sys.stderr, flush=True)
size = os.fstat(2).st_size
push()
hang_here(size)
control.answered()  # what is being told is told to its end
"""


def test_stacks_are_told_where_a_push_is_not_answered(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT],
            stderr=log,
            timeout=240,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
    text = path.read_text()
    assert done.returncode == 0, text
    before, _, told = text.partition("answered\n")
    quiet = before.rpartition("pushed\n")[2]
    assert "Thread" not in quiet
    assert "hang_here" in told
    assert "control" in told, "of all threads"
