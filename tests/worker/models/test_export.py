"""What is exported loads in transformers and computes what our layers compute."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.numpy import save_file

from oobleck.core.job.model import ModelSpec
from oobleck.host.storage.export import hugging_face_config, to_hugging_face
from oobleck.worker.models.registry import build_layer, initialise_parameters
from oobleck.worker.runtime.random import RowKeys
from support import foreign

MODELS = {
    "gpt": ModelSpec(layers=2, hidden=16, heads=4, sequence_length=12, vocabulary=64, dropout=0.1),
    "gpt, untied": ModelSpec(
        layers=2, hidden=16, heads=4, sequence_length=12, vocabulary=64, tied=False
    ),
    "gpt2": foreign.spec("gpt2", sequence_length=12),
    "gpt2, untied": foreign.spec("gpt2", sequence_length=12, tie_word_embeddings=False),
    "llama": foreign.spec("llama", sequence_length=12, num_key_value_heads=2, rope_theta=5e4),
    "llama, tied": foreign.spec("llama", sequence_length=12, tie_word_embeddings=True),
    "bert": foreign.spec("bert", sequence_length=12),
    "bert, untied": foreign.spec("bert", sequence_length=12, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_model_computes_the_same(name: str, tmp_path: Path) -> None:
    spec = MODELS[name]
    tensors = {}
    tokens = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    x = tokens
    for number in range(spec.layer_count):
        layer = build_layer(spec, number).eval()
        initialise_parameters(layer, spec, 7)
        with torch.no_grad():
            for index, parameter in enumerate(layer.parameters()):
                if parameter.dim() == 1:
                    source = torch.Generator().manual_seed(100 * number + index)
                    parameter.add_(torch.randn(parameter.shape, generator=source), alpha=0.1)
            x = layer(x, RowKeys(seed=0, step=1, positions=(0, 1)))
        ours = {key: value.detach().numpy() for key, value in layer.named_parameters()}
        made = to_hugging_face(spec, number, ours)
        assert not made.keys() & tensors.keys()
        tensors.update(made)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(hugging_face_config(spec)))

    masked = spec.objective == "masked"
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    model, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert report["missing_keys"] <= {"cls.predictions.bias"}  # untied: nothing reads it
    torch.testing.assert_close(model.eval()(tokens).logits, x, rtol=1e-5, atol=1e-5)
