"""What users bring, trained on a real cluster and by a plain loop of torch in float64.

Each case runs on one worker, on two workers that share a stage, and on four nodes of which one is
killed in a backward. A plain loop knows nothing of this project but the initial weights and the
order of samples.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.support.client import Record, read_lines
from bench.support.cluster import LocalCluster
from bench.support.preloaded import Preloaded
from oobleck.model import Model
from support import (
    gradient_models,
    labelled_loop,
    labelled_models,
    own_models,
    plain_loop,
    refused_models,
    step_models,
    weighted_loop,
    whole_causal_lm,
)
from support.clusters import PATIENT, make_whole
from support.folders import ROOT
from support.weighted_models import BATCH, EMPTY_STEP, SEED, Tagged

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SUPPORT = ROOT / "tests" / "support"
#: The step in which a node of four is killed.
KILL_STEP = 4
STEPS = 8
#: Agents learn of faults when they start, by the names of jobs.
CASES = ("pairs", "files", "hooks", "unused", "weights", "labels", "classes", "warmed")
FAULTS: list[dict[str, object]] = [
    {
        "worker": {"node": "n3", "slot": 0},
        "point": "after:Backward",
        "job": f"{case}-4",
        "step": KILL_STEP,
        "action": "kill_node",
    }
    for case in CASES
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """A cluster of `count` workers."""

    cluster: LocalCluster
    count: int

    def train(self, case: str, **job: Any) -> list[Record]:
        """Run `job` to its end and return its metrics; of four nodes n3 is lost on the way.

        `case` names the job and is one of CASES; `job` has at least `model` and `data`, and its
        `training` is merged into the defaults here.
        """
        job_id = self.cluster.submit(self._job(case, **job))
        assert self.cluster.wait_end(job_id) == "succeeded", self.cluster.end_of(job_id)
        told = self.cluster.events(job_id, "reconfigured")
        lost = [node for record in told for node in record["nodes_lost"]]
        assert lost == (["n3"] if self.count == 4 else []), told
        metrics = self.cluster.metrics(job_id)
        assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
        return metrics

    def _job(self, case: str, *, training: Any = None, **more: Any) -> dict[str, Any]:
        assert case in CASES, "add it: agents learn of faults when they start"
        defaults = {
            "steps": STEPS,
            "global_batch": plain_loop.BATCH,
            "microbatch": plain_loop.MICROBATCH,
            "seed": plain_loop.SEED,
            "precision": "fp64",
            "optimizer": {"name": "adamw", "lr": plain_loop.RATE},
        }
        if self.count == 4:
            defaults["pipeline_schedule"] = "1f1b"  # the fault's point is one of its instructions
            more.setdefault("resources", {"min_nodes_per_pipeline": 2})
        return {
            "name": f"{case}-{self.count}",
            "training": {**defaults, **(training or {})},
            "profile": "estimate",
            "fault_tolerance": 1 if self.count == 4 else 0,
            **more,
        }


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, preloaded: Preloaded
) -> Iterator[LocalCluster]:
    state_dir = tmp_path_factory.mktemp("against") / "state"
    with LocalCluster(
        1, state_dir=state_dir, fault_plan=FAULTS, options=PATIENT, preloaded=preloaded
    ) as cluster:
        yield cluster


# Of the module, so that all cases of a shape run before the next shape. One worker, and two of a
# node, do what each of four does, but for its place among them.
@pytest.fixture(
    scope="module",
    params=[*(pytest.param(few, marks=pytest.mark.soak) for few in (1, 2)), 4],
    ids=["one", "two", "four"],
)
def shape(request: pytest.FixtureRequest, cluster: LocalCluster) -> int:
    count: int = request.param
    make_whole(cluster, set())
    return count


@pytest.fixture
def workers(shape: int, cluster: LocalCluster) -> Workers:
    if shape == 2:
        make_whole(cluster, {"n1"}, "--workers", "2")
    else:
        make_whole(cluster, {f"n{number + 1}" for number in range(shape)})
    return Workers(cluster=cluster, count=shape)


def own(function: str, path: Path = SUPPORT, **arguments: object) -> dict[str, object]:
    """A model or data set of a user: `module:function` in the folder `path`."""
    return {"python": function, "path": str(path), "arguments": arguments}


def losses(metrics: list[Record]) -> list[float]:
    return [line["loss"] for line in metrics]


def test_dicts_tuples_masks_and_tied_parameters(workers: Workers) -> None:
    metrics = workers.train("pairs", model=own("own_models:pairs"), data=own("own_models:Pairs"))
    expected, _ = plain_loop.plain_loop(
        own_models.pairs, own_models.Pairs(), torch.float64, steps=STEPS
    )
    assert losses(metrics) == pytest.approx(expected, rel=1e-12, abs=0)


def test_arrays_of_another_order_from_a_file_that_an_evaluation_reads_too(
    workers: Workers, tmp_path: Path
) -> None:
    refused_models.Tape.write(tmp_path / "tape")
    data = own("refused_models:Tape") | {"arguments": {"path": f"{tmp_path}/tape"}}
    metrics = workers.train(
        "files",
        model=own("refused_models:from_generator"),
        data=data,
        evaluation={"every": 1, "data": data},
    )
    points = refused_models.POINTS
    plain = [(points[i], i % refused_models.CLASSES) for i in range(len(points))]
    expected, _ = plain_loop.plain_loop(
        refused_models.from_generator, plain, torch.float64, steps=STEPS
    )
    assert losses(metrics) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(("case", "model"), [("hooks", "hooked"), ("unused", "branches")])
def test_hooks_of_gradients_and_parameters_without_one(
    workers: Workers, case: str, model: str
) -> None:
    data = own("gradient_models:Keyed")
    metrics = workers.train(case, model=own(f"gradient_models:{model}"), data=data)
    expected, _ = plain_loop.plain_loop(
        getattr(gradient_models, model),
        gradient_models.Keyed(),
        torch.float64,
        drawing=True,  # hooks are called by micro-batch
        steps=STEPS,
    )
    assert losses(metrics) == pytest.approx(expected, rel=1e-12, abs=0)


def test_rows_weigh_as_their_loss_says_and_all_samples_are_evaluated(workers: Workers) -> None:
    """One step has nothing to learn; the last micro-batch of an evaluation has a row."""
    held_out = {"size": 7, "seed": 4, "empty_step": 0}
    metrics = workers.train(
        "weights",
        model=own("weighted_models:tagger"),
        data=own("weighted_models:Tagged"),
        training={
            "global_batch": BATCH,
            "seed": SEED,
            "optimizer": {"name": "adamw", "lr": weighted_loop.RATE},
        },
        evaluation={"every": 5, "data": own("weighted_models:Tagged", **held_out)},
    )
    expected = weighted_loop.train(Tagged(), STEPS, held_out=Tagged(**held_out), due=(5, STEPS))
    assert losses(metrics) == pytest.approx(expected.losses, rel=1e-12, abs=0)
    assert losses(metrics)[EMPTY_STEP - 1] == 0.0
    name = f"weights-{workers.count}"
    (job_id,) = (job["job_id"] for job in workers.cluster.jobs() if job["name"] == name)
    told = read_lines(workers.cluster.state_dir / "jobs" / job_id / "evaluations.jsonl")
    found = {line["step"]: line["loss"] for line in told}
    assert found == pytest.approx(expected.evaluations, rel=1e-12, abs=0)


def test_labels_are_learned_as_transformers_learns_them(workers: Workers, tmp_path: Path) -> None:
    """As its whole model does from `labels`, of which most rows have few."""
    whole_causal_lm.write(tmp_path)
    metrics = workers.train(
        "labels",
        model={**whole_causal_lm.MODEL},
        data={
            "plugin": "arrays",
            "arguments": {"path": str(tmp_path), "inputs": "input_ids", "labels": "labels"},
        },
    )
    expected, tokens = whole_causal_lm.train(tmp_path, STEPS)
    assert [line["tokens"] for line in metrics] == tokens
    # transformers computes norms and its loss in float32.
    assert losses(metrics) == pytest.approx(expected, rel=1e-6, abs=0)


def test_a_classifier_of_transformers_from_its_config(workers: Workers) -> None:
    metrics = workers.train(
        "classes",
        model={
            "architecture": labelled_models.NAME,
            "config": labelled_models.CONFIG,
            "sequence_length": labelled_models.LENGTH,
        },
        data=own("labelled_models:Sentences"),
    )
    expected = labelled_loop.plain_loop(STEPS)
    assert losses(metrics) == pytest.approx(expected, rel=1e-12, abs=0)


def test_warm_ups_by_the_step_and_orthogonal_layers(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = own("step_models:Points")
    metrics = workers.train(
        "warmed",
        model=own("step_models:warmed"),
        data=data,
        training={"recompute": "layer"},
        evaluation={"every": 3, "data": own("step_models:Points", size=16)},
    )
    step = 1
    monkeypatch.setattr(step_models, "step", lambda: step)

    def make() -> Model:
        model = step_models.warmed()

        def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal step
            found = model.loss(output, targets)
            step += 1  # a plain loop calls it once in each
            return found

        return replace(model, loss=loss)

    expected, _ = plain_loop.plain_loop(make, step_models.Points(), torch.float64, steps=STEPS)
    assert losses(metrics) == pytest.approx(expected, rel=1e-12, abs=0)
    jobs = workers.cluster.state_dir / "jobs"
    (path,) = jobs.glob(f"warmed-{workers.count}*/evaluations.jsonl")
    told = read_lines(path)
    assert [line["step"] for line in told] == [3, 6, 8]
    assert all(line["metrics"]["step"] == line["step"] for line in told), told
