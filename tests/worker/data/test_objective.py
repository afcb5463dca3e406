"""What is learned from a row: the next tokens, or masked ones, by sample and not by worker."""

import pytest
import torch

from oobleck.planner.job.model import ModelSpec
from oobleck.planner.job.model_file import family_model
from oobleck.worker.data.objective import IGNORED, inputs_and_targets, loss
from oobleck.worker.runtime.random import RowKeys

MASK = 299


def bert(length: int) -> ModelSpec:
    return family_model(
        "bert",
        {"vocab_size": 300, "mask_token_id": MASK, "max_position_embeddings": 4096},
        sequence_length=length,
    )


def keys(*positions: int, step: int = 1, seed: int = 0) -> RowKeys:
    return RowKeys(seed=seed, step=step, positions=positions)


def rows(count: int, length: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(5)
    return torch.randint(200, (count, length + 1), generator=source)


def test_causal_targets_are_the_next_tokens() -> None:
    spec = ModelSpec(layers=1, hidden=4, heads=1, sequence_length=7)
    tokens = rows(2, 7)
    inputs, targets = inputs_and_targets(spec, tokens, keys(0, 1))
    assert torch.equal(inputs, tokens[:, :-1])
    assert torch.equal(targets, tokens[:, 1:])


@pytest.mark.parametrize(("length", "count"), [(1, 1), (3, 1), (7, 1), (20, 3), (128, 19)])
def test_every_row_has_the_same_number_of_masked_tokens(length: int, count: int) -> None:
    tokens = rows(4, length)
    inputs, targets = inputs_and_targets(bert(length), tokens, keys(0, 1, 2, 3))
    chosen = targets != IGNORED
    assert chosen.sum(1).tolist() == [count] * 4
    assert torch.equal(targets[chosen], tokens[:, :-1][chosen])
    assert torch.equal(inputs[~chosen], tokens[:, :-1][~chosen]), "what is not learned stays"


def test_eighty_of_a_hundred_are_masked_ten_random_and_ten_kept() -> None:
    """Devlin et al. 2019 §3.1."""
    tokens = rows(40, 4000)
    inputs, targets = inputs_and_targets(bert(4000), tokens, keys(*range(40)))
    chosen = targets != IGNORED
    found, kept = inputs[chosen], targets[chosen]
    assert (found == MASK).float().mean().item() == pytest.approx(0.8, abs=0.01)
    assert (found == kept).float().mean().item() == pytest.approx(0.1, abs=0.01)
    others = found[(found != MASK) & (found != kept)]
    assert len(others) / len(found) == pytest.approx(0.1, abs=0.01)
    assert others.min() < 10
    assert others.max() > 290, "random tokens are of the whole vocabulary"
    where = chosen.float().mean(0)
    assert where[:2000].mean().item() == pytest.approx(where[2000:].mean().item(), abs=0.01)


def test_the_choice_depends_on_the_sample_and_not_on_its_micro_batch() -> None:
    tokens = rows(3, 64)
    spec = bert(64)
    together = inputs_and_targets(spec, tokens, keys(4, 5, 6))
    alone = [inputs_and_targets(spec, tokens[i : i + 1], keys(4 + i)) for i in range(3)]
    for index in (0, 1):
        assert torch.equal(together[index], torch.cat([pair[index] for pair in alone]))
    for other in (keys(5, 6, 7), keys(4, 5, 6, step=2), keys(4, 5, 6, seed=1)):
        assert not torch.equal(together[1], inputs_and_targets(spec, tokens, other)[1])


def test_the_loss_of_a_micro_batch_is_the_mean_of_its_rows() -> None:
    tokens = rows(3, 64)
    _, targets = inputs_and_targets(bert(64), tokens, keys(0, 1, 2))
    logits = torch.randn(3, 64, 300, generator=torch.Generator().manual_seed(0)).double()
    each = [loss(logits[i : i + 1], targets[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(loss(logits, targets), torch.stack(each).mean())
