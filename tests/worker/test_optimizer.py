"""Learning rate and clipping, as pure functions of the step and the norm."""

import pytest
import torch

from oobleck.planner.job import ScheduleSpec
from oobleck.worker.optimizer import clip_scale, learning_rate


def rates(name, *, warmup, steps):
    schedule = ScheduleSpec(name=name, warmup=warmup)
    return [learning_rate(schedule, step, steps, 2.0) for step in range(1, steps + 1)]


def test_constant_after_a_linear_warm_up():
    assert rates("constant", warmup=3, steps=6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_falls_from_the_base_towards_zero():
    assert rates("cosine", warmup=1, steps=5) == pytest.approx(
        [1.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]
    )
    assert rates("cosine", warmup=0, steps=1) == [2.0]


def test_a_warm_up_longer_than_the_run():
    assert rates("cosine", warmup=9, steps=3) == pytest.approx([0.2, 0.4, 0.6])


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
def test_clipping_is_that_of_torch(scale):
    parameter = torch.nn.Parameter(torch.zeros(9, dtype=torch.float64))
    parameter.grad = torch.arange(9, dtype=torch.float64) * scale
    gradient = parameter.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_([parameter], 1.0).item()
    torch.testing.assert_close(parameter.grad, gradient * clip_scale(norm, 1.0))


def test_no_clipping():
    assert clip_scale(1e9, None) == 1.0
