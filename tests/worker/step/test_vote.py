"""The vote's vector: what its sum tells, and what it refuses."""

import hashlib
import math

import pytest
import torch

from oobleck.core.ids import Generation
from oobleck.core.job.spec import TrainingSpec
from oobleck.worker.data.dataset import samples_digest
from oobleck.worker.runtime.errors import InvariantViolation
from oobleck.worker.step import vote

TRAINING = TrainingSpec(steps=1, global_batch=4, microbatch=2)
DIGESTS = [hashlib.sha256(bytes([n])).digest() for n in range(4)]


def share(
    *positions: int,
    loss: float = 0.0,
    weight: float | None = None,
    squared: float = 0.0,
    pending: int | None = None,
) -> torch.Tensor:
    return vote.ballot(
        global_batch=4,
        loss_sum=loss,
        weight=len(positions) if weight is None else weight,
        squared_norm=squared,
        pending=None if pending is None else Generation(pending),
        row_digests={position: DIGESTS[position] for position in positions},
    )


def count(*shares: torch.Tensor) -> vote.Result:
    total = torch.stack(shares).sum(dim=0)
    return vote.count(total, TRAINING, workers=len(shares))


def test_result_is_the_mean_over_the_global_batch() -> None:
    result = count(share(0, 1, loss=3.0, squared=16.0), share(2, 3, loss=5.0, squared=48.0))
    assert result.loss == 4.0
    assert result.grad_norm == 8.0, "gradients are of the mean already"
    assert result.finite
    assert result.samples_digest == samples_digest(DIGESTS)


def test_result_is_by_the_weight_of_all_rows() -> None:
    one, other = share(0, loss=3.0, weight=0.5, squared=16.0), share(1, 2, 3, loss=5.0, weight=15.5)
    result = count(one, other)
    assert (result.loss, result.weight, result.factor) == (1.0, 16.0, 0.25)
    assert result.grad_norm == 1.0
    assert count(share(0, 1), share(2, 3)).factor == 1.0


def test_a_batch_that_weighs_nothing_teaches_nothing() -> None:
    result = count(share(0, 1, weight=0.0), share(2, 3, weight=0.0, loss=3.0, squared=4.0))
    assert (result.loss, result.grad_norm, result.factor, result.finite) == (0.0, 0.0, 0.0, True)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_no_step_is_applied_whose_weight_is_no_amount(weight: float) -> None:
    assert not count(share(0, 1, weight=weight), share(2, 3, weight=0.0, loss=1.0)).finite


def test_digest_does_not_depend_on_who_loaded_what() -> None:
    assert count(share(3, 0), share(1, 2)).samples_digest == count(share(0, 1, 2, 3)).samples_digest


@pytest.mark.parametrize(("shares", "uses"), [(((0, 1), (1, 2, 3)), 2), (((0, 1), (2,)), 0)])
def test_sample_used_twice_or_never_is_a_bug(
    shares: tuple[tuple[int, ...], ...], uses: int
) -> None:
    with pytest.raises(InvariantViolation, match=f": {uses}"):
        count(*(share(*positions) for positions in shares))


@pytest.mark.parametrize(
    ("pending", "agreed"),
    [((7, 7, 7), 7), ((7, None, 7), None), ((None, None, None), None), ((7, 8, 9), None)],
)
def test_switch_only_when_all_are_ready_for_the_same(
    pending: tuple[int | None, ...], agreed: int | None
) -> None:
    shares = [share(pending=generation) for generation in pending[:-1]]
    assert count(*shares, share(0, 1, 2, 3, pending=pending[-1])).switch_to == agreed


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_anywhere_is_not_finite_for_all(bad: float) -> None:
    assert not count(share(0, 1, loss=bad), share(2, 3)).finite
    assert not count(share(0, 1, squared=bad), share(2, 3)).finite


def test_a_parameter_is_used_if_anybody_has_a_gradient_of_it() -> None:
    def told(position: int, *used: bool) -> torch.Tensor:
        digests = {position: DIGESTS[position], position + 1: DIGESTS[position + 1]}
        return vote.ballot(
            global_batch=4,
            loss_sum=1.0,
            weight=2.0,
            squared_norm=0.0,
            pending=None,
            row_digests=digests,
            used=used,
        )

    assert len(told(0, True, False)) == vote.ballot_length(4, 2)
    result = count(told(0, True, False, False, True), told(2, True, False, True, False))
    assert result.used == (True, False, True, True)
    assert result.loss == 1.0
    assert count(share(0, 1), share(2, 3)).used == ()
