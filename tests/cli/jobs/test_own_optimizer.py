"""An optimizer of the user's, before its job is sent: where its code lies, and what it keeps."""

import re
from pathlib import Path

import pytest

from oobleck.cli.jobs.job_file import read_job
from oobleck.host.command import CommandFailed

pytestmark = pytest.mark.usefixtures("quick_start")

JOB = """\
name: demo
model: {kind: gpt, layers: 2, hidden: 8, heads: 2, sequence_length: 8}
data: {text: ["*.txt"]}
training: {steps: 20, global_batch: 4, optimizer: {python: "mine:Momentum"}}
"""
CODE = """\
import torch

class Momentum(torch.optim.Optimizer):
    def __init__(self, params, lr, beta=0.9, whole=False):
        super().__init__(params, {"lr": lr, "beta": beta, "whole": whole})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p)
                state["buffer"].lerp_(p.grad, 1 - group["beta"])
                size = state["buffer"].norm() if group["whole"] else 1.0
                p.sub_(group["lr"] * state["buffer"] / size)
"""


def test_its_module_beside_the_job_file_is_found_and_looked_at(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE)
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    optimizer = read_job(path, ()).training.optimizer
    assert optimizer.path == str(tmp_path)
    assert optimizer.state == ("buffer",)
    assert len(optimizer.sketch.code) == 64
    with pytest.raises(CommandFailed, match="does not update each number by itself") as caught:
        read_job(path, ["training.optimizer.arguments={whole: true}"])
    assert re.fullmatch(r"optimizer: mine:Momentum cannot be used: [^\n]*", str(caught.value))
