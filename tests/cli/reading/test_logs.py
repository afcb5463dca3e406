"""What `oobleck logs` leaves out: all but the last lines, older ones, those without a match."""

import time
from datetime import UTC, datetime, timedelta

import pytest
from click.testing import CliRunner, Result

from oobleck.cli.reading.show import logs
from oobleck.proto import control_pb2 as pb
from support.operators_master import answering

LINES = [
    pb.LogLine(node="n1", slot=0, line=f"loss {number}", time=f"2026-03-01T00:00:0{number // 2}")
    for number in range(8)
]
#: What is printed after the lines so far were read, at the time of the last of them and later.
NEW = [
    pb.LogLine(node="n1", slot=0, line=f"loss {number}", time=f"2026-03-01T00:00:0{number - 5}")
    for number in (8, 9)
]


def asked(*flags: str) -> Result:
    return CliRunner().invoke(logs, ["demo-1", *flags])


def test_tail_grep_and_follow() -> None:
    def answer(request: pb.LogsRequest) -> list[pb.LogLine]:
        lines = [*LINES, *NEW] if request.follow else LINES
        return iter([line for line in lines if line.time >= request.since])  # type: ignore[return-value]

    with answering(Logs=answer) as address:

        def told(*flags: str) -> list[int]:
            done = asked("--master", address, *flags)
            assert (done.exit_code, done.stderr) == (0, ""), done
            return [int(line.split()[-1]) for line in done.stdout.splitlines()]

        assert told("--tail", "3") == [5, 6, 7]
        assert told("--tail", "0") == []
        assert told("--tail", "99") == list(range(8))
        assert told("--grep", "[2468]$", "--tail", "2") == [4, 6]
        assert told("--tail", "2", "-f") == [6, 7, 8, 9], "nothing twice, nothing left out"
        assert told("--tail", "0", "--watch") == [8, 9]
        assert told("--tail", "1", "-f", "--grep", "[0369]$") == [6, 9]
        assert told("-f") == list(range(10))
        wide = asked("-o", "wide", "--tail", "1", "--master", address).stdout
        assert wide == "2026-03-01T00:00:03  n1/0  loss 7\n"


def test_since_is_asked_of_the_master_in_its_words() -> None:
    told: list[str] = []

    def answer(request: pb.LogsRequest) -> object:
        told.append(request.since)
        return iter([])

    with answering(Logs=answer) as address:
        to_come = f"{datetime.now() + timedelta(minutes=10):%H:%M}"
        for since in ("10m", "2026-03-01T04:00:00+00:00", "0:07", to_come):
            assert asked("--since", since, "--master", address).exit_code == 0
    ago, moment, clock, later = (datetime.fromisoformat(stamp) for stamp in told)
    assert all(len(stamp) == len("2026-03-01T04:00:00.000000+00:00") for stamp in told)
    assert 600 <= time.time() - ago.timestamp() < 1200
    assert moment == datetime(2026, 3, 1, 4, tzinfo=UTC)
    assert (clock.astimezone().hour, clock.astimezone().minute) == (0, 7)
    assert f"{later.astimezone():%H:%M}" == to_come
    assert timedelta(hours=23) < datetime.now(UTC) - later < timedelta(hours=25), "of yesterday"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--grep", "a(b"), "missing ), unterminated subpattern, at character 2"),
        (("--grep", "*"), "nothing to repeat, at character 1"),
        (("--since", "yesterday"), "'yesterday' is not a time; write 10m (ago), 14:30, or '2026-"),
        (("--since", "25:00"), "'25:00' is not a time"),
        (("--since", "99999999999d"), "is not a time"),
        (("--tail", "-1"), "-1 is not in the range 0<=x<=100000"),
    ],
)
def test_what_is_no_pattern_and_no_time_is_refused(flags: tuple[str, str], said: str) -> None:
    done = asked(*flags, "--master", "127.0.0.1:1")
    assert (done.exit_code, done.stdout) == (2, "")
    assert said in done.stderr
