"""Initial weights from a directory that transformers saved; each fault of it is one clear line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from oobleck.core.job.model import ModelSpec
from oobleck.host.storage.weight_files import WeightsError, open_weights
from oobleck.worker.models.registry import (
    build_layer,
    check_weights,
    initialise_parameters,
    weight_files,
)
from oobleck.worker.runtime.errors import JobError, NodeError
from oobleck.worker.runtime.random import RowKeys
from support import foreign
from support.families import family_model

LENGTH = 12
Edit = Callable[[Path], None]


@pytest.fixture(autouse=True)
def look_anew() -> None:
    """Files are looked at once per process; here they change."""
    weight_files.cache_clear()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per case, as transformers writes them."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(0)
    for name, (kind, config, _) in CASES.items():
        whole = foreign.fresh(foreign.spec(kind, sequence_length=LENGTH, **config))
        with torch.no_grad():
            for parameter in whole.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        whole.save_pretrained(folder / name, max_shard_size=CASES[name][2])
    return folder


CASES: dict[str, tuple[str, dict[str, object], str]] = {
    "gpt2": ("gpt2", {}, "1GB"),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}, "1GB"),
    "llama in pieces": ("llama", {}, "8KB"),
    "bert": ("bert", {}, "1GB"),
}


def spec_of(name: str, folder: Path, **changes: object) -> ModelSpec:
    kind, config, _ = CASES[name]
    dropouts = dict.fromkeys(foreign.DROPOUTS[kind], 0.0)
    keys = {**foreign.TINY[kind], **dropouts, **config, **changes}
    return family_model(kind, keys, sequence_length=LENGTH, weights=str(folder))  # type: ignore[arg-type]


def logits(spec: ModelSpec, tokens: torch.Tensor) -> torch.Tensor:
    x = tokens
    for number in range(spec.layer_count):
        with torch.device("meta"):
            empty = build_layer(spec, number)
        layer = empty.to_empty(device="cpu")
        initialise_parameters(layer, spec, 7)
        x = layer(x, RowKeys(seed=0, step=1, positions=(0, 1)))
    return x


def theirs(folder: Path, kind: str, tokens: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = foreign.CLASSES[kind][1].from_pretrained(folder).eval()(tokens).logits
    return found


TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)


@pytest.mark.parametrize("name", CASES)
def test_training_begins_with_the_saved_weights(saved: Path, name: str) -> None:
    folder = saved / name
    spec = spec_of(name, folder)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("pieces" in name)
    assert len(check_weights(spec)) == 32
    expected = theirs(folder, spec.kind, TOKENS)
    torch.testing.assert_close(logits(spec, TOKENS), expected, rtol=1e-5, atol=1e-5)


def rename(folder: Path, change: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({change(name): value for name, value in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gpt2", lambda name: name.removeprefix("transformer.")),
        (
            "bert",
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            ),
        ),
    ],
)
def test_names_of_published_checkpoints_are_known(
    saved: Path, tmp_path: Path, name: str, change: Callable[[str], str]
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / name, folder)
    before = logits(spec_of(name, saved / name), TOKENS)
    rename(folder, change)
    assert torch.equal(logits(spec_of(name, folder), TOKENS), before)


def test_half_precision_weights_are_widened(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "gpt2", folder)
    path = folder / "model.safetensors"
    save_file({name: value.bfloat16() for name, value in load_file(path).items()}, path)
    found = logits(spec_of("gpt2", folder), TOKENS)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, theirs(saved / "gpt2", "gpt2", TOKENS), rtol=0.1, atol=0.1)


def test_a_head_that_differs_from_the_embedding_does_not_go_with_tying(
    saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "gpt2 untied", folder)
    with pytest.raises(JobError, match=r"other values under lm_head\.weight .*; set model\.tied"):
        logits(spec_of("gpt2", folder), TOKENS)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()
    save_file(weights, folder / "model.safetensors")
    weight_files.cache_clear()
    assert logits(spec_of("gpt2", folder), TOKENS).isfinite().all()


def quantise(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file({name: value.to(torch.int8) for name, value in load_file(path).items()}, path)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"\xff" * 12
    path.write_bytes(bytes(content))


def drop(folder: Path) -> None:
    rename(folder, lambda name: name.replace("h.1.ln_1.bias", "other"))


def pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def bare(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (truncate, r"model\.safetensors is truncated or damaged: its tensors end at byte \d+, and"),
        (empty, r"model\.safetensors is truncated or no safetensors file; copy it anew"),
        (damage, r"model\.safetensors has a damaged header; copy it anew"),
        (quantise, r"model\.safetensors has .* as I8, as quantised models do; give weights of"),
        (drop, r"has no tensor transformer\.h\.1\.ln_1\.bias; give weights of the same kind"),
        (pickle, r"has only pickled weights \(\.bin\).* are refused; save the model as"),
        (bare, r"has neither model\.safetensors nor model\.safetensors\.index\.json; give a"),
        (remove, r"does not exist; give the directory of a saved Hugging Face model"),
    ],
)
def test_unusable_files_are_refused_with_the_fix(
    saved: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "gpt2", folder)
    edit(folder)
    with pytest.raises(JobError, match=r"^model\.weights: .*" + message):
        check_weights(spec_of("gpt2", folder))


def test_another_shape_names_tensor_and_file(saved: Path) -> None:
    spec = spec_of("gpt2", saved / "gpt2", n_inner=20)
    with pytest.raises(
        JobError,
        match=r"model\.safetensors has transformer\.h\.0\.mlp\.c_fc\.weight as \[16, 64\], and the "
        r"model needs \[16, 20\]; correct the config",
    ):
        check_weights(spec)


def test_a_lost_piece_and_a_wrong_index_are_named(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "llama in pieces", folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    piece = index["weight_map"]["model.norm.weight"]
    (folder / piece).rename(folder / "elsewhere")
    with pytest.raises(WeightsError, match=f"cannot read .*{piece}: No such file"):
        open_weights(str(folder))
    (folder / "elsewhere").rename(folder / piece)
    index["weight_map"]["more"] = piece
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=f"{piece} has no tensor more, which"):
        open_weights(str(folder))
    index["weight_map"]["more"] = "../" + piece
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="names files outside of its directory"):
        open_weights(str(folder))


def test_other_weights_have_another_fingerprint(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "gpt2", folder)
    before = open_weights(str(saved / "gpt2")).fingerprint
    assert open_weights(str(folder)).fingerprint == before
    path = folder / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path)
    assert open_weights(str(folder)).fingerprint != before


def poke(path: Path, name: str) -> None:
    """Change one number in the middle of a tensor, and nothing else of the file."""
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    content[8 + length + (begin + end) // 2] ^= 1
    path.write_bytes(content)


def test_a_fingerprint_has_a_part_of_each_tensor_however_many_there_are(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    tensors = {f"t{number}": torch.zeros(2500) for number in range(200)}
    save_file(tensors, path)
    found = {open_weights(str(tmp_path)).fingerprint}
    for name in ("t0", "t77", "t133", "t199"):
        poke(path, name)
        found.add(open_weights(str(tmp_path)).fingerprint)
    assert len(found) == 5


@pytest.mark.parametrize(
    ("key", "value", "counts"),
    [
        ("layer_norm_epsilon", 0.1, True),
        ("transformers_version", "1.0", False),
        ("_name_or_path", "elsewhere", False),
    ],
)
def test_what_the_config_computes_is_in_the_fingerprint(
    key: str, value: object, counts: bool, saved: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "gpt2", folder)
    before = open_weights(str(folder)).fingerprint
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    assert (open_weights(str(folder)).fingerprint != before) == counts


def test_files_that_change_while_a_job_runs_are_not_read(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved / "gpt2", folder)
    spec = spec_of("gpt2", folder)
    layer = build_layer(spec, 1)
    initialise_parameters(layer, spec, 7)
    poke(folder / "model.safetensors", "transformer.h.0.mlp.c_fc.weight")
    with pytest.raises(NodeError, match=r"model\.safetensors was changed since this job .*; put"):
        initialise_parameters(layer, spec, 7)
