"""The rules of an update that are pure functions: learning rate by step, clipping by norm."""

import math

from oobleck.planner.job import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, step: int, steps: int, base: float) -> float:
    """The rate of step `step` (from 1) of `steps`.

    Linear warm-up that reaches `base` in the step after the last warm-up step; then constant, or
    a half cosine that would reach zero in the step after the last one.
    """
    if step <= schedule.warmup:
        return base * step / (schedule.warmup + 1)
    if schedule.name == "constant":
        return base
    progress = (step - 1 - schedule.warmup) / max(1, steps - schedule.warmup)
    return base * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def clip_scale(grad_norm: float, clip: float | None) -> float:
    """Factor that brings a gradient of `grad_norm` to at most `clip`.

    As torch.nn.utils.clip_grad_norm_ computes it, with its 1e-6 against division by zero.
    """
    return 1.0 if clip is None else min(1.0, clip / (grad_norm + 1e-6))
