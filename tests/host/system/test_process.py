"""Which signals end a daemon."""

import signal

from oobleck.host.system.process import end_signals


def test_the_end_of_a_terminal_counts_unless_it_was_ignored_before() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        assert end_signals() == (signal.SIGINT, signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        assert end_signals() == (signal.SIGINT,)
    finally:
        signal.signal(signal.SIGHUP, before)
