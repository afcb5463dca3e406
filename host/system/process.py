"""Requests of a process to the kernel: to end with its parent, open files, signals that end it."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
#: Time within which a killed process ends, unless the kernel holds it.
_KILLED_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process as soon as its parent, `parent_pid`, ends. Linux only."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def python(module: str, *arguments: str) -> list[str]:
    """Return the command that runs one of our modules. It does not import from the current folder:
    a job's folder may have a `queue.py`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def with_parent(module: str) -> list[str]:
    """Return the beginning of a command that runs a Python module and ends with this process,
    however that ends. It also ends with the thread that starts it."""
    return python("oobleck.host.programs", str(os.getpid()), module)


def completed(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run a command and return its exit status and output. Unlike `subprocess.run` it kills the
    command's children too, and does not wait for one that survives SIGKILL. Raises OSError,
    TimeoutExpired."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILLED_S)
        raise
    finally:
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def output_of(
    command: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> bytes:
    """Run a command and return its output. Raises as `completed`, and CalledProcessError."""
    result = completed(command, timeout_s, environment)
    result.check_returncode()
    return result.stdout


def end_signals() -> tuple[signal.Signals, ...]:
    """Return the signals, besides SIGTERM, that end a daemon at once. These are SIGINT, and SIGHUP
    (its terminal's end) unless the daemon was started with that ignored, as by nohup."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return (signal.SIGINT,)
    return (signal.SIGINT, signal.SIGHUP)


def leave_ending_to_agent() -> None:
    """Ignore SIGTERM here: Slurm sends it to all processes of a step, and the agent alone answers,
    with a drain. Programs that this process starts get the default action again."""
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)  # library calls continue


def end_by_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def allow_open_files() -> int:
    """Raise the limit of this process's open files, 1,024 on most systems, and return the new
    one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def open_files() -> int:
    """Return the number of this process's open files; 0: unknown (Linux before 6.2)."""
    return os.stat("/proc/self/fd").st_size


def send_signal(handle: int | None, signum: signal.Signals) -> None:
    """Send a signal to the process behind a handle (pidfd), so that a reused pid is never hit. Do
    nothing if there is no handle or no process any more."""
    if handle is not None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signum)


def signal_name(signum: int) -> str:
    """Return a signal's name, as `SIGKILL` for 9; the number for one without a name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"
