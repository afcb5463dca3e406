"""Code of the user's that fails on a worker, though it was looked at before. In training the job
has failed, says where, and is not tried again. Before, it is the node's fault, unless most nodes
say the same."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

from bench.support.cluster import LocalCluster
from support.clusters import PATIENT
from support.folders import ROOT
from support.unlike_nodes import WRONG

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

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
        # The node that meets it first may be left out until another one says so too.
        assert status["generation"] <= 2


def test_what_is_missing_on_one_node_costs_that_node_and_on_all_the_job_before_a_step(
    small_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = small_cluster

    def submit(everywhere: bool) -> str:
        return cluster.submit(
            {
                "name": "unlike",
                "model": {
                    "python": "unlike_nodes:model",
                    "path": SUPPORT,
                    "arguments": {"everywhere": everywhere},
                },
                "data": {"python": "unlike_nodes:Points", "path": SUPPORT},
                "training": {"steps": 100_000, "global_batch": 12, "microbatch": 2},
                "fault_tolerance": 0,
                "profile": "estimate",
            }
        )

    no_tools = (
        r"model: layer 1 \(Middle\) failed: ModuleNotFoundError: No module named "
        r"'tools_of_a_node' \(unlike_nodes\.py:\d+\); install tools_of_a_node on every node"
    )
    no_samples = (
        r"data: sample 0: KeyError: 0 \(unlike_nodes\.py:\d+\); give every node the same .*"
    )
    cluster.start_node("n4", "--pass-env", WRONG, environment={WRONG: "tools"})
    cluster.wait(lambda: "n4" in cluster.live(), "n4 live", poll_s=0.1)
    job_id = submit(everywhere=False)
    cluster.wait_step(job_id, 1)
    wanted = {"n1", "n2", "n3"}
    cluster.wait(lambda: cluster.planned(job_id) == wanted, "a plan without n4", poll_s=0.1)
    assert cluster.status(job_id)["generation"] == 1
    cluster.start_node("n5", "--pass-env", WRONG, environment={WRONG: "samples"})
    cluster.wait(lambda: len(cluster.events(job_id, "node_left_out")) > 1, "n5 is left out")
    told = {record["node"]: record["reason"] for record in cluster.events(job_id, "node_left_out")}
    for node, reason in (("n4", no_tools), ("n5", no_samples)):
        assert re.fullmatch(reason, told[node]), told
        assert told[node] in cluster.nodes()[node]["reason"]
    # What takes a worker's place has no need to try.
    cluster.kill_worker("n2")
    cluster.wait(
        lambda: cluster.metrics(job_id)[-1]["generation"] > 1, "steps after a loss", poll_s=0.1
    )
    (log,) = (cluster.state_dir / "jobs" / job_id / "logs").glob("n2*")
    assert log.read_text().count("tried layers") == 1
    cluster.oobleck("cancel", job_id)

    monkeypatch.setenv(WRONG, "nothing")  # where it is submitted
    job_id = submit(everywhere=True)
    assert cluster.wait_end(job_id) == "failed"
    assert not cluster.metrics(job_id)
    reason = cluster.status(job_id)["reason"]
    assert re.fullmatch(rf"{no_tools} \(on n\d(, n\d)+(; something else on n5)?\)", reason), reason


#: What ends a process amid a user's code after some steps, and what is said of it.
ENDS = {
    ("loss", "KeyboardInterrupt"): r"model: the loss failed on .*: KeyboardInterrupt {line}",
    ("layer", "os._exit"): r"model: layer 1 \(Layer\): the user's code ended {status}",
    ("backward", "SystemExit"): r"model: the backward of layers? .* failed: SystemExit: .* {line}",
    ("optimizer", "GeneratorExit"): r"optimizer: Optimizer failed: GeneratorExit {line}",
    ("sample", "exit"): r"data: sample \d+: the user's code ended {status}",
}


def test_what_ends_a_process_in_a_users_code_ends_the_job_alone(
    small_cluster: LocalCluster,
) -> None:
    cluster = small_cluster
    for (where, how), told in ENDS.items():
        after = 150 if where == "optimizer" else 60  # more than where it is submitted
        named = {"path": SUPPORT, "arguments": {"where": where, "how": how, "after": after}}
        job_id = cluster.submit(
            {
                "name": f"ends-{where}",
                "model": {"python": "ending_models:model", **named},
                "data": {"python": "ending_models:Points", "workers": 1, **named},
                "training": {
                    "steps": 100_000,
                    "global_batch": 12,
                    "microbatch": 2,
                    "optimizer": {"python": "ending_models:Optimizer", "lr": 0.001, **named},
                },
                "fault_tolerance": 0,
                "profile": "estimate",
            }
        )
        assert cluster.wait_end(job_id) == "failed"
        status = cluster.status(job_id)
        expected = told.format(
            line=r"\(ending_models\.py:\d+\)", status=r"the process with status [09]"
        )
        assert re.fullmatch(expected, status["reason"]), status["reason"]
        assert cluster.live() == {"n1", "n2", "n3"}
        # Whoever meets it first, before the others do, is left out until another one says so too.
        left_out = [event["reason"] for event in cluster.events(job_id, "node_left_out")]
        assert len(left_out) <= 1
        assert all(re.fullmatch(expected, reason) for reason in left_out), left_out


MODEL = """
import queue, random, types

import torch

from oobleck.model import Model

assert "{folder}" in __file__


def make():
    def loss(output, targets):
        return (output[:, 0] - targets) ** 2

    return Model(layers=[lambda: torch.nn.Linear(2, 2)], loss=loss)


class Points:
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((2,), float(i)), torch.tensor(float(i))
"""


def test_the_current_folder_is_no_place_to_import_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither that of the cluster nor that of the job, whatever lies in them."""
    wrong = "raise ImportError('the wrong one')\n"
    names = [name for name in sys.stdlib_module_names if importlib.util.find_spec(name)]
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        for name in (*names, "numpy", "torch", "grpc", "sitecustomize"):
            (tmp_path / folder / f"{name}.py").write_text(wrong)
        (tmp_path / folder / "my_model.py").write_text(MODEL.format(folder=folder))
        job = {
            "name": folder,
            "model": {"python": "my_model:make"},
            "data": {"python": "my_model:Points", "workers": 1},
            "training": {"steps": 3, "global_batch": 4, "microbatch": 2},
            "profile": "estimate",
            "fault_tolerance": 0,
        }
        (tmp_path / folder / "job.yaml").write_text(yaml.dump(job))
    # As a checkout of this project has it.
    (tmp_path / "first" / "oobleck").mkdir()
    (tmp_path / "first" / "oobleck" / "__init__.py").write_text(wrong)
    monkeypatch.chdir(tmp_path / "first")
    with LocalCluster(1, state_dir=tmp_path / "state", options=PATIENT) as cluster:
        for folder in ("second", "first"):
            monkeypatch.chdir(tmp_path / folder)
            job_id = cluster.oobleck("submit", "job.yaml").stdout.strip()
            assert cluster.wait_end(job_id) == "succeeded", cluster.status(job_id)["reason"]
