"""Says where a worker hangs: the stacks of all its threads, in its log.

Written by a thread of the interpreter's own, so that neither a lock nor a native call that never
returns keeps it from being told. Also on SIGUSR1, for whoever looks on.
"""

import faulthandler
import signal

#: From the push of a new generation until a worker has left the old one, where nothing hangs.
ANSWER_S = 5.0


def tell_on_signal() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def expect_answer() -> None:
    """Unless `answered` is called in time, the stacks are told."""
    faulthandler.dump_traceback_later(ANSWER_S)


def answered() -> None:
    faulthandler.cancel_dump_traceback_later()
