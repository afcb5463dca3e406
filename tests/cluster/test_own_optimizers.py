"""An optimizer that a job names on a real cluster: the same training as a plain loop of torch,
whatever fails."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.model import initial
from oobleck.worker.data.objective import Order
from support import own_models
from support.clusters import PATIENT
from support.folders import ROOT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SUPPORT = str(ROOT / "tests" / "support")
BATCH, STEPS, RATE, SEED, DECAY = 16, 16, 2.0e-3, 7, 0.1
#: Not decayed, though it is a matrix.
SPARED = "2.inner.0.weight"
FAULTS: list[dict[str, object]] = [
    {
        "worker": {"node": "n3", "slot": 0},
        "point": "after:Backward",
        "job": "losing",
        "step": 5,
        "action": "kill_node",
    }
]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("optimizers") / "state"
    with LocalCluster(
        4, state_dir=state_dir, fault_plan=FAULTS, options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


def job_of(steps: int, least: int, saved: Path) -> dict[str, Any]:
    """`least`: nodes of a pipeline."""
    return {
        "name": "losing",
        "model": {"python": "own_models:pairs", "path": SUPPORT},
        "data": {"python": "own_models:Pairs", "path": SUPPORT},
        "training": {
            "steps": steps,
            "global_batch": BATCH,
            "microbatch": 2,
            "seed": SEED,
            "precision": "fp64",
            "pipeline_schedule": "1f1b",  # the fault's point is one of its instructions
            "optimizer": {
                "python": "torch.optim:NAdam",
                "lr": RATE,
                "weight_decay": DECAY,
                "no_decay": [SPARED],
                "arguments": {"decoupled_weight_decay": True},
            },
        },
        "profile": "estimate",
        "resources": {"min_nodes_per_pipeline": least},
        "checkpoint": {"path": str(saved), "every": 100},
    }


def plain_losses() -> list[float]:
    """Of a loop over all layers in one process."""
    net = initial(own_models.pairs, SEED).double()
    data, parameters = own_models.Pairs(), list(net.parameters())
    decayed = [p for name, p in net.named_parameters() if p.dim() > 1 and name != SPARED]
    rest = [p for name, p in net.named_parameters() if p.dim() < 2 or name == SPARED]
    order = Order.of(len(data), 0.0)
    optimizer = torch.optim.NAdam(
        [
            {"params": decayed, "weight_decay": DECAY},
            {"params": rest, "weight_decay": 0.0},
        ],
        lr=RATE,
        decoupled_weight_decay=True,
    )
    found = []
    for step in range(1, STEPS + 1):
        rows = [data[int(i)] for i in order.of_step(SEED, step, range(BATCH), BATCH)]
        inputs = {name: torch.stack([x[name] for x, _ in rows]) for name in rows[0][0]}
        scores = torch.stack([score for _, score in rows]).double()
        mean = own_models.loss(net(inputs), scores).mean()
        optimizer.zero_grad()
        mean.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        found.append(mean.item())
    return found


def train(cluster: LocalCluster, job: dict[str, Any]) -> tuple[str, list[float]]:
    """To its end; the losses."""
    job_id = cluster.submit(job)
    assert cluster.wait_end(job_id) == "succeeded", cluster.end_of(job_id)
    return job_id, [line["loss"] for line in cluster.metrics(job_id)]


def test_nadam_survives_the_loss_of_a_node_and_goes_on_from_a_checkpoint(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Its moments are moved and saved, those of tied parameters too, and what it keeps beside them
    is known to all. The checkpoint is read for other pipelines than those that wrote it."""
    job_id, first = train(cluster, job_of(STEPS // 2, 2, tmp_path / "saved"))
    told = cluster.events(job_id, "reconfigured")
    assert [node for record in told for node in record["nodes_lost"]] == ["n3"], told
    _, second = train(cluster, job_of(STEPS, 1, tmp_path / "saved"))
    assert [len(first), len(second)] == [STEPS // 2, STEPS // 2]
    assert [*first, *second] == pytest.approx(plain_losses(), rel=1e-12, abs=0)
