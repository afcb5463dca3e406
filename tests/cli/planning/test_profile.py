"""`oobleck profile`, and jobs that name a profile: here, through a master, and refused."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from oobleck.core.profile import parse_profile
from support.commands import end, refused, run, start_master
from support.waiting import all_gone, until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("quick_start")]

JobFile = Callable[..., Path]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, quick_start: None) -> tuple[Path, str]:
    """A job file and the profile file that this machine's workers measured for it."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "data.txt").write_text("some text " * 100)
    path = folder / "job.yaml"
    path.write_text(
        "name: demo\nmodel: {layers: 2, hidden: 8, heads: 2, sequence_length: 8}\n"
        'data: {text: ["*.txt"]}\ntraining: {steps: 20, global_batch: 4}\n'
    )
    result = run("profile", str(path), "--output", str(folder / "p.json"), timeout_s=60)
    assert result.returncode == 0, result.stderr
    assert "profiling: the model is measured" in result.stderr
    return path, result.stdout


def test_two_workers_of_this_machine_measure(measured: tuple[Path, str]) -> None:
    path, table = measured
    assert "2 blocks" in table
    assert "between nodes" in table
    written = path.with_name("p.json").read_text()
    profile = parse_profile(written)
    assert [layer.name for layer in profile.layers] == ["embedding", "block0", "block1", "head"]
    assert all(layer.forward_s[1] > 0 for layer in profile.layers)
    notes = json.loads(written)["measured"]
    assert notes["workers"] == 2
    assert notes["inter_node_link"] == "measured"


def test_the_file_is_good_for_a_plan_and_for_a_job(measured: tuple[Path, str]) -> None:
    path, _ = measured
    file = path.with_name("p.json")
    asked = ("--nodes", "2", "--json")
    by_file = run("plan", "--profile", str(file), "--global-batch", "4", *asked)
    named = path.with_name("named.yaml")
    named.write_text(path.read_text() + "profile: p.json\n")
    by_job = run("plan", str(named), *asked)
    assert by_file.returncode == by_job.returncode == 0, by_job.stderr
    times = [json.loads(found.stdout)["templates"] for found in (by_file, by_job)]
    assert times[0] == times[1]


def test_a_job_that_names_a_profile_is_planned_by_it(
    cluster: str, measured: tuple[Path, str]
) -> None:
    path, _ = measured
    named = path.with_name("named.yaml")
    named.write_text(path.read_text() + "profile: p.json\n")
    master = ("--master", cluster)
    result = run("submit", str(named), "--follow", *master)
    assert result.returncode == 0, result.stderr
    assert json.loads(run("status", "demo-1", "--json", *master).stdout)["profile"] == "file"


def test_a_master_whose_workers_cannot_measure_says_why(cluster: str, job_file: JobFile) -> None:
    result = run("profile", str(job_file()), "--master", cluster)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("oobleck: failed: the model could not be measured: ")
    assert last.endswith("no torch")
    # A job goes on by the estimate, and its events say so.
    assert run("submit", str(job_file()), "--follow", "--master", cluster).returncode == 0
    lines = run("events", "demo-2", "--master", cluster).stdout
    assert "profile: estimate (the estimate is used: n1/0, n2/0: no torch)" in lines


def test_ctrl_c_calls_it_off_and_leaves_nothing(job_file: JobFile) -> None:
    command = [sys.executable, "-m", "oobleck.cli.main", "profile", str(job_file()), "--local"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stderr is not None
    told = iter(process.stderr.readline, "")
    assert any("starting two workers" in line for line in told), process.communicate()
    family: list[psutil.Process] = []

    def is_up() -> bool:
        family[:] = psutil.Process(process.pid).children(recursive=True)
        return len(family) >= 3

    until(is_up, "a master and two agents")
    os.kill(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 130, errors
    assert output == ""
    assert "Traceback" not in errors
    all_gone(family)


def test_a_profile_that_does_not_fit_is_refused(
    master: str, job_file: JobFile, tmp_path: Path, measured: tuple[Path, str]
) -> None:
    at = ("--master", master)
    absent = refused(run("submit", str(job_file(extra="profile: absent.json\n")), *at), 2)
    assert "profile: " in absent
    assert "give measure, estimate or the path of a profile file" in absent
    good = json.loads(measured[0].with_name("p.json").read_text())
    path = job_file(extra="profile: bad.json\n")
    for bad, message in (
        ({**good, "layers": good["layers"][1:]}, "has 3 layers, and the model has 4"),
        ({**good, "microbatch": 2}, "measured with microbatch 2, and the job has 1"),
        ({**good, "gpus_per_node": 0}, "gpus_per_node: 0 is below 1; give at least 1"),
        ({**good, "links": {}}, "links.intra_node_bytes_per_s: is missing; add it"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps(bad))
        assert message in refused(run("submit", str(path), *at), 2)
        assert message in refused(run("plan", str(path), "--nodes", "2"), 2)
    for output, message in (
        ("/nowhere/p.json", "its folder does not exist; make it first"),
        ("/proc/p.json", "name a file that can be written"),
    ):
        line = refused(run("profile", str(path), "--output", output), 2)
        assert line.startswith(f"oobleck: --output {output}: ")
        assert line.endswith(message)


def test_a_profile_that_cannot_be_written_is_not_lost(measured: tuple[Path, str]) -> None:
    result = run("profile", str(measured[0]), "--output", "/dev/full", timeout_s=60)
    assert result.returncode == 1
    assert len(parse_profile(result.stdout).layers) == 4
    last = result.stderr.strip().splitlines()[-1]
    assert last.endswith("No space left on device; the profile is on standard output")


def test_a_master_that_dies_meanwhile_is_waited_for(job_file: JobFile, tmp_path: Path) -> None:
    running, address = start_master(tmp_path / "state")
    command = [sys.executable, "-m", "oobleck.cli.main", "profile", str(job_file())]
    process = subprocess.Popen(
        [*command, "--master", address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        # No node is there, so the job waits.
        assert "waiting for nodes" in process.stderr.readline()
        running.kill()
        end(running)
        assert "the master is away" in process.stderr.readline()
        running, _ = start_master(tmp_path / "state", address)
        assert run("cancel", "demo-1", "--master", address).returncode == 0
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 1
        assert errors.strip().splitlines()[-1] == "oobleck: cancelled"
    finally:
        process.kill()
        process.communicate()
        end(running)
