"""A job that brings its code in a wheel: no node has it before, each gets it from the master."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.host.wheel import Wheel
from support.clusters import PATIENT, bring_into, make_whole
from support.folders import ROOT
from support.wheels import wheel_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

CONTENT = wheel_of(
    {
        "brought/__init__.py": "",
        "brought/models.py": (ROOT / "examples" / "tagger.py").read_text(),
    }
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def cluster(home: Path, tmp_path: Path, preloaded: Preloaded) -> Iterator[LocalCluster]:
    with LocalCluster(
        3, state_dir=tmp_path / "state", options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


def test_it_trains_over_a_loss_and_a_join_of_a_node_that_never_saw_it(
    cluster: LocalCluster, home: Path, tmp_path: Path
) -> None:
    wheel = tmp_path / "mine-1.0-py3-none-any.whl"
    wheel.write_bytes(CONTENT)
    make_whole(cluster, {"n1", "n2", "n3"})
    job_id = cluster.submit(
        {
            "name": "brought",
            "model": {"python": "brought.models:tagger"},
            "data": {"python": "brought.models:Sentences"},
            "training": {"steps": 100_000, "global_batch": 12, "microbatch": 2},
            "profile": "estimate",
            "code": str(wheel),
        }
    )
    wheel.unlink()
    cluster.wait_step(job_id, 2)
    place = home / ".cache" / "oobleck" / "code" / Wheel(CONTENT).digest
    assert (place / "brought" / "models.py").is_file()
    cluster.kill_node("n3")
    cluster.wait(lambda: cluster.metrics(job_id)[-1]["generation"] > 1, "steps without n3")
    shutil.rmtree(place)
    bring_into(cluster, job_id, "n4")
    cluster.wait_step(job_id, cluster.last_step(job_id) + 2)
    assert (place / "brought" / "models.py").is_file(), "n4 fetched it"
    cluster.wait(lambda: cluster.planned(job_id) == {"n1", "n2", "n4"}, "n4 trains", poll_s=0.1)
    cluster.start_node("n5", "--no-accept-code")
    cluster.wait(lambda: "n5" in cluster.live(), "n5 is live", poll_s=0.1)
    reason = cluster.nodes()["n5"]["reason"]
    assert reason.startswith("cannot join the job: no code that comes with a job runs there")
    cluster.oobleck("cancel", job_id)
