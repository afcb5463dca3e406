"""The page of `oobleck top` while a real cluster loses a node and an operator drains another."""

import asyncio
import re

import pytest

from bench.support.cluster import LocalCluster
from support import loops
from support.page import shown

pytestmark = pytest.mark.cluster

#: Slow enough that little is computed while keys are pressed.
JOB = {
    "name": "shown",
    "model": {"layers": 4, "hidden": 32, "heads": 2, "sequence_length": 32},
    "training": {"steps": 100_000, "global_batch": 8, "microbatch": 1},
    "fault_tolerance": 1,
    "profile": "estimate",
}


def test_a_page_over_a_cluster_that_loses_a_node(small_cluster: LocalCluster, text: str) -> None:
    cluster = small_cluster
    job_id = cluster.submit({**JOB, "data": {"text": [text]}})

    async def watch() -> None:
        async with shown(cluster.endpoint) as page:

            def nodes() -> dict[str, str]:
                """Their states, as they stand there. Of other tests some may be lost."""
                found = [re.match(r"(n\d) +([a-z]+) ", line) for line in page.lines]
                return {row[1]: row[2] for row in found if row}

            await page.see("3 live", f"{job_id}  running", "n1[", "n2[", "n3[", "┤")
            await asyncio.to_thread(cluster.kill_node, "n3")
            await page.see("2 live", "recovered in ", "node n3", "can lose 1 more node")
            assert nodes()["n3"] == "lost"
            assert [*nodes()][-2:] == ["n1", "n2"], "first what needs a look"
            await page.until(lambda: "n3[" not in page.text, "a plan without it")
            await page.press("e")
            await page.see("goes on ")
            await page.press("n", "home", *["down"] * [*nodes()].index("n2"), "d")
            await page.see("Drain node n2?", f"Job {job_id} can lose 1 more node now.")
            await page.press("y")
            # The job wants to be able to lose one, so it keeps the node.
            await page.until(lambda: nodes()["n2"] == "draining", "n2 is to go")
            await page.press("u")
            await page.until(lambda: nodes()["n2"] == "live", "n2 is there again")
            await page.press("c", "y")
            await page.see(f"{job_id}  cancelled")

    loops.run(watch())
