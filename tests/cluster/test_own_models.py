"""Models and data sets of users on real clusters: the same training as a plain loop of torch,
whatever fails."""

import functools
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.support.client import Record, read_lines
from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from support import compiled_models, own_models
from support.clusters import PATIENT, make_whole
from support.outputs import read_output
from support.plain_loop import BATCH, MICROBATCH, RATE, SEED, STEPS, plain_loop

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
SUPPORT = ROOT / "tests" / "support"
sys.path.append(str(EXAMPLES))

import tagger  # noqa: E402  # an example is no package

ALL = frozenset({"n1", "n2", "n3", "n4"})
KILLED = {
    "tagger": ("after:Forward", 8),
    "pairs": ("before:Backward", 8),
    "dropout": ("after:Backward", 8),
    "compiled": ("before:Vote", 8),
}
FAULTS: list[dict[str, object]] = [
    {
        "worker": {"node": "n3", "slot": 0},
        "point": point,
        "job": name,
        "step": step,
        "action": "kill_node",
    }
    for name, (point, step) in KILLED.items()
]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("own") / "state"
    with LocalCluster(
        4, state_dir=state_dir, fault_plan=FAULTS, options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


def job_of(
    name: str, model: dict[str, object], data: dict[str, object], precision: str, **more: object
) -> dict[str, object]:
    return {
        "name": name,
        "model": model,
        "data": data,
        "training": {
            "steps": STEPS,
            "global_batch": BATCH,
            "microbatch": MICROBATCH,
            "seed": SEED,
            "precision": precision,
            "pipeline_schedule": "1f1b",  # the faults' points are its instructions
            "optimizer": {"name": "adamw", "lr": RATE},
        },
        "resources": {"min_nodes_per_pipeline": 2},
        "profile": "estimate",
        **more,
    }


def own(function: str, path: Path, **arguments: object) -> dict[str, object]:
    return {"python": function, "path": str(path), "arguments": arguments}


def train(
    cluster: LocalCluster, job: dict[str, object], nodes: Set[str] = ALL
) -> tuple[str, list[Record]]:
    """To its end, losing the node that the fault plan says; the metrics."""
    make_whole(cluster, nodes)
    job_id = cluster.submit(job)
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)
    told = cluster.events(job_id, "reconfigured")
    lost = [node for record in told for node in record["nodes_lost"]]
    assert lost == (["n3"] if job["name"] in KILLED else []), told
    metrics = cluster.metrics(job_id)
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    return job_id, metrics


def test_the_tagger_trains_as_in_a_plain_loop(cluster: LocalCluster, tmp_path: Path) -> None:
    arguments = {"size": 256, "length": 8}
    job = job_of(
        "tagger",
        own("tagger:tagger", EXAMPLES, width=16, blocks=3),
        # Read by processes, which change nothing and end with their workers.
        {**own("tagger:Sentences", EXAMPLES, **arguments), "workers": 2},
        "fp32",
        output=str(tmp_path / "weights"),
        evaluation={
            "every": STEPS,
            "data": {
                **own("tagger:Sentences", EXAMPLES, size=32, length=8, seed=1),
                "workers": 1,
            },
        },
    )
    job_id, metrics = train(cluster, job)
    make = functools.partial(tagger.tagger, width=16, blocks=3)
    losses, net = plain_loop(make, tagger.Sentences(**arguments), torch.float32)
    assert [line["loss"] for line in metrics] == pytest.approx(losses, rel=1e-6, abs=0)
    for name, weights in read_output(tmp_path / "weights").items():
        expected = net.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=1e-5)
    held_out = tagger.Sentences(32, 8, seed=1)
    scores = net(held_out.words)
    (evaluation,) = read_lines(cluster.state_dir / "jobs" / job_id / "evaluations.jsonl")
    assert evaluation["samples"] == 32
    assert evaluation["loss"] == pytest.approx(
        tagger.loss(scores, held_out.tags).mean().item(), rel=1e-5
    )
    accuracy = tagger.metrics(scores, held_out.tags)["accuracy"].mean().item()
    assert evaluation["metrics"] == {"accuracy": pytest.approx(accuracy, abs=1e-6)}


def test_dicts_tuples_masks_and_tied_parameters(cluster: LocalCluster) -> None:
    job = job_of(
        "pairs",
        own("own_models:pairs", SUPPORT),
        own("own_models:Pairs", SUPPORT),
        "fp64",
    )
    _, metrics = train(cluster, job)
    losses, _ = plain_loop(own_models.pairs, own_models.Pairs(), torch.float64)
    assert [line["loss"] for line in metrics] == pytest.approx(losses, rel=1e-12, abs=0)


def test_what_layers_draw_is_the_same_on_every_plan(cluster: LocalCluster) -> None:
    """Dropout, as one process draws it that seeds each layer of each micro-batch."""
    model = own("own_models:pairs", SUPPORT, dropout=0.3)
    data = own("own_models:Pairs", SUPPORT)
    _, metrics = train(cluster, job_of("dropout", model, data, "fp64"))
    make = functools.partial(own_models.pairs, 0.3)
    losses, _ = plain_loop(make, own_models.Pairs(), torch.float64, drawing=True)
    assert [line["loss"] for line in metrics] == pytest.approx(losses, rel=1e-12, abs=0)
    without, _ = plain_loop(own_models.pairs, own_models.Pairs(), torch.float64)
    assert losses != pytest.approx(without, rel=1e-3)


# Half a minute of compiling; test_compiled_layers.py proves the same of workers alone.
@pytest.mark.soak
def test_what_is_compiled_trains_as_what_is_not(cluster: LocalCluster) -> None:
    job = job_of(
        "compiled",
        own("compiled_models:alike", SUPPORT),
        own("compiled_models:Points", SUPPORT),
        "fp64",
    )
    training = job["training"]
    assert isinstance(training, dict)
    training["compile"] = True
    del job["resources"]
    # Nodes of one host compile one after the other.
    job_id, metrics = train(cluster, job, {"n1", "n3"})
    losses, _ = plain_loop(
        compiled_models.alike, compiled_models.Points(), torch.float64, drawing=True
    )
    assert [line["loss"] for line in metrics] == pytest.approx(losses, rel=1e-12, abs=0)
    logs = (cluster.state_dir / "jobs" / job_id / "logs").glob("*.log")
    assert all("kinds=4 compiled=2 " in log.read_text() for log in logs)
