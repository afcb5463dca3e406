"""Optimizers that a job names: their keys, and what planning knows of them."""

import json
from dataclasses import replace

import pytest

from oobleck.core.errors import InvalidJob
from oobleck.core.job.code import Json
from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.optimization import OptimizerSpec
from oobleck.core.job.spec import JobSpec
from oobleck.planner.profile.measurement import profile_key
from oobleck.planner.profile.memory import state_bytes

JOB = """\
name: demo
model: {kind: gpt, layers: 2, hidden: 16, heads: 2, sequence_length: 8}
data: {text: [words]}
training:
  steps: 10
  global_batch: 4
  optimizer: OPTIMIZER
"""


def sketch(*rows: str) -> Json:
    described = [{"name": name, "initial": 0.5} for name in rows]
    return Json(json.dumps({"rows": described, "counters": ["step"], "code": "c0de"}))


def job_of(optimizer: str) -> JobSpec:
    return parse_job(JOB.replace("OPTIMIZER", optimizer), source="job.yaml")


def test_a_class_with_its_arguments() -> None:
    job = job_of("{python: torch.optim:RMSprop, lr: 0.1, arguments: {alpha: 0.9}}")
    optimizer = job.training.optimizer
    assert optimizer == OptimizerSpec(
        python="torch.optim:RMSprop", lr=0.1, weight_decay=0.0, arguments=Json('{"alpha": 0.9}')
    )
    assert optimizer.code is not None
    assert optimizer.code.module == "torch.optim"
    assert optimizer.label == "torch.optim:RMSprop"
    assert parse_job(format_job(job)) == job


def test_what_a_class_keeps_is_planned_for_and_travels_with_the_job() -> None:
    job = job_of("{plugin: lion}")
    described = replace(job.training.optimizer, described=sketch("momentum", "average"))
    known = replace(job, training=replace(job.training, optimizer=described))
    assert parse_job(format_job(known)) == known
    assert described.state == ("momentum", "average")
    assert described.initial == (0.5, 0.5)
    assert state_bytes(10, known.training) == (2 + 2) * 10 * 4
    assert OptimizerSpec().state == ("exp_avg", "exp_avg_sq")
    assert OptimizerSpec(name="sgd", momentum=0.9).initial == (0.0,)


def test_each_class_is_measured_for_itself() -> None:
    def key(optimizer: str) -> str:
        return profile_key(
            job_of(optimizer),
            devices=["cpu"],
            worker_slots=1,
            workers_per_host=1,
            several_nodes=True,
        )

    names = ("{}", "{name: sgd}", "{python: torch.optim:SGD}", "{python: torch.optim:RMSprop}")
    assert len({key(name) for name in names}) == len(names)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            "{python: torch.optim:SGD, momentum: 0.9}",
            "training.optimizer.momentum: is a setting of sgd; put what your class takes under arg",
        ),
        (
            "{python: torch.optim:SGD, name: sgd}",
            "training.optimizer.name: sgd is an optimizer of its own; leave name out",
        ),
        (
            "{python: torch.optim:SGD, arguments: {lr: 1.0}}",
            "training.optimizer.arguments: has lr; give lr beside them, as a key of its own",
        ),
        (
            "{name: sgd, arguments: {momentum: 0.9}}",
            "training.optimizer.arguments: are those of plugin or python; leave them out",
        ),
        ("{python: os:system}", "training.optimizer.python: os is not a module of yours"),
        ("{python: RMSprop}", "training.optimizer.python: 'RMSprop' is no class or function;"),
        (
            "{python: mine:Lion, plugin: lion}",
            "training.optimizer.plugin: give one of plugin (an entry point) and python",
        ),
        ("{path: code}", "training.optimizer.path: is where a python module lies; leave it out"),
        (
            "{python: mine:Lion, path: 'https://a/b'}",
            "training.optimizer.path: https://a/b: URLs are not supported yet here",
        ),
        (
            "{python: mine:Lion, described: {rows: 1}}",
            "job.yaml:7: training.optimizer.described: not a valid OptimizerSketch: Expected",
        ),
    ],
)
def test_what_is_wrong_gets_one_line(optimizer: str, message: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        job_of(optimizer)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parameters_that_are_not_decayed_are_named_by_patterns() -> None:
    job = job_of("{no_decay: ['0.*', '*.scale'], lr: 0.1}")
    assert job.training.optimizer == OptimizerSpec(lr=0.1, no_decay=("0.*", "*.scale"))
    assert parse_job(format_job(job)) == job
    with pytest.raises(InvalidJob, match=r"training.optimizer.no_decay: has an empty pattern"):
        job_of("{no_decay: ['']}")


@pytest.mark.parametrize("rows", [["a"] * 2, ["a/b"], [f"row{n}" for n in range(9)]])
def test_a_sketch_of_no_class_is_refused(rows: list[str]) -> None:
    with pytest.raises(ValueError, match=r"no different names|more than 8"):
        OptimizerSpec(python="mine:Lion", described=sketch(*rows))
