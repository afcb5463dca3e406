"""A host that lost its power is back: its agent has its name at once."""

import uuid
from pathlib import Path

import pytest

from bench.support.netcluster import NetCluster
from bench.support.network import unusable
from bench.support.preloaded import Preloaded
from support.faulty import job

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
#: Hours: whoever waits for the end of the agent before waits in vain.
_NEVER = ("--lease-s", "50000", "--ping-every-s", "50000", "--ping-timeout-s", "50000")


def test_the_agent_of_a_host_that_was_booted_again_has_its_name_at_once(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    if reason := unusable():
        pytest.skip(reason)
    boot = tmp_path / "boot"
    boot.write_text(f"{uuid.uuid4()}\n")
    booted = ("unshare", "--mount", "sh", "-c", f'mount --bind {boot} {_BOOT_ID} && exec "$0" "$@"')
    with NetCluster(
        2,
        state_dir=tmp_path / "state",
        master_options=_NEVER,
        preloaded=preloaded,
        around={"n2": booted},
    ) as cluster:
        before = cluster.nodes()["n2"]["pid"]
        cluster.net.unplug("n2")
        cluster.kill_node("n2")
        cluster.net.replace("n2")
        boot.write_text(f"{uuid.uuid4()}\n")
        cluster.start_node("n2")

        def is_back() -> bool:
            node = cluster.nodes()["n2"]
            return node["state"] == "live" and node["pid"] != before

        cluster.wait(is_back, "n2 with its new agent", 120, poll_s=0.1)
        job_id = cluster.submit(job())
        cluster.wait(lambda: cluster.planned(job_id) == {"n1", "n2"}, "both in training")
        cluster.oobleck("cancel", job_id)
        assert cluster.wait_end(job_id) == "cancelled"
