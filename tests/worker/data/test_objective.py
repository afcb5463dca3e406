"""What is learned from a row: the next tokens, or masked ones, by sample and not by worker."""

import pytest
import torch

from oobleck.core.job.model import ModelSpec
from oobleck.worker.data.objective import IGNORED, inputs_and_targets, loss
from oobleck.worker.profiling.bench import peak_bytes
from oobleck.worker.runtime.random import RowKeys
from support.families import family_model
from support.reference import loss as plain_loss

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


@pytest.mark.parametrize("ignoring", [False, True])
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 1e-6)]
)
@pytest.mark.parametrize(
    ("chunk", "few"),
    [(1, 0), (7 * 50, 0), (1 << 20, 0), (1, 1 << 20)],
    ids=["a row", "seven", "all", "few"],
)
def test_chunks_make_the_loss_and_the_gradient_of_the_whole(
    monkeypatch: pytest.MonkeyPatch,
    chunk: int,
    few: int,
    dtype: torch.dtype,
    rtol: float,
    ignoring: bool,
) -> None:
    monkeypatch.setattr("oobleck.worker.data.objective.LOSS_CHUNK", chunk)
    monkeypatch.setattr("oobleck.worker.data.objective._FEW", few)
    source = torch.Generator().manual_seed(1)
    given = (3 * torch.randn(2, 20, 50, generator=source, dtype=torch.float64)).to(dtype)
    targets = torch.randint(50, (2, 20), generator=source)
    if ignoring:
        targets[:, ::3] = IGNORED
    found = []
    for function in (plain_loss, loss):
        logits = given.clone().requires_grad_()
        mean = function(logits * 1, targets)
        (mean * 0.75).backward()
        assert logits.grad is not None
        found.append((mean.detach(), logits.grad))
    (expected, gradient), (mean, other) = found
    assert mean.dtype == expected.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(mean, expected, rtol=rtol, atol=0)
    least = 1e-2 if dtype == torch.bfloat16 else rtol
    torch.testing.assert_close(other, gradient, rtol=10 * least, atol=least * 1e-2)


def test_without_a_gradient_the_logits_stay() -> None:
    logits = torch.randn(2, 5, 9)
    before = logits.clone()
    loss(logits, torch.zeros(2, 5, dtype=torch.int64))
    with torch.no_grad():
        loss(logits.requires_grad_(), torch.zeros(2, 5, dtype=torch.int64))
    assert torch.equal(logits, before)


def test_logits_are_never_whole_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a second time in bfloat16."""
    rows, classes, chunk = 4096, 2048, 64
    monkeypatch.setattr("oobleck.worker.data.objective.LOSS_CHUNK", chunk * classes)
    logits = torch.randn(2, rows // 2, classes, dtype=torch.bfloat16)
    targets = torch.randint(classes, (2, rows // 2))
    peaks = {}
    for name, function in (("plain", plain_loss), ("chunks", loss)):
        made = logits.clone().requires_grad_()

        def run(function=function, made=made) -> None:
            function(made, targets).backward()

        peaks[name] = sum(peak_bytes(run, torch.device("cpu")))
    # The gradient is where the logits are; beside them are a few chunks in float32.
    assert peaks["chunks"] < 4 * chunk * classes * 4
    assert peaks["plain"] > 2 * rows * classes * 4
