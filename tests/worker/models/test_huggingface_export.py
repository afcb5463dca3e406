"""What a job with a model of transformers trained, as transformers loads it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import conversion_mapping, core_model_loading

from oobleck.host.storage.weight_files import WeightsError
from oobleck.worker.runtime.errors import JobError
from support import causal, exports

#: What its routers add to their scores, in DeepSeek V3.
_BIAS = "e_score_correction_bias"


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
        ("GPT2LMHeadModel", {}),
        ("GemmaForCausalLM", {}),
        ("MixtralForCausalLM", {"output_router_logits": True}),  # experts in one tensor
        ("OPTForCausalLM", {}),
        ("BloomForCausalLM", {}),
        ("BertForMaskedLM", {}),  # its head has a bias twice
        ("BertForSequenceClassification", {}),
        ("LlamaForSequenceClassification", {}),
        ("ViTForImageClassification", {}),
    ],
)
def test_an_export_computes_what_was_trained(
    name: str, more: dict[str, object], tmp_path: Path
) -> None:
    job = exports.job_of(causal.keys_of(name, **more), architecture=name)
    state = exports.held(job)
    written = exports.exported(job, state, tmp_path)
    assert len(written) > 3, "in several files, with an index"
    kind = "CausalLM" if name == "GPT2LMHeadModel" else name.partition("For")[2]
    model, report = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert type(model).__name__ == name
    assert not report["unexpected_keys"]
    assert not report["missing_keys"]
    ids, _ = causal.batch(causal.pair(name, **more))
    ids = ids.float() if ids.is_floating_point() else ids
    expected = exports.logits(state, ids)
    torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)


def biased(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Saves a model whose routers add to their scores what is not trained, off zero; that of its
    last layer."""
    name = "DeepseekV3ForCausalLM"
    keys = causal.keys_of(name, first_k_dense_replace=1)
    torch.manual_seed(3)
    whole = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**keys))
    whole.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    for key in tensors:
        if key.endswith(_BIAS):
            tensors[key] = torch.randn(4).to(dtype)
    save_file(tensors, path, metadata={"format": "pt"})
    return tensors["model.layers.2.mlp.gate.e_score_correction_bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_trained_comes_from_the_initial_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    bias = biased(tmp_path / "base", dtype)
    job = exports.job_of(weights=str(tmp_path / "base"), architecture="DeepseekV3ForCausalLM")
    state = exports.held(job)
    exports.exported(job, state, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.model.layers[2].mlp.gate.e_score_correction_bias, bias.float())
    ids = exports.tokens()
    expected = exports.logits(state, ids)
    torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)


@contextmanager
def in_two_pieces() -> Iterator[None]:
    """Files of DeepSeek V3 have what its routers add in two halves: transformers knows of none that
    has, but takes such a word from any program."""
    kind = "deepseek_v3"
    known = conversion_mapping.get_checkpoint_conversion_mapping(kind)
    both = core_model_loading.WeightConverter(
        source_patterns=[r"gate\.first", r"gate\.second"],
        target_patterns="gate.e_score_correction_bias",
        operations=[core_model_loading.Concatenate(dim=0)],
    )
    conversion_mapping.register_checkpoint_conversion_mapping(kind, [*known, both], overwrite=True)
    try:
        yield
    finally:
        conversion_mapping.register_checkpoint_conversion_mapping(kind, known, overwrite=True)
        conversion_mapping.USER_REGISTERED_MAPPINGS.discard(kind)


def test_what_the_files_have_in_pieces_is_exported_in_these(tmp_path: Path) -> None:
    bias = biased(tmp_path / "base", torch.float32)
    (path,) = (tmp_path / "base").glob("*.safetensors")
    tensors = load_file(path)
    for key in [key for key in tensors if key.endswith(_BIAS)]:
        whole, gate = tensors.pop(key), key.removesuffix(_BIAS)
        tensors |= {f"{gate}first": whole[:1].clone(), f"{gate}second": whole[1:].clone()}
    save_file(tensors, path, metadata={"format": "pt"})
    with in_two_pieces():
        job = exports.job_of(weights=str(tmp_path / "base"), architecture="DeepseekV3ForCausalLM")
        state = exports.held(job)
        exports.exported(job, state, tmp_path)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(model.model.layers[2].mlp.gate.e_score_correction_bias, bias)
    ids = exports.tokens()
    expected = exports.logits(state, ids)
    torch.testing.assert_close(model.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_tensor_that_the_files_have_twice_is_named(tmp_path: Path) -> None:
    biased(tmp_path / "base", torch.float32)
    (path,) = (tmp_path / "base").glob("*.safetensors")
    tensors = load_file(path)
    tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        JobError, match=r"base has model\.norm\.weight twice, as .*norm\.weight and as .*; leave"
    ):
        exports.job_of(weights=str(tmp_path / "base"), architecture="DeepseekV3ForCausalLM")


def test_an_export_without_the_initial_weights_says_where_they_were(tmp_path: Path) -> None:
    biased(tmp_path / "base", torch.float32)
    job = exports.job_of(weights=str(tmp_path / "base"), architecture="DeepseekV3ForCausalLM")
    state = exports.held(job)
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="base does not exist; give the directory"):
        exports.exported(job, state, tmp_path)
    assert not (tmp_path / "model").exists()


def test_the_config_is_the_users_but_for_the_precision(tmp_path: Path) -> None:
    keys = causal.keys_of("Qwen3ForCausalLM", dtype="bfloat16", rope_theta=5e4)
    job = exports.job_of(keys, architecture="Qwen3ForCausalLM")
    exports.exported(job, exports.held(job), tmp_path)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["rope_parameters"]["rope_theta"] == 5e4
    assert config["use_cache"], "what training turns off is on again"
    assert "dtype" not in config
