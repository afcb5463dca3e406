"""The schema of job files says what reading them says, of each key alone."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from oobleck.core.errors import InvalidJob
from oobleck.core.job.file import format_job, job_schema, parse_job

ROOT = Path(__file__).parents[3]
_VALIDATOR = jsonschema.Draft202012Validator(job_schema())
BASE: dict[str, Any] = {
    "name": "demo",
    "model": {"layers": 2, "hidden": 8, "heads": 2, "sequence_length": 8},
    "data": {"text": ["a.txt"]},
    "training": {"steps": 3, "global_batch": 4},
}
CONFIG = '{"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2}'
OWN = {**BASE, "model": {"python": "m:f", "lora": None}, "data": {"plugin": "arrays"}}
#: Every section, whatever a job's own choices leave out.
FULL = [
    {
        **BASE,
        "evaluation": {"every": 2, "data": {"tokens": "b.bin", "dtype": "uint8"}},
        "checkpoint": {"path": "saved"},
        "training": {**BASE["training"], "optimizer": {"python": "m:O", "arguments": {"a": 1}}},
    },
    {
        **BASE,
        "model": {
            "architecture": "GPT2LMHeadModel",
            "weights": "w",
            "sequence_length": 8,
            "lora": {"target_modules": ["c_attn"]},
        },
    },
]


def job_files() -> dict[str, str]:
    paths = [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "cli" / "templates").glob("*.yaml")]
    found = {path.name: path.read_text() for path in paths}
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
        for number, block in enumerate(blocks):
            # Some show a part of a job.
            shown = yaml.safe_load(block)
            training = {**BASE["training"], **shown.get("training", {})}
            found[f"{page.name}-{number}"] = json.dumps({**BASE, **shown, "training": training})
    return found


JOB_FILES = job_files()


def is_read(job: object) -> bool:
    try:
        parse_job(json.dumps(job), read=lambda name: CONFIG)
    except InvalidJob:
        return False
    return True


def places(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Of each mapping of keys that a job file knows."""
    if isinstance(tree, dict) and path[-1:] not in (("arguments",), ("config",)):
        yield path
        for key, below in tree.items():
            yield from places(below, (*path, key))


def at(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@pytest.mark.parametrize(
    ("place", "bad", "good"),
    [
        ("training.steps", 0, 1),
        ("training.steps", 10**9 + 1, 10**9),
        ("training.global_batch", (1 << 17) + 1, 1 << 17),
        ("training.seed", -1, 0),
        ("training.clip", 0, 0.1),
        ("training.max_skipped_steps", 0, None),
        ("training.optimizer.lr", -0.1, 0),
        ("training.optimizer.beta1", 1, 0.5),
        ("training.schedule.warmup", -1, 0),
        ("model.layers", 513, 512),
        ("model.dropout", 1.0, 0),
        ("model.vocabulary", 1, 2),
        ("fault_tolerance", -1, 0),
        ("resources.memory_per_worker", 0, "64MiB"),
        ("checkpoint.keep", 0, 1),
        ("evaluation.fraction", 1.0, 0.5),
        ("data.workers", 65, 0),
    ],
)
def test_the_limits_of_numbers_are_those_of_reading(place: str, bad: object, good: object) -> None:
    base = {**BASE, "checkpoint": {"path": "saved"}, "evaluation": {"every": 2, "fraction": 0.1}}
    base["evaluation"]["samples"] = 8
    *path, key = place.split(".")

    def with_value(value: object) -> dict[str, Any]:
        job = copy.deepcopy(base)
        section = job
        for name in path:
            section = section.setdefault(name, {})
        section[key] = value
        return job

    assert is_read(with_value(good)), good
    assert _VALIDATOR.is_valid(with_value(good))
    assert not is_read(with_value(bad))
    (problem,) = _VALIDATOR.iter_errors(with_value(bad))
    assert ".".join(map(str, problem.absolute_path)) == place or problem.context


@pytest.mark.parametrize("name", JOB_FILES)
def test_job_files_of_examples_and_pages_fit(name: str) -> None:
    _VALIDATOR.validate(yaml.safe_load(JOB_FILES[name]))
    parse_job(JOB_FILES[name])


def test_no_section_takes_a_wrong_key_or_a_wrong_value() -> None:
    jobs = [json.loads(format_job(parse_job(json.dumps(job)))) for job in FULL]
    assert all(map(_VALIDATOR.is_valid, jobs))
    # Of two sections with the same keys one is enough.
    sections = {tuple(at(job, section)): (job, section) for job in jobs for section in places(job)}
    assert len(sections) > 10
    for whole, section in sections.values():
        spoiled = copy.deepcopy(whole)
        at(spoiled, section)["wrong_key"] = 1
        assert (is_read(spoiled), _VALIDATOR.is_valid(spoiled)) == (False, False), section
        for key in at(whole, section):
            spoiled = copy.deepcopy(whole)
            at(spoiled, section)[key] = [1]
            told = (is_read(spoiled), _VALIDATOR.is_valid(spoiled))
            assert told == (False, False), (section, key)


@pytest.mark.parametrize(
    "change",
    [
        {"resources": {"memory_per_worker": "64MiB"}},
        {"resources": {"memory_per_worker": 1 << 30}},
        {"resources": None, "recovery": None},
        {"evaluation": None, "checkpoint": None, "output": None, "code": None},
        {"data": {"text": "a.txt"}},
        {"track": "wandb"},
        {"track": ["wandb", "mlflow"]},
        {"training": {**BASE["training"], "clip": None, "optimizer": {"lr": 1}}},
        {"training": {**BASE["training"], "optimizer": None, "schedule": None}},
        {"model": {"preset": "gpt2", "sequence_length": 8}},
        {"model": {"preset": "gpt2", "layers": 3, "sequence_length": 8}},
        {"model": {"config": json.loads(CONFIG), "sequence_length": 8}},
        {"model": {"config": "config.json", "sequence_length": 8}},
        {"model": {"weights": "folder", "sequence_length": 8}},
        {**OWN, "model": {"python": "m:f", "arguments": {"width": 2}}},
        {**OWN, "model": {"python": "m:f", "arguments": '{"width": 2}'}},
        {**OWN, "model": {"plugin": "mine", "lora": None}},
    ],
    ids=str,
)
def test_what_is_read_in_a_way_of_its_own_fits(change: dict[str, Any]) -> None:
    job = {**BASE, **change}
    parse_job(json.dumps(job), read=lambda name: CONFIG)
    _VALIDATOR.validate(job)


@pytest.mark.parametrize(
    "change",
    [
        {"name": None},
        {"track": ["tensorboad"]},
        {"track": ["wandb", "wandb"]},
        {"model": {"preset": "gpt22", "sequence_length": 8}},
        {"model": {"python": "m:f", "layers": 2}},
        {"model": {**BASE["model"], "kind": "gtp"}},
        {"data": {"text": ["a"], "dtype": "uint64"}},
        {"training": {"global_batch": 4}},
        {"training": {**BASE["training"], "clip": "1.0"}},
        {"recovery": {"policy": None}},
        {"allow_mixed_versions": 1},
    ],
    ids=str,
)
def test_what_is_refused_does_not_fit(change: dict[str, Any]) -> None:
    job = {**BASE, **change}
    assert (is_read(job), _VALIDATOR.is_valid(job)) == (False, False)
