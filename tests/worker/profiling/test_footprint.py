"""The peak of what operations make, on sums that can be done by hand."""

import torch

from oobleck.planner.profile.memory import MAPPED_BYTES
from oobleck.worker.profiling.bench import Footprint

KIB = 1024


def test_results_count_until_they_are_let_go() -> None:
    given = torch.ones(KIB)
    with Footprint() as footprint:
        one = given + 1  # 4 KiB
        two = one * 2  # 8 KiB
        del one  # 4 KiB
        three = two.view(2, -1)[0]  # the same memory
        two.add_(three.sum())  # in place; a number
        del two
        four = three + 1  # 4 KiB still there, 2 KiB
        given.mul_(four.sum())
    assert (footprint.heap_peak_bytes, footprint.mapped_peak_bytes) == (8 * KIB, 0)


def test_large_blocks_have_a_peak_of_their_own() -> None:
    given = torch.ones(KIB)
    with Footprint() as footprint:
        small = [given + 1, given + 2]
        del small
        large = given.repeat(KIB)  # 4 MiB
        large + given.repeat(KIB)
    assert footprint.heap_peak_bytes == 2 * 4 * KIB
    assert footprint.mapped_peak_bytes == 3 * MAPPED_BYTES


def test_a_backward_counts() -> None:
    weight = torch.ones(KIB, requires_grad=True)
    weight.grad = torch.zeros(KIB)
    with Footprint() as footprint:
        loss = (weight.exp() * 3).sum()
        loss.backward()
    # The exponential is kept; then the gradient of its product with 3 and that of its own.
    assert 3 * 4 * KIB <= footprint.heap_peak_bytes <= 3 * 4 * KIB + 64
