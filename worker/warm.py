"""The warm process: it loads the libraries once and forks workers within milliseconds.

It stays single-threaded, opens no CUDA context and uses no gRPC, because none of these survives a
fork. Its standard input is its socket to the agent. It ends with the agent, and the workers end
with it.

    python -m oobleck.worker.warm < socket
"""

import contextlib
import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
from typing import NoReturn

# The first backward from a given gradient imports this, at half a second of each worker's time.
import torch.fx.experimental.symbolic_shapes  # noqa: F401

from oobleck.core.messages import (
    ChildExited,
    Fork,
    Forked,
    ForkFailed,
    Launch,
    ToWarm,
    ToWorker,
    Warm,
)
from oobleck.host import log as host_log
from oobleck.host.ipc.channel import Channel
from oobleck.host.ipc.marker import Marker
from oobleck.host.system.process import (
    allow_open_files,
    die_with_parent,
    end_by_sigterm,
    leave_ending_to_agent,
)
from oobleck.worker import session
from oobleck.worker.models import registry
from oobleck.worker.models.compiled import load_compiler
from oobleck.worker.runtime.code import end_process, mark_in
from oobleck.worker.runtime.control import Control
from oobleck.worker.runtime.memory import keep_freed_memory
from oobleck.worker.state import optimizer

log = logging.getLogger(__name__)


def keep_pages() -> None:
    """Freeze all imported objects: garbage collection would copy the pages they share with
    forks."""
    gc.collect()
    gc.freeze()


def load_for(kind: str) -> None:
    """Import the libraries for models of this `kind`, once.

    If one is missing, the worker reports it.
    """
    try:
        new = registry.load(kind)
    except ImportError as error:
        log.warning("model's libraries are missing", extra={"kind": kind, "error": str(error)})
        return
    if new:
        log.info("loaded the model's libraries", extra={"kind": kind})
        keep_pages()


def run_worker(channel_fd: int, output_fd: int, marker_fd: int, warm_pid: int) -> NoReturn:
    """Become a worker in the forked child; never return."""
    os.setsid()
    die_with_parent(warm_pid)
    signal.set_wakeup_fd(-1)
    for signum in (signal.SIGCHLD, signal.SIGINT):
        signal.signal(signum, signal.SIG_DFL)
    leave_ending_to_agent()
    # Processes of the user's code end at SIGTERM.
    os.register_at_fork(after_in_child=end_by_sigterm)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    os.close(null)
    os.close(output_fd)
    host_log.configure()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # SIGUSR1 prints stacks to the log

    status = 1
    try:
        mark_in(Marker(marker_fd))
        channel: Channel[ToWorker] = Channel(socket.socket(fileno=channel_fd), ToWorker)
        launch = channel.receive()
        if isinstance(launch, Launch):
            control = Control(channel)
            control.start()
            status = session.run(launch, control, os.getpid())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Groups and threads of the data plane must not delay the end of the process.
        end_process(status)


class ForkServer:
    """Server that forks workers on request and reports how they ended."""

    def __init__(self, agent: socket.socket) -> None:
        self._agent: Channel[ToWarm] = Channel(agent, ToWarm)

    def serve(self) -> None:
        """Serve the agent until it closes its end of the socket."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        # The kernel writes a signal to the pipe only if it has a handler, even an empty one.
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        self._agent.send(Warm(pid=os.getpid()))
        while True:
            ready, _, _ = select.select([self._agent.fileno(), wake_read], [], [])
            if wake_read in ready:
                os.read(wake_read, 4096)
                self._reap()
            if self._agent.fileno() in ready:
                message = self._agent.receive()
                if message is None:
                    return
                self._fork(message)

    def _fork(self, fork: Fork) -> None:
        channel_fd, output_fd, marker_fd = self._agent.take_descriptors()
        warm_pid = os.getpid()
        load_for(fork.kind)
        if fork.compiles and load_compiler():
            keep_pages()
        if fork.optimizes and optimizer.load():
            keep_pages()
        answer: Forked | ForkFailed
        try:
            pid = os.fork()
        except OSError as error:  # the other workers must survive this
            answer = ForkFailed(incarnation=fork.incarnation, reason=error.strerror or str(error))
        else:
            if pid == 0:
                self._agent.close()
                run_worker(channel_fd, output_fd, marker_fd, warm_pid)
            answer = Forked(incarnation=fork.incarnation, pid=pid)
        for fd in (channel_fd, output_fd, marker_fd):
            os.close(fd)
        self._agent.send(answer)

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            # Processes that the job's code has started would otherwise run for ever. The group's
            # number cannot be reused before its leader is reaped.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0)
            killed = os.WIFSIGNALED(status)
            self._agent.send(
                ChildExited(
                    pid=pid,
                    exit_code=None if killed else os.waitstatus_to_exitcode(status),
                    signal=os.WTERMSIG(status) if killed else None,
                )
            )


def main() -> None:
    die_with_parent(os.getppid())
    allow_open_files()
    host_log.configure()
    # The agent handles Ctrl-C in its terminal, and decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    leave_ending_to_agent()
    agent = socket.socket(fileno=os.dup(0))
    keep_freed_memory()
    keep_pages()
    with contextlib.suppress(BrokenPipeError):  # the agent ended during a message
        ForkServer(agent).serve()


if __name__ == "__main__":
    main()
