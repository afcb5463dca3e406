"""A worker that hangs tells where, whatever it hangs in."""

from bench.support.preloaded import Preloaded
from support.script import run_script

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


def test_stacks_are_told_where_a_push_is_not_answered(preloaded: Preloaded) -> None:
    _, text = run_script(preloaded, _SCRIPT)
    before, _, told = text.partition("answered\n")
    quiet = before.rpartition("pushed\n")[2]
    assert "Thread" not in quiet
    assert "hang_here" in told
    assert "control" in told, "of all threads"
