"""How `oobleck events` and `oobleck status` tell an incident."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from oobleck.cli.output import text
from oobleck.cli.output.events import clock, event_line, incident_block
from oobleck.core.ids import JobId
from oobleck.proto import control_pb2 as pb
from support.scenario import Player

SCENARIOS = Path(__file__).parents[2] / "master/scenarios"
AT = 1_700_000_010.0


def phases(detect: float, transfer: float) -> dict[str, float]:
    names = ("detect", "plan", "abort", "rendezvous", "transfer", "first_step")
    return {**dict.fromkeys(names, 0.0), "detect": detect, "transfer": transfer}


def cause(summary: str, at: float, **changes: object) -> dict[str, Any]:
    return {"summary": summary, "time": at, "log_tail": [], **changes}


def seen(at: float, by: str, observer: str, saw: str, about: str | None = None) -> dict[str, Any]:
    return {"time": at, "by": by, "observer": observer, "about": about, "saw": saw}


WITNESSES = [
    seen(AT, "peer", "n1/0", "socket closed"),
    seen(AT + 0.03, "agent", "n2", "pid 2018 was killed by SIGKILL", "n2/0"),
    seen(AT + 0.4, "stream", "master", "its agent's stream closed", "n8"),
]
RECORD: dict[str, Any] = {
    "event": "incident",
    "id": 7,
    "time": AT + 0.6,
    "incident": 2,
    "outcome": "recovered",
    "summary": "worker n2/0 (rank 1, pid 2018) was killed by SIGKILL; recovered in 0.600 s, step 6 "
    "done again",
    "root_cause": cause(
        "worker n2/0 (rank 1, pid 2018) was killed by SIGKILL", AT, log_tail=["step 5", "step 6"]
    ),
    "also_lost": [cause("node n8 (rank 7) was lost: closed", AT + 0.4, consequence=False)],
    "first_seen": WITNESSES[0],
    "witnesses": WITNESSES,
    "opened_at": AT,
    "closed_at": AT + 0.6,
    "total_s": 0.6,
    "phases": phases(0.04, 0.31),
    "attempts": [
        {"generation": 2, "rule": "replace", "phases": phases(0.03, 0.11), "total_s": 0.14},
        {"generation": 3, "rule": "merge", "phases": phases(0.01, 0.2), "total_s": 0.21},
    ],
    "steps_redone": 1,
    "redo_steps": [6],
    "salvaged_microbatches": 3,
    "salvaged_samples": 6,
    "rolled_forward": False,
    "received_bytes": 2048,
    "from_generation": 1,
    "to_generation": 3,
    "can_lose": 2,
}

BLOCK = """\
incident 2: worker n2/0 (rank 1, pid 2018) was killed by SIGKILL; recovered in 0.600 s
              first seen    peer n1/0: socket closed, {first}
              witnesses     +0.030 s agent of n2: pid 2018 was killed by SIGKILL
                            +0.400 s master: n8: its agent's stream closed
              also          +0.400 s node n8 (rank 7) was lost: closed (a failure of its own)
              seconds in      detect      plan     abort  rendezvous  transfer  first_step     total
               generation 2    0.030     0.000     0.000       0.000     0.110       0.000     0.140
               generation 3    0.010     0.000     0.000       0.000     0.200       0.000     0.210
               all             0.040     0.000     0.000       0.000     0.310       0.000     0.350
              cost          step 6 done again but for 6 samples, 2.0 KiB of state moved
              generation    1 -> 2 by replace -> 3 by merge
              can lose      2 more nodes, whichever
              last words    | step 5
                            | step 6"""


def test_an_incident_is_a_block_with_its_root_cause_first_and_phases_in_columns() -> None:
    told = incident_block(RECORD)
    at, _, rest = told.partition("  ")
    assert at == clock(AT)
    assert rest == BLOCK.format(first=at)


def test_time_without_nodes_and_steps_done_again_have_columns_where_there_is_any() -> None:
    record = copy.deepcopy(RECORD)
    record["phases"] |= {"waiting": 9.176, "redo": 6.7}
    record["attempts"][1]["phases"]["waiting"] = 9.176
    rows = [line.split()[-9:] for line in incident_block(record).splitlines()]
    rows = [row for row in rows if row[-1] in ("total", "0.210", "16.226")]
    assert [row[rows[0].index("waiting")] for row in rows] == ["waiting", "9.176", "9.176"]
    assert [row[rows[0].index("redo")] for row in rows] == ["redo", "0.000", "6.700"]


def test_one_generation_has_one_row_of_phases() -> None:
    record = copy.deepcopy(RECORD)
    del record["attempts"][0]
    told = incident_block(record).splitlines()
    assert sum(line.strip().startswith(("generation ", "all ")) for line in told) == 2


NARROW = """\
incident 2: worker n2/0 (rank 1, pid 2018) was killed by SIGKILL;
              recovered in 0.600 s
              first seen    peer n1/0: socket closed, {first}
              witnesses     +0.030 s agent of n2: pid 2018 was killed by SIGKILL
                            +0.400 s master: n8: its agent's stream closed
              also          +0.400 s node n8 (rank 7) was lost: closed (a
                            failure of its own)
              seconds in      detect      plan     abort  rendezvous  transfer
               generation 2    0.030     0.000     0.000       0.000     0.110
               generation 3    0.010     0.000     0.000       0.000     0.200
               all             0.040     0.000     0.000       0.000     0.310
              seconds in    first_step     total
               generation 2      0.000     0.140
               generation 3      0.000     0.210
               all               0.000     0.350
              cost          step 6 done again but for 6 samples, 2.0 KiB of
                            state moved
              generation    1 -> 2 by replace -> 3 by merge
              can lose      2 more nodes, whichever
              last words    | step 5
                            | step 6"""


def test_an_incident_fits_80_columns() -> None:
    told = incident_block(RECORD, width=80)
    at, _, rest = told.partition("  ")
    assert rest == NARROW.format(first=at)
    shown = incident_block(RECORD, width=80, colour=True)
    assert shown.count("\x1b") == 4
    assert re.sub(r"\x1b\[\d+m", "", shown) == told


@pytest.mark.parametrize("name", ["gpu-node-0123.rack-7.example.org", "n" * 63])
def test_long_names_and_last_words_fit_80_columns_and_no_name_is_cut(name: str) -> None:
    record = copy.deepcopy(RECORD)
    record["root_cause"] |= cause(f"node {name} was lost", AT, log_tail=["  word" * 30, "x" * 99])
    record["witnesses"][1] |= {"observer": name, "saw": "word " * 30}
    record["phases"] |= {"waiting": 91760.25, "redo": 6.7}
    told = incident_block(record, width=80).splitlines()
    assert all(len(line) <= 80 for line in told)
    assert sum(name in line for line in told) == 2
    last = [line[28:] for line in told[told.index(next(t for t in told if "last words" in t)) :]]
    assert all(line.startswith("| ") for line in last)


def test_a_job_that_never_had_a_plan_has_no_generations() -> None:
    without = {"from_generation": 0, "to_generation": 0, "attempts": [], "outcome": "failed"}
    assert "generation" not in incident_block({**RECORD, **without})


@pytest.mark.parametrize(("outcome", "code"), [("recovered", "32"), ("failed", "31")])
def test_colour_is_only_where_it_is_asked_for(outcome: str, code: str) -> None:
    record = {**RECORD, "outcome": outcome}
    assert "\x1b" not in incident_block(record)
    assert f"\x1b[{code}m" in incident_block(record, colour=True)


def test_many_witnesses_are_counted() -> None:
    many = [seen(AT + n, "peer", f"n{n}/0", "socket closed") for n in range(50)]
    told = incident_block({**RECORD, "witnesses": many})
    assert "and 41 more" in told


def test_status_names_the_newest_incident_in_one_line() -> None:
    job = pb.JobStatus(job_id="j", state="running", incidents=2, last_incident="node n1 was lost")
    assert "incident    2, not over: node n1 was lost" in text.job_text(job)
    job.last_incident_at = AT
    assert f"incident    2, {text.moment(AT)}: node n1 was lost" in text.job_text(job)


def test_elsewhere_an_incident_is_one_line() -> None:
    assert event_line(RECORD).endswith(f"incident 2: {RECORD['summary']}")


SLOW_BLOCK = """\
incident 1: slow worker n2/0 (rank 1): 0.25 of the others' pace;
              recovered after 22.6 s
              slow          +0.000 s n2/0 at 0.25 of the others' pace, 4.390 s a
                            step instead of 1.098 s, for 22.6 s, then normal
              answered      generation 2, uneven: n2/0 at 0.5 of the profiled
                            speed: partial reroute: a step takes 2.368 s in
                            place of 3.1 s, and 0 B move
                            generation 4, uneven: n2/0 at 0.25 of the profiled
                            speed: partial reroute: a step takes 2.734 s in
                            place of 4.564 s, and 0 B move
              seconds in      detect      plan     abort  rendezvous  transfer
               generation 2    0.000     0.000     0.100       0.000     0.000
               generation 4    0.000     0.000     0.200       0.000     0.000
               all             0.000     0.000     0.300       0.000     0.000
              seconds in    first_step     total
               generation 2      0.100     0.200
               generation 4      0.100     0.300
               all               0.200     0.500
              cost          training stood still for 15.000 s, 800 B of state
                            moved
              generation    1 -> 2 by partial reroute -> 4 by partial reroute
              can lose      1 more node, whichever"""


def of_slow_workers(scenario: str) -> list[dict[str, Any]]:
    """What `--json` prints of them, as the master tells it in that transcript."""
    player = Player()
    player.play((SCENARIOS / f"{scenario}.txt").read_text())
    told = (text.dump_line(line) for line in player.event_lines[JobId("demo-1")])
    found = [record for record in map(json.loads, told) if record["event"] == "incident"]
    return [record for record in found if record["root_cause"]["kind"] == "slow worker"]


def test_slow_workers_are_a_block_with_what_was_done_about_them() -> None:
    (record,) = of_slow_workers("slow_incident")
    told = incident_block(record, width=80)
    at, _, rest = told.partition("  ")
    assert at == clock(record["opened_at"])
    assert rest == SLOW_BLOCK
    assert event_line(record) == f"{at}  incident 1: {record['summary']}"
    # Training went on but for the switches, which are what it cost.
    assert record["total_s"] == sum(a["stall_s"] for a in record["attempts"])
    assert record["closed_at"] - record["opened_at"] > record["total_s"]


def test_slow_workers_that_no_plan_answers_say_so_and_how_it_ended() -> None:
    gone, cancelled = of_slow_workers("slow_incident_ends")
    lines = incident_block(gone).splitlines()
    assert lines[0].endswith(
        "incident 1: slow worker n2/0 (rank 1): 0.50 of the others' pace; gone after 18.1 s"
    )
    assert [line.strip() for line in lines[1:]] == [
        "slow          +0.000 s n2/0 at 0.50 of the others' pace, 2.927 s a step instead of "
        "1.463 s, for 16.0 s, then normal",
        "+3.000 s n1/0 at 0.35 of the others' pace, 4.360 s a step instead of 1.453 s, for 15.1 s",
        "answered      with no plan",
        "generation    1",
    ]
    assert "; cancelled after 5.0 s" in incident_block(cancelled)
    assert "\x1b[33mgone after" in incident_block(gone, colour=True)


def test_of_many_slow_workers_and_plans_the_first_and_the_last_are_shown() -> None:
    (record,) = of_slow_workers("slow_incident")
    many = {"slow": record["slow"] * 10, "attempts": record["attempts"] * 10}
    told = incident_block({**record, **many})
    assert "and 2 more" in told
    assert "and 12 before" in told
