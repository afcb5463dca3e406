"""The code beside a job file: it goes along where nodes have it in no other way, and a job whose
code no node runs is refused before it queues."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from support.clusters import PATIENT, end_jobs, make_whole

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SHORT = ("--set", "training.steps=100000", "--set", "profile=estimate")
ELSEWHERE = ("--allow-code", "nothing_of_it", "--no-accept-code")
ACCEPTS = ("--allow-code", "nothing_of_it", "--accept-code")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("packing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        with LocalCluster(
            2, state_dir=folder / "state", options=(*PATIENT, *ELSEWHERE), preloaded=preloaded
        ) as cluster:
            yield cluster


@pytest.fixture
def first(cluster: LocalCluster, tmp_path: Path) -> Iterator[Path]:
    """The folder of what `oobleck init` writes, with a helper, data and a virtual environment."""
    folder = tmp_path / "first"
    cluster.oobleck("init", str(folder))
    model = (folder / "my_model.py").read_text()
    (folder / "my_model.py").write_text(f"import helper  # noqa: F401\n{model}")
    (folder / "helper.py").write_text("")
    (folder / "corpus.bin").write_bytes(bytes(1000))
    (folder / "venv" / "lib").mkdir(parents=True)
    (folder / "venv" / "pyvenv.cfg").write_text("")
    (folder / "venv" / "lib" / "package.py").write_text("")
    yield folder
    end_jobs(cluster)


def restart(cluster: LocalCluster, **options: tuple[str, ...]) -> None:
    """Have just these nodes, each with its flags."""
    make_whole(cluster, set())
    for name, flags in options.items():
        cluster.start_node(name, *flags)
    cluster.wait(lambda: cluster.live() == set(options), f"{sorted(options)} live", poll_s=0.1)


def submit(cluster: LocalCluster, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return cluster.oobleck("submit", str(folder / "job.yaml"), *SHORT, *options, check=False)


def test_a_job_whose_code_no_node_runs_does_not_queue(cluster: LocalCluster, first: Path) -> None:
    restart(cluster, n1=ELSEWHERE, n2=ELSEWHERE)
    done = submit(cluster, first)
    assert done.returncode == 2
    *_, line = done.stderr.strip().splitlines()
    assert line.startswith("oobleck: no node runs the job: ")
    assert "start the agent with --accept-code" in line
    assert line.endswith(": n1, n2")
    done = submit(cluster, first, "--no-pack")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert f"start the agent with --allow-code {first}," in line
    assert line.endswith(": n1, n2")
    assert cluster.jobs() == []


def test_what_lies_beside_the_job_file_goes_along(cluster: LocalCluster, first: Path) -> None:
    restart(cluster, n1=ACCEPTS, n2=ACCEPTS)
    done = submit(cluster, first)
    assert done.returncode == 0, done.stderr
    size = sum(path.stat().st_size for path in first.glob("*.py"))
    assert done.stderr.splitlines()[0] == (
        f"oobleck: packed 2 files, {size / 1024:.1f} KiB, from {first}; left out: corpus.bin, "
        "job.yaml, venv/"
    )
    shutil.rmtree(first)
    cluster.wait_step(done.stdout.strip(), 2, 100)


def test_a_node_that_does_not_run_the_code_is_left_out_and_named(
    cluster: LocalCluster, first: Path
) -> None:
    restart(cluster, n1=ELSEWHERE, n2=ACCEPTS)
    done = submit(cluster, first, "--set", "fault_tolerance=0")
    assert done.returncode == 0, done.stderr
    warning = done.stderr.splitlines()[-1]
    assert warning.startswith(
        "oobleck: warning: left out of the job: no code that comes with a job"
    )
    assert warning.endswith(": n1")
    job_id = done.stdout.strip()
    cluster.wait_step(job_id, 2, 100)
    assert cluster.planned(job_id) == {"n2"}
    assert "start the agent with --accept-code" in cluster.nodes()["n1"]["reason"]


def test_where_it_is_allowed_code_stays_where_it_lies(cluster: LocalCluster, first: Path) -> None:
    restart(cluster, n1=("--no-accept-code", "--allow-code", str(first.parent)))
    done = submit(cluster, first, "--set", "fault_tolerance=0")
    assert done.returncode == 0, done.stderr
    assert "packed" not in done.stderr
    cluster.wait_step(done.stdout.strip(), 2, 100)


def test_agents_behind_links_tell_the_folder_that_they_allow(
    cluster: LocalCluster, first: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(first)
    restart(cluster, n1=("--no-accept-code", "--allow-code", str(link)))
    told = json.loads(cluster.oobleck("nodes", "--json").stdout)
    (node,) = (one for one in told if one["state"] == "live")
    assert node["code"] == {"accepts": False, "allows": sorted([str(link), os.fspath(first)])}


def test_a_path_whose_links_lead_to_an_allowed_folder_is_loaded(
    cluster: LocalCluster, first: Path, tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(first)
    restart(cluster, n1=("--no-accept-code", "--allow-code", str(first)))
    done = submit(cluster, link, "--set", "fault_tolerance=0")
    assert done.returncode == 0, done.stderr
    assert "packed" not in done.stderr
    cluster.wait_step(done.stdout.strip(), 2, 100)


def test_a_path_that_is_not_allowed_is_refused_by_the_workers(
    cluster: LocalCluster, first: Path, tmp_path: Path
) -> None:
    restart(cluster, n1=("--no-accept-code", "--allow-code", str(tmp_path / "other")))
    done = submit(cluster, first, "--set", "fault_tolerance=0", "--follow")
    assert done.returncode == 1
    assert f"start its agent with --allow-code {first}," in done.stderr
    assert "n1" in done.stderr
