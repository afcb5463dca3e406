"""Processes under an agent: the warm process, the workers forked from it, and their ends.

Owns descriptors and signals; decides nothing. Reports events to a `Listener`. Must not know the
master.

The kernel closes a process's sockets, and lets its parent wait for it, only once its memory is
freed: a tenth of a second for each gigabyte on a host, and seconds where a GPU's driver has memory
to free. Before that its first thread is already exiting and its exit status known. The kernel sends
no notice of that (a pidfd is of the whole process), so `EndWatch` polls, at some microseconds each.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec

from oobleck.agent.processes.output import Tail, read_available
from oobleck.core.ids import Incarnation, WorkerId
from oobleck.core.messages import (
    ChildExited,
    Fork,
    Forked,
    ForkFailed,
    FromWarm,
    FromWorker,
    Launch,
    ToWorker,
    Warm,
)
from oobleck.host.ipc.channel import frame, read_frame
from oobleck.host.ipc.marker import Marker
from oobleck.host.system.process import send_signal

#: Interval between two looks.
LOOK_S = 0.02
_MOST_BYTES = 1024
#: linux/sched.h: PF_EXITING.
_EXITING = 0x4
#: Exit code, or the signal that ended the process.
ExitStatus = tuple[int | None, int | None]
#: A worker that leaves this much unread is stuck.
WRITE_LIMIT_BYTES = 64 << 20


class EndWatch:
    """Watch of one process's end, in the event loop."""

    def __init__(self, pid: int, tell: Callable[[ExitStatus], None]) -> None:
        """Watch the process `pid`. `tell` is called once, if its status is known before its end."""
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._file: int | None = None
        with suppress(OSError):  # the process has been reaped: its parent has the status
            self._file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            self._timer = self._loop.call_later(LOOK_S, self._look)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _look(self) -> None:
        assert self._file is not None, "a stopped watch has no timer"
        try:
            stat = os.pread(self._file, _MOST_BYTES, 0).decode(errors="replace")
        except OSError:  # the process has been reaped: its parent has the status
            self.stop()
            return
        if (status := early_status(stat)) is None:
            self._timer = self._loop.call_later(LOOK_S, self._look)
            return
        self.stop()
        self._tell(status)


def early_status(stat: str) -> ExitStatus | None:
    """Return the status of a process that is exiting; None if it is not, or if its status is 0, as
    that of running processes. A process of which only the first thread has failed seems to exit
    too. `stat`: the content of /proc/PID/stat."""
    fields = stat.rpartition(") ")[2].split()
    flags, status = int(fields[6]), int(fields[-1])
    if not flags & _EXITING or not status:
        return None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.waitstatus_to_exitcode(status), None


logger = logging.getLogger(__name__)
#: Completes a launch before the worker gets it.
Complete = Callable[[Launch], Awaitable[Launch]]
_from_worker: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_from_warm: msgspec.json.Decoder[FromWarm] = msgspec.json.Decoder(FromWarm)


def _thread_id(stat: Path) -> int:
    return int(stat.parent.name)


class Listener(Protocol):
    """Receiver of the processes' events; called in the event loop."""

    def warm_ready(self) -> None: ...
    def warm_exited(self, returncode: int | None, last_line: str) -> None: ...
    def forked(self, incarnation: Incarnation, pid: int) -> None: ...
    def fork_failed(self, incarnation: Incarnation, reason: str) -> None: ...
    def received(self, incarnation: Incarnation, message: FromWorker) -> None: ...
    def printed(self, incarnation: Incarnation, lines: list[str]) -> None: ...
    def code_fetched(self, incarnation: Incarnation) -> None: ...
    def channel_closed(self, incarnation: Incarnation) -> None: ...
    def ending(self, incarnation: Incarnation, status: ExitStatus) -> None: ...
    def child_exited(self, pid: int, exit_code: int | None, signum: int | None) -> None: ...


class WorkerProcess:
    """Agent's ends of one worker: its channel, its output and a handle to kill it by."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, listener: Listener) -> None:
        self.worker = worker
        self.slot = worker.slot
        self.incarnation = incarnation
        self.pid: int | None = None
        self.tail = Tail()
        #: The user's code that the worker runs; readable after its end.
        self.marker = Marker()
        #: Set once the channel is closed, and all messages in it are handled.
        self.silent = asyncio.Event()
        #: Its end is known and is being reported.
        self.buried = False
        self._listener = listener
        self._handle: int | None = None
        self._watch: EndWatch | None = None
        self._socket, self._their_socket = socket.socketpair()
        self._output, self._their_output = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._output, False)
        self._output_open = True
        self._writer: asyncio.StreamWriter | None = None
        asyncio.get_running_loop().add_reader(self._output, self._on_output)

    def hand_over(self) -> tuple[int, int, int]:
        """Return the worker's ends, to be passed on with the fork."""
        return self._their_socket.fileno(), self._their_output, self.marker.fd

    def close_theirs(self) -> None:
        """Close the agent's copies of the worker's ends, so that the channel closes with the
        worker."""
        self._their_socket.close()
        os.close(self._their_output)

    def forked(self, pid: int) -> None:
        self.pid = pid
        with suppress(ProcessLookupError):  # it ended already and was reaped
            self._handle = os.pidfd_open(pid)
        self._watch = EndWatch(pid, lambda how: self._listener.ending(self.incarnation, how))

    async def serve(self, launch: Launch, complete: Complete | None = None) -> None:
        """Send `launch`, then pass messages to the listener until the channel closes. `complete`:
        completes the launch before it is sent."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
        completing: asyncio.Task[None] | None = None
        try:
            if complete is None:
                self.send(launch)
            else:
                completing = asyncio.create_task(self._complete(launch, complete))
            while (body := await read_frame(reader)) is not None:
                self._listener.received(self.incarnation, _from_worker.decode(body))
        except (ValueError, RecursionError, ConnectionError) as error:  # not understood, or cut
            fields = {"worker": self.worker, "pid": self.pid, "reason": error}
            logger.warning("worker's channel broke", extra=fields)
        finally:
            if completing is not None:
                completing.cancel()
            self._writer.close()
            self._writer = None
            self.silent.set()
        self._listener.channel_closed(self.incarnation)

    async def _complete(self, launch: Launch, complete: Complete) -> None:
        """Complete the launch and send it. The worker's start-up time is counted from then."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            completed = await complete(launch)
        except Exception:
            # The boundary of the task: without a complete launch the process never becomes ready.
            fields = {"worker": self.worker, "pid": self.pid}
            logger.exception("what a worker needs cannot be had", extra=fields)
            self.kill()
            return
        if completed.ready_by is not None:
            ready_by = completed.ready_by + loop.time() - began
            completed = msgspec.structs.replace(completed, ready_by=ready_by)
        self.send(completed)
        self._listener.code_fetched(self.incarnation)

    def send(self, message: ToWorker) -> None:
        """Send a message without waiting; a worker that does not read is killed."""
        if self._writer is None or self._writer.is_closing():
            return
        self._writer.write(frame(message))
        if self._writer.transport.get_write_buffer_size() > WRITE_LIMIT_BYTES:
            logger.warning("worker does not read", extra={"worker": self.worker, "pid": self.pid})
            self.kill()

    def kill(self) -> None:
        """Kill the process by SIGKILL, through a handle, so that a reused pid is never hit."""
        send_signal(self._handle, signal.SIGKILL)

    def kernel_state(self) -> str:
        """Return the kernel's letter for the process's state; empty: it is gone. D if any thread
        waits for a disk or file server, else the first thread's state."""
        threads = sorted(Path(f"/proc/{self.pid}/task").glob("*/stat"), key=_thread_id)
        try:
            states = [stat.read_text().rpartition(") ")[2][:1] for stat in threads]
        except OSError:  # a thread has just ended
            return ""
        return "D" if "D" in states else "".join(states[:1])

    def write_stacks(self) -> None:
        """Make the worker write its threads' stacks, if it can."""
        send_signal(self._handle, signal.SIGUSR1)

    def release(self) -> None:
        """Read the last output of a process that is ending or has ended, and close all that the
        agent has open for it."""
        if self._watch is not None:
            self._watch.stop()
        while self._output_open and self._on_output():
            pass
        self._close_output()
        self.marker.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._writer is not None:
            self._writer.transport.abort()

    def _on_output(self) -> bool:
        """Read the available output; return whether there was any."""
        data, closed = read_available(self._output)
        lines = self.tail.feed(data)
        if closed:
            self._close_output()
        if lines:
            self._listener.printed(self.incarnation, lines)
        return bool(data)

    def _close_output(self) -> None:
        if self._output_open:
            self._output_open = False
            asyncio.get_running_loop().remove_reader(self._output)
            os.close(self._output)
            if lines := self.tail.finish():
                self._listener.printed(self.incarnation, lines)


class WarmProcess:
    """Process that has the libraries loaded and forks the workers; one instance per start."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._socket, self._their_socket = socket.socketpair()
        #: Second descriptor of our end: asyncio owns the first, and cannot send descriptors.
        self._sender = self._socket.dup()
        #: Handle to kill it by: asyncio may reap it too, and then its exit status is lost.
        self._handle: int | None = None
        self._killed = False
        #: Its output, all of which goes to the agent's own standard error.
        self.tail = Tail()

    async def run(self, command: tuple[str, ...], environment: Mapping[str, str]) -> None:
        """Start the process, pass its messages to the listener, and return when it has ended."""
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        process: asyncio.subprocess.Process | None = None
        output, their_output = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(output, False)
        asyncio.get_running_loop().add_reader(output, self._pass_on, output)
        try:
            with self._their_socket:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=self._their_socket.fileno(),
                    stdout=their_output,
                    stderr=their_output,
                    env=environment,
                    start_new_session=True,
                )
            with suppress(ProcessLookupError):  # it ended already and was reaped
                self._handle = os.pidfd_open(process.pid)
            while not self._killed and (body := await read_frame(reader)) is not None:
                self._dispatch(_from_warm.decode(body))
        except (ValueError, RecursionError, OSError) as error:  # not understood, or cut
            logger.warning("warm process's channel broke", extra={"reason": error})
        finally:
            os.close(their_output)
            writer.close()
            self._sender.close()
            self.kill()
        returncode = await process.wait() if process is not None else None
        asyncio.get_running_loop().remove_reader(output)
        while self._pass_on(output):
            pass
        os.close(output)
        self.tail.finish()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        self._listener.warm_exited(returncode, self.tail.last_line())

    def _pass_on(self, output: int) -> bool:
        """Pass on the available output; return whether there was any."""
        data, closed = read_available(output)
        if closed:
            asyncio.get_running_loop().remove_reader(output)
        self.tail.feed(data)
        sys.stderr.buffer.write(data)
        sys.stderr.flush()
        return bool(data)

    def _dispatch(self, message: FromWarm) -> None:
        match message:
            case Warm():
                self._listener.warm_ready()
            case Forked(incarnation=incarnation, pid=pid):
                self._listener.forked(incarnation, pid)
            case ForkFailed(incarnation=incarnation, reason=reason):
                self._listener.fork_failed(incarnation, reason)
            case ChildExited(pid=pid, exit_code=exit_code, signal=signum):
                self._listener.child_exited(pid, exit_code, signum)

    def fork(self, request: Fork, worker: WorkerProcess) -> None:
        """Ask for a worker; if the warm process is gone, its exit reports that."""
        data = frame(request)
        try:
            sent = socket.send_fds(self._sender, [data], list(worker.hand_over()))
            if sent != len(data):
                raise ConnectionError("the warm process does not read")
        except OSError as error:
            logger.warning("fork failed", extra={"worker": worker.worker, "reason": error})
            self.kill()
        finally:
            worker.close_theirs()

    def kill(self) -> None:
        self._killed = True
        send_signal(self._handle, signal.SIGKILL)
