"""`oobleck config`: the form of job files, without a master and without what they name."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from oobleck.cli.jobs.files import config
from oobleck.core.job.file import job_schema, parse_job
from support.commands import run
from support.folders import ROOT

JOB = """\
name: demo
model: {python: "mine:model", arguments: {width: 32}}
data: {python: "mine:Data"}
code: dist/absent-1.0-py3-none-any.whl
training: {steps: 20, global_batch: 4, optimizer: {name: sgd}}
"""
PRESET = """\
name: large
model: {preset: gpt2, sequence_length: 64}
data: {text: [absent.txt]}
training: {steps: 20, global_batch: 4}
"""


def told(*arguments: str) -> Result:
    return CliRunner().invoke(config, arguments)


def test_the_schema_is_printed() -> None:
    assert json.loads(told("schema").stdout) == job_schema()


@pytest.mark.parametrize("text", [JOB, PRESET], ids=["own", "preset"])
def test_what_is_shown_is_the_same_job_with_every_key(text: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text)
    for form in ("yaml", "json"):
        shown = told("show", str(path), "-o", form)
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert parse_job(shown.stdout) == parse_job(text)
        assert "fault_tolerance" in shown.stdout
        assert "described" not in shown.stdout
    changed = told("show", str(path), "--set", "training.steps=7", "-o", "json").stdout
    assert json.loads(changed)["training"]["steps"] == 7


def test_the_form_of_files_is_checked_without_what_they_name(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(JOB)
    bad.write_text(PRESET.replace("steps", "stepz"))
    example = str(ROOT / "examples" / "tagger.yaml")
    done = run("config", "validate", str(good), str(bad), example)
    assert done.returncode == 2
    assert done.stdout == f"{good}: ok\n{example}: ok\n"
    assert done.stderr == (
        f"oobleck: {bad}:4: unknown key 'stepz' in training; did you mean 'steps'?\n"
    )
    assert told("validate", str(good)).exit_code == 0
    missing = told("validate", str(tmp_path / "no.yaml"))
    assert missing.stderr.endswith("No such file or directory; give a YAML job file\n")
