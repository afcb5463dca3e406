"""Code of the user's that fails on a worker, though it was looked at before: the job has failed,
says where, and is not tried again."""

import re

import pytest

from bench.support.cluster import LocalCluster
from support.folders import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]

#: What the reason begins with.
FAILURES = {
    "layer": r"model: layer 1 \(Tired\) failed: ",
    "data": r"data: sample \d+: ",
}
SUPPORT = str(ROOT / "tests" / "support")


def test_what_fails_in_a_users_code_is_the_jobs_failure(small_cluster: LocalCluster) -> None:
    cluster = small_cluster
    for where, begin in FAILURES.items():
        named = {"path": SUPPORT, "arguments": {"where": where}}
        job_id = cluster.submit(
            {
                "name": f"tired-{where}",
                "model": {"python": "bad_models:tiring", **named},
                "data": {"python": "bad_models:Exhausted", **named},
                "training": {"steps": 100_000, "global_batch": 12, "microbatch": 2},
                "fault_tolerance": 0,
                "profile": "estimate",
            }
        )
        assert cluster.wait_end(job_id) == "failed"
        assert cluster.last_step(job_id) > 0, "it went well for a while"
        status = cluster.status(job_id)
        expected = rf"{begin}ValueError: tired \(bad_models\.py:\d+\)"
        assert re.fullmatch(expected, status["reason"]), status["reason"]
        assert status["generation"] == 1
