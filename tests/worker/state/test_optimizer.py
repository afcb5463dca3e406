"""Learning rate and clipping, as pure functions of the step and the norm."""

import pytest
import torch

from oobleck.core.job.optimization import OptimizerSpec, ScheduleSpec
from oobleck.worker.state.optimizer import clip_scale, learning_rate
from support.reference import torch_schedule


def rates(name, *, warmup, steps, min_lr=0.0):
    schedule = ScheduleSpec(name=name, warmup=warmup, min_lr=min_lr)
    return [learning_rate(schedule, step, steps, 2.0) for step in range(1, steps + 1)]


def test_constant_after_a_linear_warm_up():
    assert rates("constant", warmup=3, steps=6) == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]


def test_cosine_falls_from_the_base_towards_zero():
    assert rates("cosine", warmup=1, steps=5) == pytest.approx(
        [1.0, 2.0, 1 + 0.5**0.5, 1.0, 1 - 0.5**0.5]
    )
    assert rates("cosine", warmup=0, steps=1) == [2.0]


def test_a_line_falls_from_the_base_to_the_least():
    assert rates("linear", warmup=1, steps=5) == pytest.approx([1.0, 2.0, 1.5, 1.0, 0.5])
    assert rates("linear", warmup=0, steps=4, min_lr=1.0) == pytest.approx([2.0, 1.75, 1.5, 1.25])
    assert rates("cosine", warmup=0, steps=2, min_lr=1.0) == pytest.approx([2.0, 1.5])


@pytest.mark.parametrize("warmup", [0, 1, 4, 9])
@pytest.mark.parametrize(("name", "min_lr"), [("constant", 0.0), ("linear", 0.3), ("cosine", 0.3)])
def test_schedules_are_those_of_torch(make_job, name, min_lr, warmup):
    job = make_job(
        steps=12,
        optimizer=OptimizerSpec(lr=2.0),
        schedule=ScheduleSpec(name=name, warmup=warmup, min_lr=min_lr),
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    theirs = torch_schedule(job, optimizer)
    expected = []
    for _ in range(12):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert rates(name, warmup=warmup, steps=12, min_lr=min_lr) == pytest.approx(expected, rel=1e-12)


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
