"""Writes the stacks of all threads to the log when a worker hangs, and on SIGUSR1.

A thread of the interpreter's own writes them, so neither a lock nor a native call that never
returns prevents it.
"""

import faulthandler
import signal

#: From the push of a new generation until a worker has left the old one, where nothing hangs.
ANSWER_S = 5.0


def tell_on_signal() -> None:
    """Write the stacks on every SIGUSR1."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def expect_answer() -> None:
    """Unless `answered` is called in time, the stacks are told."""
    faulthandler.dump_traceback_later(ANSWER_S)


def answered() -> None:
    """The worker has left its old generation."""
    faulthandler.cancel_dump_traceback_later()
