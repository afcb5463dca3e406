"""The families of Hugging Face, cut into layers, compute what transformers' own models compute."""

import sys

import pytest
import torch
import torch.nn.functional as F

from oobleck.core.job.families import FAMILIES
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.spec import DataSpec, JobSpec, TrainingSpec
from oobleck.planner.profile.estimate import estimate_profile
from oobleck.worker import warm
from oobleck.worker.data.objective import loss
from oobleck.worker.models import registry
from oobleck.worker.models.adapters import attend
from oobleck.worker.models.base import DeferredGradients, adding, keyed
from oobleck.worker.models.registry import build_layer, initialise_parameters, tied_parameter
from oobleck.worker.profiling.bench import Bench
from oobleck.worker.runtime.errors import JobError
from oobleck.worker.runtime.random import RowKeys
from support import foreign

LENGTH = 12
KEYS = RowKeys(seed=3, step=1, positions=(4, 5, 6))

CASES = {
    "gpt2": ("gpt2", {}),
    "gpt2, untied": ("gpt2", {"tie_word_embeddings": False, "n_inner": 20}),
    "gpt2, scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "pad_token_id": 3}),
    "llama, grouped heads": ("llama", {"num_key_value_heads": 2, "head_dim": 6}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, long rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8,
            }
        },
    ),
    "bert": ("bert", {}),
    "bert, untied": ("bert", {"tie_word_embeddings": False, "pad_token_id": None}),
}


def spec_of(case, **changes):
    kind, config = CASES[case]
    return foreign.spec(kind, sequence_length=LENGTH, **{**config, **changes})


def layers_of(spec, dtype=torch.float64):
    layers = [build_layer(spec, number).to(dtype) for number in range(spec.layer_count)]
    for layer in layers:
        initialise_parameters(layer, spec, 7)
        with torch.no_grad():  # biases and norms too must not hide behind their beginnings
            draws = torch.Generator().manual_seed(layer.layer)
            for parameter in layer.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn(parameter.shape, generator=draws), alpha=0.1)
    return layers


def batch(spec):
    source = torch.Generator().manual_seed(1)
    tokens = torch.randint(spec.vocabulary, (3, LENGTH), generator=source)
    targets = torch.randint(spec.vocabulary, (3, LENGTH), generator=source)
    return tokens, targets.where(torch.rand(3, LENGTH, generator=source) < 0.7, -100)


def run(layers, tokens, keys=KEYS):
    x = tokens
    for layer in layers:
        x = layer(x, keys)
    return x


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_the_unsplit_model(case):
    spec = spec_of(case)
    layers = layers_of(spec)
    whole = foreign.unsplit(spec, layers)
    tokens, targets = batch(spec)
    expected = whole(tokens).logits
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()

    logits = run(layers, tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    loss(logits, targets).backward()
    found = foreign.gradients(spec, layers)
    wanted = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    largest = max(gradient.abs().max().item() for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name],
            gradient,
            rtol=1e-12,
            atol=1e-12 * largest,
            msg=lambda m, n=name: f"{n} {m}",
        )


def test_llama_in_float32_is_transformers_own_with_its_norms():
    spec = spec_of("llama")
    layers = layers_of(spec, torch.float32)
    tokens, _ = batch(spec)
    expected = foreign.unsplit(spec, layers, exact=False).float()(tokens).logits
    torch.testing.assert_close(run(layers, tokens), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_layers_have_the_parameters_that_planning_counts_with(case):
    spec = spec_of(case)
    job = JobSpec(
        name="job",
        model=spec,
        data=DataSpec(text=("x",)),
        training=TrainingSpec(steps=1, global_batch=8, microbatch=2),
    )
    profile = estimate_profile(job, gpus_per_node=1, memory_per_worker_bytes=1 << 30)
    with torch.device("meta"):
        layers = [build_layer(spec, number) for number in range(spec.layer_count)]
    counts = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    assert [layer.parameter_bytes // 4 for layer in profile.layers] == counts


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["gpt", *FAMILIES])
def test_layers_keep_as_much_as_planning_estimates(kind, dropout, precision):
    wide = {"vocab_size": 256, **PLANNED.get(kind, {})}
    spec = (
        ModelSpec(layers=2, hidden=64, heads=4, sequence_length=128, dropout=dropout)
        if kind == "gpt"
        else foreign.spec(kind, sequence_length=128, dropout=dropout, **wide)
    )
    job = JobSpec(
        name="job",
        model=spec,
        data=DataSpec(text=("x",)),
        training=TrainingSpec(steps=1, global_batch=8, microbatch=2, precision=precision),
    )
    layers = estimate_profile(job, gpus_per_node=1, memory_per_worker_bytes=1 << 30).layers
    for number in (0, 1, 3):
        measured = Bench(job, [number], torch.device("cpu"), rows=2).kept_blocks()
        assert layers[number].activation_bytes == pytest.approx(sum(measured), rel=0.1)


PLANNED = {
    "gpt2": {"n_embd": 64, "n_positions": 128},
    "llama": {"hidden_size": 64, "intermediate_size": 172, "max_position_embeddings": 128},
    "bert": {
        "hidden_size": 64,
        "intermediate_size": 256,
        "max_position_embeddings": 128,
        "mask_token_id": 255,
    },
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_defaults_are_those_of_transformers(kind):
    family = FAMILIES[kind]
    # BERT's mask token is no key of its config, and the default vocabulary is a published one.
    complete = family.complete({})
    theirs = foreign.CLASSES[kind][0]()
    for name, value in complete.items():
        if value is not None or family.keys[name].default is not None:
            assert getattr(theirs, name) == value, name
    for alias, name in family.aliases.items():
        assert getattr(theirs, alias) == complete[name]
    numbers = family.numbers(complete)
    assert numbers.layers == theirs.num_hidden_layers
    assert numbers.hidden == theirs.hidden_size
    assert numbers.heads == theirs.num_attention_heads
    assert numbers.vocabulary == theirs.vocab_size
    assert numbers.tied == theirs.tie_word_embeddings
    assert family.positions(complete) == theirs.max_position_embeddings


@pytest.mark.parametrize("case", CASES)
def test_a_layer_is_built_on_the_meta_device_and_filled_from_its_seed_and_number(case):
    spec = spec_of(case)
    for number in range(spec.layer_count):
        with torch.device("meta"):
            empty = build_layer(spec, number)
        assert all(p.is_meta for p in empty.parameters())
        assert not list(empty.buffers()), "a buffer is no part of a layer's state"
        filled = []
        for noise in (1, 2):
            torch.manual_seed(noise)
            layer = empty.to_empty(device="cpu")
            initialise_parameters(layer, spec, 7)
            filled.append({name: p.clone() for name, p in layer.named_parameters()})
        assert all(torch.equal(filled[0][name], filled[1][name]) for name in filled[0])


@pytest.mark.parametrize("case", CASES)
def test_weights_begin_as_in_transformers(case):
    """By scale, parameter by parameter: the draws themselves differ."""
    spec = spec_of(case, **WIDE[CASES[case][0]])
    layers = [build_layer(spec, number) for number in range(spec.layer_count)]
    for layer in layers:
        initialise_parameters(layer, spec, 7)
    torch.manual_seed(0)
    theirs = dict(foreign.fresh(spec).named_parameters())
    for name, value in foreign.weights(spec, layers).items():
        if value.unique().numel() < 3:
            assert torch.equal(value, theirs[name].float()), name
        else:
            assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.1), name
            assert (value == 0).sum() == (theirs[name] == 0).sum()  # the padding token's row
    tied = [layers[number].get_parameter(name) for number, name in _tied(spec)]
    assert len(tied) == (2 if spec.tied else 0)
    assert all(torch.equal(tied[0], other) for other in tied)


WIDE = {
    "gpt2": {"n_embd": 64},
    "llama": {"hidden_size": 64, "intermediate_size": 64},
    "bert": {"hidden_size": 64, "intermediate_size": 64},
}


def _tied(spec):
    found = [(number, tied_parameter(spec, number)) for number in range(spec.layer_count)]
    return [(number, name) for number, name in found if name is not None]


@pytest.mark.parametrize("kind", FAMILIES)
def test_dropout_depends_on_the_sample_and_not_on_its_micro_batch(kind):
    spec = foreign.spec(kind, sequence_length=LENGTH, dropout=0.3)
    layers = layers_of(spec)
    tokens, _ = batch(spec)
    together = run(layers, tokens)
    alone = torch.cat(
        [
            run(layers, tokens[i : i + 1], RowKeys(seed=3, step=1, positions=(4 + i,)))
            for i in (2, 0, 1)
        ]
    )[[1, 2, 0]]
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    for keys in (
        RowKeys(seed=4, step=1, positions=(4, 5, 6)),
        RowKeys(seed=3, step=2, positions=(4, 5, 6)),
        RowKeys(seed=3, step=1, positions=(5, 6, 7)),
    ):
        assert not torch.allclose(together, run(layers, tokens, keys))
    before = torch.get_rng_state()
    run(layers, tokens)
    assert torch.equal(before, torch.get_rng_state()), "drew from the process's generator"


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", range(3))
def test_every_dropout_rate_of_the_config_has_an_effect(kind, name):
    names = foreign.DROPOUTS[kind]
    spec = foreign.spec(kind, sequence_length=LENGTH, **{names[name % len(names)]: 0.3})
    plain = foreign.spec(kind, sequence_length=LENGTH)
    layers, others = layers_of(spec), layers_of(plain)
    tokens, _ = batch(spec)
    assert not torch.allclose(run(layers, tokens), run(others, tokens))
    for layer in layers:
        layer.eval()
    torch.testing.assert_close(run(layers, tokens), run(others, tokens), rtol=1e-12, atol=1e-12)


def test_attention_with_dropout_has_the_right_mean_and_sees_no_later_token():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 4, 16, 8, generator=generator, dtype=torch.float64) for _ in range(3)
    )

    class Attention(torch.nn.Module):
        is_causal = True
        layer_idx = 0

    def mix(step, dropout, v=value):
        with keyed(RowKeys(seed=0, step=step, positions=(0, 1))):
            return attend(Attention(), query, key, v, None, dropout=dropout)[0]

    mean = torch.stack([mix(step, 0.2) for step in range(400)]).mean(0)
    torch.testing.assert_close(mean, mix(0, 0.0), rtol=0, atol=0.25)
    later = value.clone()
    later[:, :, 9:] += 1.0
    assert torch.equal(mix(0, 0.2)[:, :9], mix(0, 0.2, later)[:, :9])


@pytest.mark.parametrize("case", ["gpt2", "bert"])
def test_a_key_bias_has_no_gradient(case):
    spec = spec_of(case)
    layers = layers_of(spec)
    tokens, targets = batch(spec)
    loss(run(layers, tokens), targets).backward()
    parameters = dict(layers[1].named_parameters())
    if case == "gpt2":
        query, key, value = parameters["block.attn.c_attn.bias"].grad.chunk(3)
        assert query.abs().min() > 0
        assert value.abs().min() > 0
        assert torch.equal(key, torch.zeros_like(key))
    else:
        assert parameters["block.attention.self.key.bias"].grad is None
        assert parameters["block.attention.self.value.bias"].grad.abs().min() > 0


@pytest.mark.parametrize("case", CASES)
def test_weight_gradients_may_be_left_for_later(case):
    spec = spec_of(case)
    tokens, targets = batch(spec)
    found = []
    for deferred in (None, DeferredGradients()):
        layers = layers_of(spec)
        with adding(deferred):
            loss(run(layers, tokens), targets).backward()
        if deferred is not None:
            due = [n for n, p in layers[2].named_parameters() if p.grad is None and "weight" in n]
            assert len(due) >= 4, "nothing was left for later"
            deferred.add()
        found.append(foreign.gradients(spec, layers))
    for name, gradient in found[0].items():
        assert torch.equal(gradient, found[1][name]), name


@pytest.mark.parametrize("kind", FAMILIES)
def test_bfloat16_autocast_stays_close(kind):
    spec = foreign.spec(kind, sequence_length=LENGTH, dropout=0.1)
    layers = layers_of(spec, torch.float32)
    tokens, targets = batch(spec)
    wide = loss(run(layers, tokens), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = loss(run(layers, tokens), targets)
    narrow.backward()
    assert narrow.item() == pytest.approx(wide.item(), rel=0.02)


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "oobleck.worker.models.adapters", None)
    monkeypatch.delattr("oobleck.worker.models.adapters", raising=False)
    with pytest.raises(JobError, match=r"llama needs .* pip install 'transformers>=5.0'"):
        build_layer(spec_of("llama"), 1)


def test_a_config_that_transformers_refuses_is_named():
    spec = spec_of("llama", initializer_range=2.0)
    with pytest.raises(JobError, match=r"model\.config: transformers refuses it: .*; correct it"):
        build_layer(spec, 1)


def test_the_warm_process_loads_a_family_once_and_leaves_a_missing_one_to_the_worker(
    monkeypatch, caplog
):
    warm.load_for("bert")
    assert "oobleck.worker.models.adapters" in sys.modules
    assert not registry.load("bert"), "it is there"
    assert not registry.load("gpt"), "there is nothing to load"
    monkeypatch.delitem(sys.modules, "oobleck.worker.models.adapters", raising=False)
    monkeypatch.setitem(sys.modules, "transformers.models.llama.modeling_llama", None)
    with caplog.at_level("WARNING"):
        warm.load_for("llama")
    assert [record.message for record in caplog.records] == ["model's libraries are missing"]
