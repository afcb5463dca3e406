"""Each step has its line in metrics.jsonl though the head and then all nodes are lost."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.support.preloaded import Preloaded
from bench.support.separate import Daemons
from oobleck.core.checkpoint import MANIFEST, RECORDS
from support.clusters import FORGETFUL, PATIENT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NODES = ("n1", "n2", "n3")
EVERY = 10
#: Steps between checkpoints of the job whose head is killed before the first one.
RARELY = 30


@pytest.fixture
def daemons(tmp_path: Path, preloaded: Preloaded) -> Iterator[Daemons]:
    daemons = Daemons(tmp_path / "cluster", preloaded)
    try:
        power_on(daemons)
        yield daemons
    finally:
        daemons.close()


def power_on(daemons: Daemons, *options: str) -> None:
    flags = (flag.removeprefix("--master-flag=") for flag in PATIENT)
    # Processes of before a power cut are all gone, and not waited for as usual.
    daemons.start_master("--quarantine-s=0", "--return-s=4", *flags, *options)
    for name in NODES:
        daemons.start_node(name)
    daemons.wait(lambda: daemons.live() == set(NODES), "the nodes", poll_s=0.1)


def job(text: str, tmp_path: Path, steps: int, every: int = EVERY) -> dict[str, object]:
    return {
        "name": "night",
        "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence_length": 16},
        "data": {"text": [text]},
        "training": {"steps": steps, "global_batch": 8, "microbatch": 2, "precision": "fp64"},
        "evaluation": {"every": 10, "fraction": 0.1, "samples": 8},
        "profile": "estimate",
        "checkpoint": {"path": str(tmp_path / "saved"), "every": every},
        "output": str(tmp_path / "output"),
    }


def checkpoints(tmp_path: Path) -> dict[int, Path]:
    """Return the folders of whole checkpoints, by step."""
    found = (path.parent for path in (tmp_path / "saved").glob(f"step-*/{MANIFEST}"))
    return {int(path.name.split("-")[1]): path for path in found}


def power_off(daemons: Daemons, tmp_path: Path, job_id: str) -> tuple[int, Path]:
    """Kill the master, and all nodes once two more checkpoints are there. Return the last recorded
    step, and the newest checkpoint."""
    daemons.kill_master()
    reached = daemons.last_step(job_id)
    saved = reached + EVERY + 1
    daemons.wait(lambda: max(checkpoints(tmp_path), default=0) >= saved, "two checkpoints")
    daemons.kill_nodes(*NODES)
    return reached, checkpoints(tmp_path)[max(checkpoints(tmp_path))]


def lines_beside(folder: Path) -> list[dict[str, Any]]:
    """Return the records of steps beside a manifest, which has their hash."""
    manifest = json.loads((folder / MANIFEST).read_text())
    content = (folder / RECORDS).read_bytes()
    assert manifest["records"]["sha256"] == hashlib.sha256(content).hexdigest()
    return [line["step"] for line in map(json.loads, content.splitlines()) if "step" in line]


def lines_told(content: bytes) -> list[int]:
    """Return the steps that a file of records tells of."""
    lines = map(json.loads, content.splitlines())
    return [line["step"]["step"] for line in lines if "step" in line]


def untold(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines without who told them: a plan may be made before all nodes are back."""
    return [{key: line[key] for key in line if key != "told_by"} for line in lines]


def evaluated(daemons: Daemons, job_id: str) -> list[int]:
    path = daemons.state_dir / "jobs" / job_id / "evaluations.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_records_survive_a_night_without_the_head_and_a_power_cut(
    daemons: Daemons, text: str, tmp_path: Path
) -> None:
    job_id = daemons.submit(job(text, tmp_path, 1_000_000))
    daemons.wait_step(job_id, EVERY + 5)
    # Who writes the manifest has not had all records then.
    daemons.kill_worker("n1")
    daemons.wait(lambda: bool(daemons.events(job_id, "reconfigured")), "the worker's replacement")
    reached, newest = power_off(daemons, tmp_path, job_id)
    beside = lines_beside(newest)
    step = beside[-1]["step"]
    assert beside[0]["step"] <= reached + 1
    assert f"step-{step:09}" in newest.name

    power_on(daemons)
    daemons.wait_step(job_id, step + EVERY)
    (restored,) = daemons.events(job_id, "restored")
    assert restored["step"] == step
    lines = daemons.metrics(job_id)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    night = slice(reached, step)
    assert untold(lines[night]) == [line for line in beside if line["step"] > reached]
    assert not daemons.events(job_id, "records_lost")
    found = evaluated(daemons, job_id)
    assert found == list(range(10, 10 * len(found) + 1, 10))
    daemons.oobleck("cancel", job_id)


def test_records_survive_where_the_job_ends_while_the_head_is_away(
    daemons: Daemons, text: str, tmp_path: Path
) -> None:
    steps = 3 * RARELY
    job_id = daemons.submit(job(text, tmp_path, steps, RARELY))
    daemons.wait_step(job_id, 5)
    with daemons.frozen("n1"):
        daemons.kill_master()
    assert not daemons.events(job_id, "checkpoint_saved"), "the master knows of none"
    reached, output = daemons.last_step(job_id), tmp_path / "output"
    daemons.wait((output / MANIFEST).exists, "the output")
    daemons.kill_nodes(*NODES)
    assert reached < steps - RARELY, "else this proves nothing"
    assert [line["step"] for line in lines_beside(output)][-1] == steps
    last = lines_beside(checkpoints(tmp_path)[steps])

    power_on(daemons)
    assert daemons.wait_end(job_id) == "succeeded"
    # The events of one moment are on disk before its records.
    daemons.wait(lambda: daemons.last_step(job_id) == steps, "the last records")
    lines = daemons.metrics(job_id)
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert untold(lines[reached:]) == [line for line in last if line["step"] > reached]
    assert evaluated(daemons, job_id) == list(range(10, steps + 1, 10))
    assert not daemons.events(job_id, "records_lost")


def cut_records(newest: Path) -> int:
    """Damage the file of records beside the newest checkpoint, as a power cut does; return the
    checkpoint's step."""
    content = (newest / RECORDS).read_bytes()
    (newest / RECORDS).write_bytes(content[:-1])
    return lines_told(content)[-1]


def test_an_operator_sees_training_go_on_while_records_are_waited_for(
    daemons: Daemons, text: str, tmp_path: Path
) -> None:
    job_id = daemons.submit(job(text, tmp_path, 1_000_000))
    daemons.wait_step(job_id, EVERY + 5)
    reached, newest = power_off(daemons, tmp_path, job_id)
    step = cut_records(newest)

    power_on(daemons, "--records-wait-s=100000")
    daemons.wait(lambda: daemons.planned(job_id) == set(NODES), "a plan of all nodes in training")
    daemons.wait(
        lambda: int(daemons.status(job_id)["checkpoint_step"]) > step, "a newer checkpoint"
    )
    status = daemons.status(job_id)
    assert (status["state"], status["recorded_step"]) == ("running", reached)
    assert status["committed_step"] > step
    assert status["tokens_per_s"] > 0
    assert not daemons.events(job_id, "records_lost"), "they are still waited for"
    shown = daemons.oobleck("status", job_id).stdout
    assert "state       running" in shown
    assert " of 1000000 (" in shown.partition("step ")[2].splitlines()[0]
    reconfigured = daemons.events(job_id, "reconfigured")[-1]
    assert reconfigured["to_generation"] == status["generation"]

    daemons.start_node("n4")
    daemons.wait(lambda: "n4" in daemons.planned(job_id), "n4 takes part")
    assert daemons.last_step(job_id) == reached
    daemons.oobleck("cancel", job_id)


def test_a_job_that_succeeded_has_all_steps_though_records_are_lost(
    daemons: Daemons, text: str, tmp_path: Path
) -> None:
    steps = 3 * RARELY
    job_id = daemons.submit(job(text, tmp_path, steps, RARELY))
    daemons.wait_step(job_id, 5)
    daemons.kill_master()
    reached = daemons.last_step(job_id)
    daemons.wait((tmp_path / "output" / MANIFEST).exists, "the output")
    daemons.kill_nodes(*NODES)
    assert reached < steps - RARELY, "else this proves nothing"
    assert cut_records(checkpoints(tmp_path)[steps]) == steps

    # For as long as workers may take to meet, the last records are waited for.
    power_on(daemons, FORGETFUL, "--meeting-s=15")
    assert daemons.wait_end(job_id) == "succeeded"
    for _ in range(2):
        (row,) = daemons.oobleck("jobs").stdout.splitlines()[1:]
        assert f"{steps}/{steps}" in row
        assert f"step        {steps} of {steps} (100%)" in daemons.oobleck("status", job_id).stdout
        assert daemons.last_step(job_id) == reached
        daemons.kill_master()
        daemons.start_master()


def test_a_cut_file_of_records_costs_them_alone_and_is_told(
    daemons: Daemons, text: str, tmp_path: Path
) -> None:
    job_id = daemons.submit(job(text, tmp_path, 1_000_000))
    daemons.wait_step(job_id, EVERY + 5)
    reached, newest = power_off(daemons, tmp_path, job_id)
    content = (newest / RECORDS).read_bytes()
    step = cut_records(newest)
    done = daemons.oobleck("checkpoint", "verify", str(newest), check=False)
    assert done.returncode == 1
    why = f"{RECORDS}: has {len(content) - 1} bytes, not {len(content)}"
    assert why in done.stdout

    power_on(daemons, FORGETFUL)
    daemons.wait(lambda: bool(daemons.events(job_id, "records_lost")), "that records are lost")
    (restored,) = daemons.events(job_id, "restored")
    assert restored["step"] == step
    (lost,) = daemons.events(job_id, "records_lost")
    assert (lost["first"], lost["last"]) == (reached + 1, step)
    assert why in lost["why"]
    daemons.wait_step(job_id, step + 3)
    steps = [line["step"] for line in daemons.metrics(job_id)]
    assert steps == [*range(1, reached + 1), *range(step + 1, steps[-1] + 1)]

    told = f"records of {reached + 1}-{step} are lost"
    assert told in daemons.oobleck("status", job_id).stdout
    assert told in daemons.oobleck("events", job_id).stdout
    status = daemons.status(job_id)
    assert status["records_lost"] == step - reached
    assert status["lost_records"] == [
        {"first_step": reached + 1, "last_step": step, "why": lost["why"]}
    ]
    shown = daemons.oobleck("metrics", job_id, "--from", str(reached)).stdout.splitlines()
    assert told in shown[2]
    lines = daemons.oobleck("metrics", job_id, "--from", str(reached), "--json").stdout
    found = [json.loads(line) for line in lines.splitlines()]
    assert found[1] == {"lost": [reached + 1, step], "why": lost["why"]}
    assert [found[0]["step"], found[2]["step"]] == [reached, step + 1]

    # A master that starts again goes on behind them.
    daemons.kill_master()
    flags = (flag.removeprefix("--master-flag=") for flag in PATIENT)
    daemons.start_master("--quarantine-s=0", *flags)
    daemons.wait_step(job_id, daemons.last_step(job_id) + 3)
    assert daemons.status(job_id)["records_lost"] == step - reached
    daemons.oobleck("cancel", job_id)
