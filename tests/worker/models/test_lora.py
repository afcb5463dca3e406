"""Adapters of peft: what of a model they change, what is trained, and what comes of it."""

import builtins
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from oobleck.core.job.file import format_job, parse_job
from oobleck.core.job.model import LoraSpec, OwnModelSpec
from oobleck.core.job.spec import JobSpec
from oobleck.host.storage.export import export
from oobleck.host.storage.weight_files import WeightsError
from oobleck.worker.models import own
from oobleck.worker.models.checks.built import look_at_float8
from oobleck.worker.models.checks.check import SAMPLES, check
from oobleck.worker.models.huggingface import pretrained
from oobleck.worker.models.registry import weight_files
from oobleck.worker.runtime.errors import JobError, NodeError
from oobleck.worker.runtime.random import RowKeys
from oobleck.worker.state.model_state import ModelState
from support import causal, exports

#: Of each model, what gets adapters.
MODELS: dict[str, tuple[str, ...]] = {
    "Qwen3ForCausalLM": ("q_proj", "v_proj", "model.layers.1.mlp.down_proj"),
    "GPT2LMHeadModel": ("c_attn", "c_proj"),  # weights that are kept transposed
    "MixtralForCausalLM": ("q_proj", "o_proj", "lm_head"),
}


@pytest.fixture(autouse=True)
def look_anew() -> Iterator[None]:
    """Files are looked at once per process; here they change."""
    yield
    weight_files.cache_clear()


def saved(name: str, folder: Path) -> Any:
    """A base model on disk, and in memory."""
    torch.manual_seed(3)
    kind = getattr(transformers, name)
    whole = kind(kind.config_class(**causal.keys_of(name)))
    whole.save_pretrained(folder)
    return whole.eval()


def job_of(folder: Path, name: str, **lora: Any) -> JobSpec:
    spec = LoraSpec(**{"target_modules": MODELS.get(name, ()), "r": 4, "lora_alpha": 16, **lora})
    return exports.job_of(architecture=name, weights=str(folder), lora=spec)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("name", MODELS)
def test_peft_loads_the_export_and_computes_what_was_trained(name: str, tmp_path: Path) -> None:
    base = saved(name, tmp_path / "base")
    job = job_of(tmp_path / "base", name)
    ids = exports.tokens()
    begun = ModelState(job, torch.device("cpu"))
    for layer in range(job.model.layer_count):
        begun.initialise(layer)
    with torch.no_grad():
        before = base(ids).logits
    torch.testing.assert_close(exports.logits(begun, ids), before, rtol=1e-5, atol=1e-5)
    state = exports.held(job)
    written = exports.exported(job, state, tmp_path)
    assert written == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "model" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    import peft  # two seconds of a core, of each process that collects these tests

    model = peft.PeftModel.from_pretrained(base, tmp_path / "model").eval()
    expected = exports.logits(state, ids)
    assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-2), "they matter"
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected, rtol=1e-5, atol=1e-5)


def test_a_step_changes_the_adapters_alone(tmp_path: Path) -> None:
    base = saved("Qwen3ForCausalLM", tmp_path).state_dict()
    job = job_of(tmp_path, "Qwen3ForCausalLM")
    state = exports.held(job)
    before = {layer: state.snapshot(layer) for layer in state.layers}
    x: Any = exports.tokens()
    for layer in sorted(state.layers):
        x = state.module(layer)(x, RowKeys(seed=0, step=1, positions=(0, 1, 2)))
    found = state.module(max(state.layers)).row_losses(x, exports.tokens())
    assert found is not None
    found[0].mean().backward()
    state.apply(1, scale=1.0)
    changed = [bool((state.snapshot(n) != before[n]).any()) for n in sorted(before)]
    assert changed == [False, True, True, True, False], "embedding and head have none"
    for number, part in ((1, "q_proj"), (2, "v_proj")):
        module = state.module(number).get_submodule(f"module.part.self_attn.{part}.base_layer")
        kept = base[f"model.layers.{number - 1}.self_attn.{part}.weight"]
        assert torch.equal(module.weight, kept)
    trained = {name for n in state.layers for name, _ in state.module(n).trained()}
    assert all(".lora_" in name for name in trained)


def test_a_worker_that_joins_needs_the_adapters_and_the_files_alone(tmp_path: Path) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    job = job_of(tmp_path, "Qwen3ForCausalLM")
    state, fresh = exports.held(job), ModelState(job, torch.device("cpu"))
    for layer in state.layers:
        fresh.load(layer, state.snapshot(layer), version=0)
    sizes = [state.snapshot(layer).shape[1] for layer in sorted(state.layers)]
    assert sizes[0] == sizes[-1] == 0
    ids = exports.tokens()
    assert torch.equal(exports.logits(fresh, ids), exports.logits(state, ids))


def test_first_values_follow_from_seed_and_layer(tmp_path: Path) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    job = job_of(tmp_path, "Qwen3ForCausalLM")

    def drawn(layer: int, seed: int) -> torch.Tensor:
        torch.rand(seed)  # what was drawn before has no part in it
        again = replace(job, training=replace(job.training, seed=seed))
        return ModelState(again, torch.device("cpu")).initialise(layer).storage[0].clone()

    assert torch.equal(drawn(1, 5), drawn(1, 5))
    assert not torch.equal(drawn(1, 5), drawn(1, 6))
    # Of the same shapes, but for what the second block has besides.
    size = len(drawn(1, 5))
    assert not torch.equal(drawn(1, 5), drawn(2, 5)[:size])


def test_a_base_that_changes_while_the_job_runs_is_not_read(tmp_path: Path) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    job = job_of(tmp_path, "Qwen3ForCausalLM")
    state, path = exports.held(job), tmp_path / "model.safetensors"
    other = {name: value + 1 for name, value in load_file(path).items()}
    save_file(other, path, metadata={"format": "pt"})
    with pytest.raises(NodeError, match=r"^model\.weights: .*was changed since this job began"):
        state.load(1, state.snapshot(1), version=0)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_layer_begins_with_one_look_into_the_files(
    parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    job = job_of(tmp_path, "Qwen3ForCausalLM")
    expected = ModelState(job, torch.device("cpu")).initialise(1).storage[0].clone()
    real, read = pretrained.read_tensor, list[str]()
    monkeypatch.setattr(
        pretrained, "read_tensor", lambda files, key: read.append(key) or real(files, key)
    )
    state = ModelState(job, torch.device("cpu"))
    begun = [state.initialise(1, part=part, parts=parts).storage[0] for part in range(parts)]
    assert len(read) == parts * len(set(read)) > 0
    assert torch.equal(torch.cat(begun).sort().values, expected.sort().values)


def test_an_export_of_adapters_wants_the_base_that_they_were_trained_on(tmp_path: Path) -> None:
    saved("Qwen3ForCausalLM", tmp_path / "base")
    job = job_of(tmp_path / "base", "Qwen3ForCausalLM")
    state = exports.held(job)
    path = tmp_path / "base" / "config.json"
    exports.exported(job, state, tmp_path)
    shutil.rmtree(tmp_path / "model")
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 0.5}))
    saved_at, found = exports.checkpoint(tmp_path)
    with pytest.raises(WeightsError, match=r"base is another model than .*; put that one"):
        export(saved_at, found, tmp_path / "model")
    shutil.rmtree(tmp_path / "base")
    assert export(saved_at, found, tmp_path / "model")


def test_what_adapters_multiply_in_bfloat16_is_said_in_a_line(tmp_path: Path) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    job = job_of(tmp_path, "Qwen3ForCausalLM", target_modules=("q_proj", "v_proj"))
    assert isinstance(job.model, OwnModelSpec)
    blocks = range(1, job.model.layer_count - 1)
    (found,) = look_at_float8(job.model, blocks, seed=0)
    assert f"and 3 more in bfloat16, in {len(blocks)} layers" in str(found)


def test_dropout_of_adapters_is_found_and_passes_the_check(tmp_path: Path) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    job = job_of(tmp_path, "Qwen3ForCausalLM", lora_dropout=0.5)
    assert isinstance(job.model, OwnModelSpec)
    layers = job.model.description.layers
    assert [layer.draws for layer in layers] == [False, True, True, True, False]
    ids = torch.randint(64, (SAMPLES, exports.LENGTH), generator=torch.Generator().manual_seed(1))
    assert check(job.model, (ids, ids), seed=0, dtype=torch.float32, steps=9) == []


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("q_prj", r"no linear layer q_prj \(did you mean q_proj\?\); there are: .*k_proj.*v_proj"),
        ("embed_tokens", "no linear layer embed_tokens; there are: "),
        ("self_attn", "no linear layer self_attn; there are: "),
        ("proj", "no linear layer proj"),
        (
            "all-linear",
            r"no linear layer all-linear, .*give them by name: \[down_proj, gate_proj, k_proj, "
            r"o_proj, q_proj, up_proj, v_proj\]",
        ),
    ],
)
def test_what_is_no_linear_layer_is_refused_with_those_that_there_are(
    target: str, why: str, tmp_path: Path
) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    with pytest.raises(JobError, match=f"^model.lora.target_modules: Qwen3ForCausalLM has {why}"):
        job_of(tmp_path, "Qwen3ForCausalLM", target_modules=("q_proj", target))


def test_adapters_of_a_classifier_are_refused(tmp_path: Path) -> None:
    """Its head would stay as it was drawn."""
    saved("Qwen3ForCausalLM", tmp_path)
    with pytest.raises(JobError, match="adapts causal language models, and Qwen3ForTokenCl"):
        job_of(tmp_path, "Qwen3ForTokenClassification", target_modules=("q_proj",))


def test_a_router_that_is_a_linear_layer_by_its_class_alone_is_refused(tmp_path: Path) -> None:
    saved("PhimoeForCausalLM", tmp_path)
    with pytest.raises(
        JobError,
        match=r"router means model\.layers\.0\.mlp\.router, a PhimoeTopKRouter, .*; leave it out",
    ):
        job_of(tmp_path, "PhimoeForCausalLM", target_modules=("router",))
    assert job_of(tmp_path, "PhimoeForCausalLM", target_modules=("q_proj",))


def test_a_linear_layer_with_a_forward_of_its_own_is_one(tmp_path: Path) -> None:
    saved("FalconForCausalLM", tmp_path)  # FalconLinear
    job = job_of(tmp_path, "FalconForCausalLM", target_modules=("query_key_value",))
    assert isinstance(job.model, OwnModelSpec)
    assert [layer.parameters > 0 for layer in job.model.description.layers][1:-1] == [True] * 3


def test_a_node_without_peft_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved("Qwen3ForCausalLM", tmp_path)
    real = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return real(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    own.user_model.cache_clear()
    with pytest.raises(NodeError, match=r"^model\.lora: needs .*: pip install 'peft>=[\d.]+'$"):
        job_of(tmp_path, "Qwen3ForCausalLM")


JOB = """
name: tiny
model:
  architecture: Qwen3ForCausalLM
  weights: /base
  sequence_length: 8
  lora: {target_modules: [q_proj], r: 2}
data: {text: ["x"]}
training: {steps: 1, global_batch: 2, microbatch: 1}
"""


def test_a_job_file_has_the_keys_of_peft() -> None:
    job = parse_job(JOB)
    assert isinstance(job.model, OwnModelSpec)
    assert job.model.lora == LoraSpec(target_modules=("q_proj",), r=2, lora_alpha=8)
    assert parse_job(format_job(job)) == job


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("  weights: /base\n", "", "job file:6: model.lora: adapts a trained model; give its dir"),
        ("r: 2", "r: 0", "job file:7: model.lora.r must be an integer from 1 to 65536, not 0"),
        ("r: 2", "alpha: 2", "unknown key 'alpha' in model.lora; did you mean 'lora_alpha'"),
        (
            "target_modules: [q_proj], ",
            "",
            "model.lora: target_modules names no linear layer of the model",
        ),
        ("architecture: Qwen3ForCausalLM\n  weights: /base", "python: a:b", "leave it out"),
        ("r: 2", "lora_dropout: 1.0", "lora_dropout must be a number from 0 to below 1, not 1.0"),
    ],
)
def test_a_wrong_key_is_refused_with_its_line(old: str, new: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^job file:") as refusal:
        parse_job(JOB.replace(old, new))
    assert why in str(refusal.value)
