"""What becomes of a job when the head's state directory is lost, mistaken, or an old copy."""

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.client import Record, read_lines
from bench.support.preloaded import Preloaded
from bench.support.separate import Daemons
from support.clusters import FORGETFUL, PATIENT, job
from support.waiting import PATIENCE_S

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MASTER_FLAGS = tuple(flag.removeprefix("--master-flag=") for flag in PATIENT)


@pytest.fixture
def daemons(tmp_path: Path, preloaded: Preloaded) -> Iterator[Daemons]:
    """A master and two agents."""
    cluster = Daemons(tmp_path / "cluster", preloaded)
    with contextlib.closing(cluster):
        cluster.start_master(*MASTER_FLAGS)
        for name in ("n1", "n2"):
            cluster.start_node(name)
        cluster.wait(lambda: cluster.live() == {"n1", "n2"}, "two nodes")
        yield cluster


def head_of(cluster: Daemons) -> Record:
    found: Record = json.loads(cluster.oobleck("status", "--json").stdout)["head"]
    return found


def restart_on(cluster: Daemons, state_dir: Path, *options: str) -> None:
    """The head dies, and another one starts on that directory at its address."""
    cluster.kill_master()
    cluster.state_dir = state_dir
    cluster.start_master(*MASTER_FLAGS, *options)


def held_step(cluster: Daemons, job_id: str) -> int:
    """How far that job is, which the master does not know; -1: it knows of none."""
    held = head_of(cluster)["held"]
    return next((int(one["committed_step"]) for one in held if one["job_id"] == job_id), -1)


def wait_held(cluster: Daemons, job_id: str) -> None:
    cluster.wait(
        lambda: [node["state"] for node in cluster.nodes().values()] == ["held", "held"],
        "both nodes held",
    )
    step = held_step(cluster, job_id)
    cluster.wait(
        lambda: held_step(cluster, job_id) > step + 3, "steps of a job that is unknown", poll_s=0.2
    )


def test_an_empty_state_directory_ends_no_worker_and_the_old_one_goes_on(
    daemons: Daemons, text: str
) -> None:
    cluster, known = daemons, daemons.state_dir
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 5)
    workers, generation = cluster.worker_pids(), cluster.status(job_id)["generation"]
    restart_on(cluster, known.with_name("empty"))
    wait_held(cluster, job_id)
    assert cluster.worker_pids() == workers
    shown = cluster.oobleck("jobs").stderr
    refused = cluster.oobleck("cancel", job_id, check=False)
    assert refused.returncode == 3
    for told in (shown, refused.stderr):
        assert f"train job {job_id}" in told
        assert f"oobleck adopt {job_id}" in told
        assert f"oobleck cancel {job_id} --unknown" in told
    other = cluster.submit(job(text))
    assert other != job_id, "the id of a held job is given to nobody"
    assert cluster.status(other)["state"] != "running"
    doctor = cluster.oobleck("doctor", "--node", "n1", "--json", check=False)
    assert doctor.returncode == 1
    findings = json.loads(doctor.stdout)["findings"]
    assert any(job_id in one["what"] for one in findings if one["level"] == "fail")

    restart_on(cluster, known)
    cluster.wait_step(job_id, cluster.last_step(job_id) + 5)
    assert cluster.status(job_id)["generation"] == generation
    assert cluster.worker_pids() == workers
    steps = [line["step"] for line in read_lines(known / "jobs" / job_id / "metrics.jsonl")]
    assert steps == list(range(1, len(steps) + 1)), "each step stands once, and none is missing"
    assert head_of(cluster)["head"]["term"] == 1


def test_a_job_is_adopted_without_a_step_lost_and_its_losses_are_answered(
    daemons: Daemons, text: str
) -> None:
    cluster = daemons
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 5)
    workers = cluster.worker_pids()
    restart_on(cluster, cluster.state_dir.with_name("empty"), FORGETFUL)
    wait_held(cluster, job_id)
    held = held_step(cluster, job_id)
    told = cluster.oobleck("adopt", job_id).stdout
    assert "revocations" in told
    assert "the way back" in told
    again = cluster.oobleck("adopt", job_id, check=False)
    assert (again.returncode, "this master has it already" in again.stderr) == (2, True)
    step = cluster.last_step(job_id)
    cluster.wait_step(job_id, step + 3)
    assert cluster.worker_pids() == workers
    status = cluster.status(job_id)
    assert (status["state"], status["profile"]) == ("running", "estimate")
    adopted = cluster.events(job_id)[0]
    assert (adopted["event"], adopted["nodes"]) == ("adopted", ["n1", "n2"])
    cluster.start_node("n3")
    cluster.wait(lambda: "n3" in cluster.planned(job_id), "a third node in the plan")
    cluster.kill_node("n2")
    cluster.wait(lambda: cluster.planned(job_id) == {"n1", "n3"}, "the plan without n2")
    cluster.wait_step(job_id, cluster.last_step(job_id) + 3)
    metrics = cluster.state_dir / "jobs" / job_id / "metrics.jsonl"
    steps = [line["step"] for line in read_lines(metrics)]
    assert steps == list(range(steps[0], steps[-1] + 1)), "each step stands once"
    assert steps[0] <= held, "agents tell again what they told while the job was unknown"


def test_an_unknown_job_ends_when_an_operator_says_so(daemons: Daemons, text: str) -> None:
    cluster = daemons
    job_id = cluster.submit(job(text))
    cluster.wait_step(job_id, 3)
    restart_on(cluster, cluster.state_dir.with_name("empty"))
    wait_held(cluster, job_id)
    cluster.kill_node("n2")
    cluster.wait(lambda: "n2" not in cluster.live(), "n2 lost")
    refused = cluster.oobleck("adopt", job_id, check=False)
    assert refused.returncode == 2
    assert "n2" in refused.stderr
    assert cluster.oobleck("cancel", "other-1", "--unknown", check=False).returncode == 3
    cluster.oobleck("cancel", job_id, "--unknown")
    cluster.wait(lambda: cluster.nodes()["n1"]["state"] == "live", "n1 free")
    own = cluster.submit(job(text, name="own"))
    cluster.wait_step(own, 2)


def test_an_old_copy_that_is_put_back_goes_on_in_a_higher_term(
    daemons: Daemons, text: str, tmp_path: Path
) -> None:
    """In the directory itself, so that nothing but its files is another one."""
    cluster, old = daemons, tmp_path / "old"
    first = cluster.submit(job(text, name="first"))
    cluster.wait_step(first, 3)
    shutil.copytree(cluster.state_dir, old)
    cluster.oobleck("cancel", first)
    second = cluster.submit(job(text, name="second"))
    cluster.wait_step(second, 3)
    workers = cluster.worker_pids()
    cluster.kill_master()
    for path in cluster.state_dir.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(old, cluster.state_dir, dirs_exist_ok=True)
    # Nor is a replacement of their workers to come.
    cluster.start_master(*MASTER_FLAGS, FORGETFUL, "--replacement-grace-s=5")
    cluster.wait(lambda: bool(head_of(cluster)["held"]), "the second job held", poll_s=0.2)
    wait_held(cluster, second)
    head = head_of(cluster)
    assert head["head"]["term"] == 2
    assert head["behind"] > 0
    assert cluster.worker_pids() == workers
    # Nobody has what the copy says that the nodes train.
    cluster.wait(lambda: cluster.status(first)["state"] == "failed", "the first to end")
    cluster.oobleck("adopt", second)
    cluster.wait_step(second, cluster.last_step(second) + 3)
    assert cluster.worker_pids() == workers


def test_a_job_that_began_after_the_copy_keeps_its_workers(daemons: Daemons, text: str) -> None:
    """By the copy it is queued, and another job has the turn."""
    cluster, known = daemons, daemons.state_dir
    first, second = cluster.submit(job(text)), cluster.submit(job(text))
    cluster.wait_step(first, 3)
    copy = known.with_name("copy")
    shutil.copytree(known, copy)
    cluster.oobleck("cancel", first)
    cluster.wait_step(second, 5)
    workers, generation = cluster.worker_pids(), cluster.status(second)["generation"]

    restart_on(cluster, copy)
    cluster.wait(
        lambda: cluster.status(second)["generation"] == generation, "the plan of before is adopted"
    )
    assert cluster.worker_pids() == workers
    assert head_of(cluster)["held"] == []
    assert cluster.status(first)["state"] == "queued", "the copy has not heard of its end"
    took_turn = [one["event"] for one in cluster.events(first)]
    assert took_turn[-1] == "put_back"
    assert head_of(cluster)["behind"] > 0
    assert cluster.worker_pids() == workers


def test_the_directory_of_another_cluster_is_refused(tmp_path: Path, daemons: Daemons) -> None:
    cluster = daemons
    cluster.kill_master()
    for name in ("one", "other"):
        cluster.oobleck("pki", "init", "--dir", str(tmp_path / name))
    cluster.start_master("--pki", str(tmp_path / "one"))
    cluster.kill_master()
    before = (cluster.state_dir / "journal.log").read_bytes()
    logged = len(cluster.log.read_text())
    refused = cluster.run_master("--pki", str(tmp_path / "other"))
    assert refused.wait(PATIENCE_S) == 2
    assert "another cluster" in cluster.log.read_text()[logged:]  # agents write there, too
    assert (cluster.state_dir / "journal.log").read_bytes() == before
