"""The model part of a job file: presets, configs, and one clear line for each contradiction."""

import json
from typing import get_args

import pytest

from oobleck.core.errors import InvalidJob
from oobleck.core.job.families import FAMILIES, Kind
from oobleck.core.job.family import ConfigError
from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.model import ModelSpec
from oobleck.core.job.model_file import PRESETS
from oobleck.planner.profile.estimate import estimate_profile
from support.families import family_model

JOB = """\
name: demo
data: {text: [a]}
training: {steps: 1, global_batch: 4}
model:
"""


def model(text: str, files: dict[str, str] | None = None) -> ModelSpec:
    lines = "".join(f"  {line}\n" for line in text.splitlines())
    read = None if files is None else files.__getitem__
    job = parse_job(JOB + lines, source="job.yaml", read=read)
    assert parse_job(format_job(job)) == job, "the normalised text must say the same"
    return job.model


def test_a_config_gives_the_numbers() -> None:
    found = model(
        "kind: llama\nconfig: {hidden_size: 64, num_hidden_layers: 4}\nsequence_length: 9"
    )
    assert (found.kind, found.layers, found.hidden, found.heads) == ("llama", 4, 64, 32)
    assert (found.vocabulary, found.tied, found.dropout) == (32000, False, 0.0)
    assert (found.objective, found.layer_count) == ("causal", 6)
    config = {"hidden_size": 64, "num_hidden_layers": 4}
    assert found == family_model("llama", config, sequence_length=9)


def test_numbers_stand_for_keys_of_the_config() -> None:
    found = model("kind: bert\nlayers: 3\nhidden: 24\nheads: 2\ndropout: 0.2\nsequence_length: 9")
    config = json.loads(found.config)
    assert (config["num_hidden_layers"], config["hidden_size"]) == (3, 24)
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.2
    assert found.objective == "masked"


def test_a_config_may_be_a_file_or_lie_beside_the_weights() -> None:
    text = json.dumps(
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": 3,
            "n_ctx": 1024,
            "torch_dtype": "float32",
            "task_specific_params": {"text-generation": {"do_sample": True}},
        }
    )
    given = model("config: c/config.json\nsequence_length: 9", {"c/config.json": text})
    assert (given.kind, given.layers, given.weights) == ("gpt2", 3, None)
    beside = model("weights: /w\nsequence_length: 9", {"/w/config.json": text})
    assert (beside.kind, beside.layers, beside.weights) == ("gpt2", 3, "/w")
    other = model("weights: /w\nkind: gpt2\nconfig: {n_layer: 5}\nsequence_length: 9", {})
    assert (other.layers, other.weights) == (5, "/w")


def test_a_presets_numbers_may_be_replaced() -> None:
    found = model("preset: gpt3-2.7b\nlayers: 2\nconfig: {n_head: 20}\nsequence_length: 2048")
    assert (found.kind, found.layers, found.hidden, found.heads) == ("gpt2", 2, 2560, 20)
    assert found.dropout == 0.0


@pytest.mark.parametrize(
    ("name", "kind", "layers", "hidden", "heads", "millions"),
    [
        # Oobleck §7.1: the models that are evaluated there.
        ("bert-large", "bert", 24, 1024, 16, 335),
        ("gpt2", "gpt2", 12, 768, 12, 124),
        ("gpt2-medium", "gpt2", 24, 1024, 16, 355),
        ("gpt3-medium", "gpt2", 24, 1024, 16, 356),
        ("gpt3-1.3b", "gpt2", 24, 2048, 16, 1316),
        ("gpt3-2.7b", "gpt2", 32, 2560, 32, 2652),
        ("gpt3-6.7b", "gpt2", 32, 4096, 32, 6658),
        ("llama-2-7b", "llama", 32, 4096, 32, 6738),
        ("llama-3-8b", "llama", 32, 4096, 32, 8030),
    ],
)
def test_presets_have_their_published_sizes(
    name: str, kind: str, layers: int, hidden: int, heads: int, millions: int
) -> None:
    found = model(f"preset: {name}\nsequence_length: 512")
    assert (found.kind, found.layers, found.hidden, found.heads) == (kind, layers, hidden, heads)
    job = parse_job(JOB + f"  preset: {name}\n  sequence_length: 512")
    profile = estimate_profile(job, gpus_per_node=1, memory_per_worker_bytes=1 << 40)
    total = sum(layer.parameter_bytes for layer in profile.layers) // 4
    if found.tied:
        total -= found.vocabulary * found.hidden
    assert round(total / 1e6) == millions


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model(name: str) -> None:
    model(f"preset: {name}\nsequence_length: 512")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kind: gpt3",
            f"job.yaml:5: model.kind must be {' or '.join(sorted(['gpt', *FAMILIES]))}, not the",
        ),
        ("preset: gpt3-2.8b", "job.yaml:5: model.preset: there is no 'gpt3-2.8b'; did you mean"),
        ("preset: 5", "job.yaml:5: model.preset must be a text, not 5"),
        ("preset: gpt2\nkind: bert", "job.yaml:6: model.kind: bert is not the preset's, which is"),
        ("kind: gpt2", "job.yaml:4: missing key 'sequence_length' in model"),
        ("kind: gpt2\nlayer: 2", "job.yaml:6: unknown key 'layer' in model; did you mean 'layers'"),
        (
            "kind: gpt2\nlayers: x",
            "job.yaml:6: model.layers must be an integer from 1 to 512, not the",
        ),
        ("kind: gpt2\nheads: 5", "job.yaml:6: model.heads: 5 does not divide n_embd (768); choo"),
        (
            "kind: gpt2\nlayers: 2\nconfig: {n_layer: 3}",
            "job.yaml:6: model.layers: 2, but the config's n_layer is 3; remove one of the two",
        ),
        (
            "kind: gpt2\ndropout: 0.5\nconfig: {resid_pdrop: 0, embd_pdrop: 0, attn_pdrop: 0}",
            "job.yaml:6: model.dropout: 0.5, but the config's largest dropout is 0.0; remove one",
        ),
        (
            "kind: gpt2\nconfig:\n  n_layers: 3",
            "job.yaml:7: model.config.n_layers: gpt2 has no such key; did you mean 'n_layer'?",
        ),
        (
            "kind: gpt2\nconfig: {n_layer: 3, num_hidden_layers: 4}",
            "model.config.num_hidden_layers: 4 here and 3 under n_layer's other name; remove one",
        ),
        ("kind: gpt2\nconfig: {n_layer: 0}", "model.config.n_layer: 0 is too small; it must be at"),
        ("kind: gpt2\nconfig: {n_layer: 2.5}", "model.config.n_layer: 2.5 is not an integer"),
        ("kind: gpt2\nconfig: {attn_pdrop: 1}", "model.config.attn_pdrop: 1.0 is not in [0, 1)"),
        (
            "kind: gpt2\nsequence_length: 9\nconfig: {n_layer: 999}",
            "model.layers must be an integer from 1 to 512, not 999",
        ),
        (
            "kind: gpt2\nconfig: {activation_function: gelo}",
            "model.config.activation_function: 'gelo' is not supported; use gelu, ",
        ),
        (
            "kind: gpt2\nconfig: {model_type: bert}",
            "model.config.model_type: 'bert' is not the job's kind gpt2; correct either",
        ),
        ("config: {n_layer: 3}", "job.yaml:4: model.kind: is missing; use kind gpt2, llama, bert"),
        ("config: {model_type: t5}", "model.config: model_type 't5' cannot be trained; use kind"),
        ("config: [1]", "model.config must be a mapping of keys or the path of a config.json, not"),
        ("config: c.json", "model.config: c.json cannot be read here; give the config's keys"),
        (
            "kind: bert\nconfig: {is_decoder: true}",
            "model.config.is_decoder: True is not supported; remove the key or set False",
        ),
        (
            "kind: bert\nconfig: {vocab_size: 300}",
            "model.config.mask_token_id: is missing; give the id that stands for a masked token "
            "and that the data does not use, such as vocab_size - 1 (299)",
        ),
        (
            "kind: bert\nconfig: {vocab_size: 300, mask_token_id: 300}",
            "model.config.mask_token_id: 300 is not below vocab_size (300); lower it",
        ),
        (
            "kind: llama\nconfig: {num_key_value_heads: 5}",
            "model.config.num_key_value_heads: 5 does not divide num_attention_heads (32)",
        ),
        (
            "kind: llama\nconfig: {hidden_size: 96}",
            "model.config.head_dim: heads 3 wide cannot be rotated in pairs; choose hidden_size",
        ),
        (
            "kind: llama\nconfig: {rope_parameters: {rope_type: longrope}}",
            "model.config.rope_parameters: type 'longrope' is not supported; use default, linear",
        ),
        (
            "kind: llama\nconfig: {pad_token_id: 32000}",
            "model.config.pad_token_id: 32000 is not below vocab_size (32000); lower it",
        ),
        (
            "kind: gpt2\nsequence_length: 1025",
            "model.sequence_length: 1025 is beyond the model's 1024 positions; lower it, or raise",
        ),
        (
            "kind: gpt\nlayers: 1\nhidden: 2\nheads: 1\nsequence_length: 1\nweights: /w",
            "job.yaml:10: model.weights: the built-in model takes none; leave it out or set kind",
        ),
        ("kind: opt\nconfig: {n_layer: 1}", "job.yaml:5: model.kind: there is no 'opt'; use kind"),
        ("kind: gpt\nconfig: {n_layer: 1}", "model.config: kind gpt takes none; use kind gpt2"),
    ],
)
def test_a_wrong_model_gets_one_line_with_place_and_fix(text: str, message: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        model(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "model.config: c.json is not valid JSON: Expecting"),
        ("[1]", "model.config: c.json must hold one JSON object with a config's keys"),
        ('{"model_type": "gpt2", "n_head": 7}', "model.config: c.json.n_head: 7 does not divide"),
    ],
)
def test_a_wrong_config_file_is_named(content: str, message: str) -> None:
    with pytest.raises(InvalidJob) as caught:
        model("config: c.json\nsequence_length: 9", {"c.json": content})
    assert message in str(caught.value)


def test_a_spec_that_contradicts_its_config_cannot_be_built() -> None:
    found = family_model("gpt2", {}, sequence_length=9)
    with pytest.raises(ValueError, match="layers: 2, but the config says 12"):
        ModelSpec(kind="gpt2", layers=2, hidden=768, heads=12, sequence_length=9, vocabulary=50257)
    with pytest.raises(ConfigError, match="n_head: 7 does not divide"):
        family_model("gpt2", {"n_head": 7}, sequence_length=9)
    assert found.config


def test_every_family_is_known_by_its_own_name() -> None:
    assert tuple(FAMILIES) == get_args(Kind)
    assert [family.kind for family in FAMILIES.values()] == list(FAMILIES)
