"""The layers: sizes, beginnings, causality, and randomness that depends on the sample alone."""

import pytest
import torch

from oobleck.core.job.model import ModelSpec
from oobleck.worker.data.objective import loss
from oobleck.worker.models.registry import build_layer, initialise_parameters
from oobleck.worker.runtime.random import RowKeys, keep_mask

SPEC = ModelSpec(layers=2, hidden=16, heads=4, sequence_length=12, vocabulary=50)
CPU = torch.device("cpu")


def layer_of(spec, layer, *, seed=3, dtype=torch.float64):
    module = build_layer(spec, layer).to(dtype)
    initialise_parameters(module, spec, seed)
    return module


def run(spec, tokens, positions, *, step=1):
    x = tokens
    for layer in range(spec.layer_count):
        x = layer_of(spec, layer)(x, RowKeys(seed=3, step=step, positions=positions))
    return x


def test_layers_have_the_parameters_that_planning_counts_with():
    h, v, t = SPEC.hidden, SPEC.vocabulary, SPEC.sequence_length
    counts = [sum(p.numel() for p in build_layer(SPEC, i).parameters()) for i in range(4)]
    assert counts == [v * h + t * h, 12 * h * h + 4 * h, 12 * h * h + 4 * h, 2 * h + v * h]


def test_a_layer_that_the_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match="layer 4 is not one of 0 to 3"):
        build_layer(SPEC, 4)


def test_initial_weights_depend_on_seed_and_layer_only():
    torch.manual_seed(1)
    alone = layer_of(SPEC, 2).state_dict()
    torch.manual_seed(2)
    layer_of(SPEC, 1)
    again = layer_of(SPEC, 2).state_dict()
    assert all(torch.equal(alone[name], again[name]) for name in alone)
    for other in (layer_of(SPEC, 1), layer_of(SPEC, 2, seed=4)):
        assert not torch.equal(alone["qkv.weight"], other.state_dict()["qkv.weight"])


def test_initial_weights_of_fp32_are_those_of_fp64_rounded():
    wide, narrow = layer_of(SPEC, 1), layer_of(SPEC, 1, dtype=torch.float32)
    for name, value in wide.state_dict().items():
        assert torch.equal(value.float(), narrow.state_dict()[name])


def test_initial_weights_have_the_scale_of_gpt2():
    spec = ModelSpec(layers=8, hidden=128, heads=4, sequence_length=12)
    weights = layer_of(spec, 4).state_dict()
    assert weights["mlp_in.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["mlp_out.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.02)
    assert weights["attention_norm.weight"].unique().tolist() == [1.0]
    assert weights["attention_norm.bias"].unique().tolist() == [0.0]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_begins_with_the_token_embedding(tied):
    spec = ModelSpec(layers=1, hidden=16, heads=4, sequence_length=12, tied=tied)
    embedding, head = layer_of(spec, 0), layer_of(spec, 2)
    assert torch.equal(embedding.token.weight, head.token.weight) is tied


def test_a_token_does_not_see_later_ones():
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 7] = 40
    before, after = run(SPEC, tokens, (0,)), run(SPEC, changed, (0,))
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.allclose(before[0, 7:], after[0, 7:])


def test_dropout_depends_on_the_sample_and_not_on_its_micro_batch():
    spec = ModelSpec(layers=2, hidden=16, heads=4, sequence_length=12, vocabulary=50, dropout=0.3)
    tokens = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    together = run(spec, tokens, (4, 5, 6))
    alone = torch.cat([run(spec, tokens[i : i + 1], (4 + i,)) for i in (2, 0, 1)])[[1, 2, 0]]
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(together, run(spec, tokens, (5, 6, 7)))
    assert not torch.allclose(together, run(spec, tokens, (4, 5, 6), step=2))
    assert not torch.allclose(together, run(SPEC, tokens, (4, 5, 6)))


def test_masks_keep_the_right_share_and_are_unlike_for_unlike_purposes():
    def mask(*, seed=1, step=1, position=1, layer=1, site="mlp", dropout=0.25):
        rows = RowKeys(seed=seed, step=step, positions=(position,))
        return keep_mask(rows, layer, site, width=1 << 16, dropout=dropout, device=CPU)[0]

    base = mask()
    purposes = ({"seed": 2}, {"step": 2}, {"position": 2}, {"layer": 2}, {"site": "attention"})
    others = [mask(**purpose) for purpose in purposes]
    for other in (base, *others):
        assert other.float().mean().item() == pytest.approx(0.75, abs=0.01)
    # Two independent masks agree in 0.75² + 0.25² of all places; so do a mask and its neighbour.
    for other in (*others, base.roll(1), base.roll(1024)):
        assert (base == other).float().mean().item() == pytest.approx(0.625, abs=0.01)
    assert mask(dropout=0.5)[base.logical_not()].sum() == 0, "a stronger dropout drops more"


def test_masks_are_the_same_for_ever():
    """A changed hash would break the equality of a run with its own first half."""
    rows = RowKeys(seed=1, step=2, positions=(3, 4))
    mask = keep_mask(rows, 5, "embedding", width=8, dropout=0.5, device=CPU)
    assert mask.int().tolist() == [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 1, 0, 0, 1, 0, 0]]


def test_the_loss_is_the_mean_over_tokens_in_float32_at_least():
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).mean()
    torch.testing.assert_close(loss(logits, targets), expected)
    assert loss(logits.bfloat16(), targets).dtype == torch.float32
    assert loss(logits.double(), targets).dtype == torch.float64
