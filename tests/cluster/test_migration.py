"""docs/migrate: what each page has after the change trains (torchrun.md, torchft.md, slurm.md), and
what torchrun.md has before it does, too.

The files are the page's own. Jobs have fewer steps than on the page.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.support.client import BIN
from bench.support.cluster import LocalCluster
from oobleck.core.job.file import parse_job
from support.folders import ROOT

PAGES = ROOT / "docs" / "migrate"
NAMES = ("slurm", "torchrun", "torchft")
STEPS = 24
_FILE = re.compile(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ADDED = re.compile(r"^```yaml\n# added to job.yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TYPED = re.compile(r"^```console(| before)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def write_files(page: Path, folder: Path) -> dict[str, str]:
    """Write the page's files into the folder: its own, and those of torchrun.md that it names."""
    text = page.read_text()
    found = dict(_FILE.findall(text))
    if "torchrun.md#after" in text:
        first = dict(_FILE.findall((PAGES / "torchrun.md").read_text()))
        found |= {name: first[name] for name in ("my_model.py", "job.yaml")}
    found["job.yaml"] += "".join(_ADDED.findall(text))
    for name, content in found.items():
        (folder / name).write_text(content)
    return found


def lines(page: Path, when: str) -> list[str]:
    """What is typed, and what is shown below it."""
    return [line for had, text in _TYPED.findall(page.read_text()) if had.strip() == when
            for line in text.splitlines()]  # fmt: skip


def test_the_pages_have_one_job(tmp_path: Path) -> None:
    """So what one of them trains shows that of all."""
    found = []
    for name in NAMES:
        files = write_files(PAGES / f"{name}.md", tmp_path)
        job = parse_job(files["job.yaml"])
        assert (job.checkpoint is not None) == (name == "slurm")
        found.append((files["my_model.py"], replace(job, checkpoint=None)))
    assert all(each == found[0] for each in found)


@pytest.mark.cluster
@pytest.mark.parametrize(
    "name", ["slurm", *(pytest.param(each, marks=pytest.mark.soak) for each in NAMES[1:])]
)
def test_the_job_after_the_change_trains(
    name: str, small_cluster: LocalCluster, tmp_path: Path
) -> None:
    page = PAGES / f"{name}.md"
    assert {"my_model.py", "job.yaml"} <= write_files(page, tmp_path).keys()
    shown: list[str] = []
    job_id = ""
    for line in lines(page, ""):
        if not line.startswith("$ "):
            # Numbers are those of the page's own run.
            like = re.escape(line.strip().replace("waves-1", job_id)).replace(r"\.\.\.", ".*")
            like = like.replace("256", str(STEPS))
            assert any(re.match(re.sub(r"(?:\\ )+", r"\\s+", like), seen) for seen in shown), line
            continue
        command = line.removeprefix("$ ").split()
        assert command[0] == "oobleck"
        if command[1] == "submit":
            command += ["--set", f"training.steps={STEPS}"]
            command += ["--set", "checkpoint.every=10"] if name == "slurm" else []
        command = [job_id if word == "waves-1" else word for word in command]
        done = subprocess.run(
            [str(BIN / "oobleck"), *command[1:]],
            cwd=tmp_path,
            env={**small_cluster.child_environment(), "OOBLECK_MASTER": small_cluster.address},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        shown = [seen.strip() for seen in done.stdout.splitlines()]
        if command[1] == "submit":
            job_id = shown[0]
    assert len(small_cluster.metrics(job_id)) == STEPS


@pytest.mark.soak
@pytest.mark.timeout(900)  # torchrun waits for the hosts that it may yet get
def test_the_script_before_the_change_trains(tmp_path: Path) -> None:
    page = PAGES / "torchrun.md"
    assert "train.py" in write_files(page, tmp_path)
    (line,) = lines(page, "before")
    command = line.removeprefix("$ ").replace("head:29400", "127.0.0.1:0").split()
    assert command[0] == "torchrun"
    told = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *command[1:]],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )
        assert done.returncode == 0, done.stderr
        told.append(re.findall(r"epoch (\d) loss (\S+)", done.stdout))
    assert [epoch for epoch, _ in told[0]] == ["0", "1", "2", "3"]
    assert float(told[0][-1][1]) < float(told[0][0][1])
    assert told[1] == [], "the checkpoint of the last epoch is there"
