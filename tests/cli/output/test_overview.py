"""`oobleck status` of a whole cluster, from given messages."""

from oobleck.cli.output.overview import MOST_NODES, cluster_text
from oobleck.proto import control_pb2 as pb


def nodes(number: int, **changes: object) -> list[pb.NodeInfo]:
    fields = {"state": "live", "worker_slots": 1, "job_id": "demo-4", **changes}
    return [pb.NodeInfo(node=f"n{index:03}", **fields) for index in range(number)]  # type: ignore[arg-type]


def job(number: int, state: str, **changes: object) -> pb.JobStatus:
    fields = {"job_id": f"demo-{number}", "state": state, "steps": 10, **changes}
    return pb.JobStatus(**fields)  # type: ignore[arg-type]


JOBS = [
    job(1, "succeeded", finished_at=10),
    job(2, "failed", finished_at=30, reason="its own error"),
    job(3, "succeeded", finished_at=20),
    job(4, "running"),
    job(5, "queued"),
]


def firsts(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if line]


def test_jobs_that_go_on_come_first_and_ended_ones_are_counted() -> None:
    told = cluster_text(nodes(2), JOBS)
    assert firsts(told)[:3] == ["JOB", "demo-4", "demo-5"]
    assert told.splitlines()[4] == (
        "3 jobs ended: 2 succeeded, 1 failed; the last, demo-2, failed: its own error "
        "('oobleck status --all' lists them)"
    )
    assert firsts(told)[4:] == ["NODE", "n000", "n001"]
    assert cluster_text(nodes(1), JOBS[:1]).startswith("1 job ended: 1 succeeded; the last, demo-1")
    assert cluster_text([], []).startswith("no jobs; queue one with")


def test_of_many_nodes_those_that_need_a_look_are_listed_and_all_are_counted() -> None:
    many = nodes(100)
    many[40].state, many[40].reason = "draining", "new memory"
    many[70].state, many[70].job_id = "lost", ""
    told = cluster_text(many, [job(4, "running")])
    assert firsts(told) == ["JOB", "demo-4", "NODE", "n070", "n040", "100"]
    assert told.splitlines()[-1] == (
        "100 nodes: 98 live in demo-4, 1 draining in demo-4, 1 lost "
        "('oobleck status --all' lists them)"
    )


def test_however_many_need_a_look_few_are_listed() -> None:
    told = cluster_text(nodes(90, state="lost"), [])
    assert firsts(told).count("NODE") == 1
    assert len([line for line in told.splitlines() if " lost " in line]) == MOST_NODES + 1
    assert f"{90 - MOST_NODES} more need a look" in told


def test_all_lists_all() -> None:
    told = cluster_text(nodes(100), JOBS, everything=True)
    assert firsts(told)[:6] == ["JOB", "demo-4", "demo-5", "demo-1", "demo-2", "demo-3"]
    assert len(firsts(told)) == 1 + 5 + 1 + 100
