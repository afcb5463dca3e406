"""Lines of progress on a terminal and in a pipe."""

import io

from oobleck.cli.output.progress import OneLine, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """What stands on the last line."""
        return self.getvalue().rpartition("\r\x1b[K")[2]


def test_on_a_terminal_one_line_counts_hosts_by_what_they_do() -> None:
    out, told = Terminal(), list[str]()
    progress = Progress(["n1", "n20", "n3", "n4"], out, told.append)
    for name in ("n1", "n20", "n3"):
        progress.begins(name, "connecting")
    progress.begins("n3", "installing")
    assert out.shown() == "[....................] 0/4  2 connecting, 1 installing"
    progress.ended("n1", "10.0.0.1  started", failed=False)
    progress.ended("n3", "10.0.0.3  FAILED: no room", failed=True)
    assert told == ["n1   10.0.0.1  started", "n3   10.0.0.3  FAILED: no room"]
    assert out.shown() == "[##########..........] 2/4, 1 failed  1 connecting"
    progress.ended("n20", "10.0.0.20  started", failed=False)
    progress.ended("n4", "10.0.0.4  started", failed=False)
    assert out.shown() == ""
    assert "\n" not in out.getvalue()


def test_in_a_pipe_each_change_is_a_line() -> None:
    out, told = io.StringIO(), list[str]()
    progress = Progress(["n1", "n20"], out, told.append)
    progress.begins("n1", "connecting")
    progress.begins("n20", "installing")
    progress.ended("n1", "10.0.0.1  started", failed=False)
    assert out.getvalue() == "n1   connecting\nn20  installing\n"
    assert told == ["n1   10.0.0.1  started"]


def test_a_line_that_is_waited_on_is_rewritten_and_stays_at_the_end() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for out in (terminal, pipe):
        line = OneLine(out)
        for text in ("n1 draining", "n1 draining", "n1 drained"):
            line.show(text)
        line.finish()
    assert terminal.getvalue() == "\r\x1b[Kn1 draining\r\x1b[Kn1 drained\n"
    assert pipe.getvalue() == "n1 draining\nn1 drained\n"
