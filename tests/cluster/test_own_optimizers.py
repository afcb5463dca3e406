"""An optimizer that a job names on a real cluster: the same training as a plain loop of torch,
whatever fails."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.model import initial
from oobleck.worker.data.order import Order
from support.clusters import PATIENT

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = ROOT / "examples"
sys.path.append(str(EXAMPLES))

import tagger  # noqa: E402  # an example is no package

BATCH, STEPS, RATE, SEED, DECAY = 16, 16, 2.0e-3, 7, 0.1
MODEL, DATA = {"width": 16, "blocks": 3}, {"size": 256, "length": 8}
#: Not decayed, though it is a matrix.
SPARED = "2.mix.weight"
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


def job_of(steps: int, saved: Path) -> dict[str, Any]:
    return {
        "name": "losing",
        "model": {"python": "tagger:tagger", "path": str(EXAMPLES), "arguments": MODEL},
        "data": {"python": "tagger:Sentences", "path": str(EXAMPLES), "arguments": DATA},
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
        "checkpoint": {"path": str(saved), "every": 100},
    }


def plain_losses() -> list[float]:
    """Of a loop over all layers in one process."""
    net = initial(lambda: tagger.tagger(**MODEL), SEED).double()
    data, parameters = tagger.Sentences(**DATA), list(net.parameters())
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
        words, tags = (torch.stack(side) for side in zip(*rows, strict=True))
        mean = tagger.loss(net(words), tags).mean()
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
    """Its moments are moved and saved, and what it keeps beside them is known to all."""
    job_id, first = train(cluster, job_of(STEPS // 2, tmp_path / "saved"))
    told = cluster.events(job_id, "reconfigured")
    assert [node for record in told for node in record["nodes_lost"]] == ["n3"], told
    _, second = train(cluster, job_of(STEPS, tmp_path / "saved"))
    assert [len(first), len(second)] == [STEPS // 2, STEPS // 2]
    assert [*first, *second] == pytest.approx(plain_losses(), rel=1e-12, abs=0)
