"""`oobleck init`: what it writes can be submitted, and nothing is written over."""

import shlex
from pathlib import Path

import pytest

from oobleck.cli.jobs.files import TEMPLATES
from oobleck.core.job.file import parse_job
from oobleck.core.job.model import LoraSpec, OwnModelSpec
from support.commands import refused, run
from support.folders import ROOT

pytestmark = pytest.mark.usefixtures("quick_start")

FILES = {
    "own-model": {"job.yaml", "my_model.py"},
    "huggingface": {"job.yaml"},
    "text": {"job.yaml"},
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_it_writes_is_a_job_that_can_be_planned(template: str, tmp_path: Path) -> None:
    folder = tmp_path / "my job"
    made = run("init", "--template", template, str(folder))
    assert made.returncode == 0, made.stderr
    assert {path.name for path in folder.iterdir()} == FILES[template]
    wrote, _, then = made.stdout.partition("\n\nNext:\n")
    assert set(wrote.splitlines()) == {f"wrote {folder / name}" for name in FILES[template]}
    commands = [shlex.split(line, comments=True) for line in then.splitlines()]
    assert commands[-1] == ["oobleck", "submit", str(folder / "job.yaml"), "--follow"]
    for command in commands:
        if command[0] == "mkdir":
            corpus = Path(command[1])
            corpus.mkdir()
            (corpus / "some.txt").write_text("some text " * 100)
    planned = run("plan", commands[-1][2], "--nodes", "4")
    assert planned.returncode == 0, planned.stderr
    assert "can lose:" in planned.stdout


def test_own_model_is_the_default_and_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = run("init")
    assert made.stdout.startswith("wrote job.yaml\nwrote my_model.py\n")
    assert "oobleck submit job.yaml --follow" in made.stdout
    assert "oobleck local --nodes 4" in made.stdout


def test_who_has_a_master_is_not_told_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOBLECK_MASTER", "10.0.0.1:7070")
    assert "oobleck local" not in run("init", str(tmp_path)).stdout


@pytest.mark.parametrize("there", ["job.yaml", "my_model.py"])
def test_nothing_is_written_over_nor_beside_what_is_there(there: str, tmp_path: Path) -> None:
    path = tmp_path / there
    path.write_text("mine")
    assert f"{path} exists already; move it" in refused(run("init", str(tmp_path)), 2)
    assert [(left.name, left.read_text()) for left in tmp_path.iterdir()] == [(there, "mine")]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = refused(run("init", str(tmp_path / "file" / "in")), 2)
    assert "cannot write" in told
    assert "Not a directory; name another DIR" in told


def test_the_keys_of_lora_are_a_comment_away() -> None:
    text = (ROOT / "cli" / "templates" / "huggingface.yaml").read_text()
    for line in ("weights: base/", "lora:", "  target_modules:", "  r:", "  lora_alpha:"):
        assert f"  # {line}" in text
        text = text.replace(f"  # {line}", f"  {line}")
    model = parse_job(text).model
    assert isinstance(model, OwnModelSpec)
    assert model.lora == LoraSpec(target_modules=("q_proj", "v_proj"), r=8, lora_alpha=16)
