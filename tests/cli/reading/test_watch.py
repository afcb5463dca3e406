"""`--watch`, forms and colours: on a terminal and into a pipe, while the master goes and comes."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import yaml
from click.testing import CliRunner, Result

from oobleck.cli.output.table import coloured, wants_colour
from oobleck.cli.reading.show import nodes, status
from oobleck.cli.reading.watch import Screen
from oobleck.proto import control_pb2 as pb
from support.operators_master import answering
from support.waiting import PATIENCE_S

NODES = pb.ListNodesReply(nodes=[pb.NodeInfo(node="n1", state="live", hostname="h\u00e9")])
_PARTS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


class Terminal:
    """What stands on a terminal after what was written to it, of the codes that a screen uses."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        end = 0
        for part in _PARTS.finditer(text):
            assert part.start() == end, text[end:]
            end = part.end()
            argument, code, control, letters = part.groups()
            if letters:
                line = self.lines[self.row].ljust(self.column)
                after = self.column + len(letters)
                self.lines[self.row] = line[: self.column] + letters + line[after:]
                self.column = after
            elif control == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif control == "\r":
                self.column = 0
            else:
                self._obey(argument, code)

    def _obey(self, argument: str, code: str) -> None:
        match code:
            case "A":
                self.row -= int(argument)
                assert self.row >= 0
            case "K":
                self.lines[self.row] = self.lines[self.row][: self.column]
            case "J" if argument == "":
                self.lines[self.row] = self.lines[self.row][: self.column]
                del self.lines[self.row + 1 :]
            case "J":
                self.lines = [""] * len(self.lines)
            case "H":
                self.row = self.column = 0
            case "m":
                pass
            case _:
                raise AssertionError(f"no such code: {argument}{code}")


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("LINES", "5")
    return monkeypatch


def test_a_block_is_drawn_over_the_last_one(sized: pytest.MonkeyPatch) -> None:
    out, terminal = io.StringIO(), Terminal()
    screen = Screen(out)

    def shown(block: str) -> list[str]:
        out.seek(0)
        out.truncate()
        screen.draw(block)
        assert "\x1b[2J" not in out.getvalue(), "to clear all first would flicker"
        terminal.write(out.getvalue())
        return terminal.lines

    assert shown("one\ntwo\nthree") == ["one", "two", "three", ""]
    assert shown("o\ntwo") == ["o", "two", ""]
    assert shown("x" * 20 + "\n" + "y" * 21) == ["x" * 20, "y" * 19 + "…", ""]
    assert shown("1\n2\n3\n4\n5") == ["1", "2", "3", "… 2 more lines; mak…", ""]
    assert shown("") == ["", ""]
    sized.setenv("COLUMNS", "10")
    screen.draw("after the size has changed")
    assert "\x1b[2J" in out.getvalue()


def test_states_alone_are_coloured_and_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listing = "NODE    STATE\nlive    lost\nfailed  live\n        live again\nstate       failed: x"
    painted = coloured(listing)
    assert painted.split("\n") == [
        "NODE    STATE",
        "live    \x1b[31mlost\x1b[0m",
        "failed  \x1b[32mlive\x1b[0m",
        "        live again",
        "state       \x1b[31mfailed\x1b[0m: x",
    ]
    assert not wants_colour()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value, wanted in (("NO_COLOR", "", True), ("NO_COLOR", "1", False)):
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv(name, value)
        assert wants_colour() is wanted
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour()


def test_into_a_pipe_each_answer_follows_the_one_before_until_the_job_ends() -> None:
    def of_job() -> Iterator[pb.JobStatus]:
        for step in (1, 2):
            yield pb.JobStatus(job_id="demo-1", state="running", committed_step=step, steps=3)
        yield pb.JobStatus(job_id="demo-1", state="failed", committed_step=2, steps=3)

    def watched(*flags: str) -> str:
        states = of_job()
        with answering(GetJob=lambda request: next(states)) as address:
            asked = ["--watch", "100ms", "demo-1", *flags, "--master", address]
            done = CliRunner().invoke(status, asked)
        assert (done.exit_code, done.stderr) == (0, "")
        return done.stdout

    steps = [json.loads(line)["committed_step"] for line in watched("--json").splitlines()]
    assert steps == [1, 2, 2]
    found = list(yaml.safe_load_all(watched("-o", "yaml")))
    assert [one["state"] for one in found] == ["running", "running", "failed"]
    blocks = watched().rstrip().split("\n\n")
    assert len(blocks) == 3
    for block in blocks:
        first, second, *_ = block.split("\n")
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", first)
        assert second == "job         demo-1"


def test_every_form_has_the_same_and_two_that_differ_are_refused() -> None:
    with answering(ListNodes=lambda request: NODES) as address:

        def told(*flags: str) -> Result:
            return CliRunner().invoke(nodes, [*flags, "--master", address])

        as_json, as_yaml = told("--json").stdout, told("-o", "yaml").stdout
        assert told("-o", "json").stdout == as_json
        assert as_yaml.isascii()
        assert yaml.safe_load(as_yaml) == json.loads(as_json)
        wide = told("--wide").stdout
        assert told("-o", "wide").stdout == wide
        assert "VERSIONS" in wide
        for flags, said in (
            (("--json", "-o", "yaml"), "--output yaml and --json differ; leave one out"),
            (("--wide", "-o", "yaml"), "--output yaml and --wide differ; leave one out"),
            (("-w", "1ms"), "is too often for a master; use 0.1s or more"),
        ):
            done = told(*flags)
            assert (done.exit_code, done.stdout) == (2, "")
            assert said in done.stderr
    assert told("-w").exit_code == 4, "only a master that has answered is waited for"


def test_on_a_terminal_a_view_outlives_the_master_and_ends_with_ctrl_c() -> None:
    answers = {"ListNodes": lambda request: NODES}
    main, other = pty.openpty()
    with answering(**answers) as address:
        process = subprocess.Popen(
            [sys.executable, "-m", "oobleck.cli.main", "nodes", "-w", "100ms", "--master", address],
            stdin=other,
            stdout=other,
            stderr=other,
            env={**os.environ, "TERM": "xterm", "NO_COLOR": "", "COLUMNS": "80", "LINES": "24"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(other)
        terminal, raw = Terminal(), ""

        def see(wanted: str) -> None:
            nonlocal raw
            while not any(wanted in line for line in terminal.lines):
                part = os.read(main, 1 << 16).decode()
                raw += part
                terminal.write(part.replace("\r\n", "\n"))

        see("n1")
    see("the master is away; running jobs continue without it")
    assert any(line.startswith("n1") for line in terminal.lines), "the last answer is kept"
    with answering(listen=address, **answers):
        while any("away" in line for line in terminal.lines):
            terminal.write(os.read(main, 1 << 16).decode().replace("\r\n", "\n"))
        see("n1")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
    os.close(main)
    assert "\x1b[32mlive\x1b[0m" in raw
    assert "\x1b[?" not in raw, "no mode of the terminal is changed, so none is left behind"
    assert [line.split()[:2] for line in terminal.lines if line.startswith("n1")] == [
        ["n1", "live"]
    ]
    assert (terminal.lines[-1], terminal.column) == ("", 0)
