"""Export of a checkpoint as one model: config.json and safetensors files, as transformers loads
them.

For a model that transformers does not know it has only the files, named as in an nn.Sequential of
the layers. For adapters it has the files that peft loads. Layers are read one after the other, each
checked against its hash. They are written in pieces of a few gigabytes, so a model may be larger
than memory. Must not know torch or transformers.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from oobleck.core.checkpoint import MOST_LAYER_HEADER_BYTES, InvalidCheckpoint, LayerFile, Manifest
from oobleck.core.job.families import GPT2, family_of
from oobleck.core.job.family import decode_config
from oobleck.core.job.model import AnyModel, ModelSpec, OwnModelSpec
from oobleck.host.storage.checkpoints import StoredCheckpoint, read_layer
from oobleck.host.storage.folder import Folder, LocalFolder
from oobleck.host.storage.weight_files import WeightsError, check_content, open_weights, read_tensor

# ---- layers under the names and in the forms of transformers
#
# The built-in model is exported as GPT-2, whose layers are the same except that biases are zeros
# and some weights are transposed.


Array = NDArray[Any]

#: Parts of the built-in block under GPT-2's names.
_GPT_PARTS = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "attention_out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}
#: Prefix of all parameter names in the layers of a model of transformers.
_PART = "module.part."
#: Tensors that transformers omits from a file where they are tied.
_TIED = frozenset({"lm_head.weight", "cls.predictions.decoder.weight"})


def foreign_name(spec: ModelSpec, layer: int, name: str) -> str:
    """Return transformers' name of parameter `name` of `layer`."""
    family = family_of(spec.kind)
    if family is None:
        return _gpt(spec, layer, name)
    return family.foreign_name(layer, name, tied=spec.tied)


def _gpt(spec: ModelSpec, layer: int, name: str) -> str:
    owner, _, kind = name.rpartition(".")
    if layer == 0:
        return f"transformer.{'wte' if owner == 'token' else 'wpe'}.weight"
    if layer == spec.layer_count - 1:
        return "lm_head.weight" if owner == "token" else f"transformer.ln_f.{kind}"
    return f"transformer.h.{layer - 1}.{_GPT_PARTS[owner]}.{kind}"


def to_hugging_face(spec: ModelSpec, layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of `layer`, given by our names, as transformers' checkpoint has them,
    without the head's copy of a tied weight."""
    found: dict[str, Array] = {}
    for name, value in tensors.items():
        foreign = foreign_name(spec, layer, name)
        if spec.tied and foreign in _TIED:
            continue
        matrix = ".attn." in foreign or ".mlp." in foreign
        if spec.kind == "gpt" and matrix:
            found[foreign] = np.ascontiguousarray(value.T)
            bias = foreign.removesuffix("weight") + "bias"
            found[bias] = np.zeros(value.shape[0], dtype=value.dtype)
        else:
            found[foreign] = value
    return found


def exported(spec: AnyModel, layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of `layer`, given by our names, as an export of the model has them."""
    if isinstance(spec, ModelSpec):
        return to_hugging_face(spec, layer, tensors)
    assert isinstance(spec, OwnModelSpec), "there are two kinds"
    foreign, last = spec.description.foreign, spec.layer_count - 1
    if foreign is None:
        return by_layer(layer, tensors)
    shared = spec.description.shared(layer)
    tied = {f"module.{name}" for name, (first, _) in shared.items() if layer != first}
    prefix = f"{foreign.blocks}{layer - 1}." if 0 < layer < last else ""
    found = {
        prefix + name.removeprefix(_PART): value
        for name, value in tensors.items()
        if name not in tied
    }
    if foreign.adapters:
        return {_of_adapter(name): value for name, value in found.items()}
    return found


def _of_adapter(name: str) -> str:
    """Return peft's name of the tensor in a file: without the name of the adapter."""
    for matrix in ("lora_A", "lora_B"):
        name = name.replace(f".{matrix}.default.", f".{matrix}.")
    return f"base_model.model.{name}"


def has_adapters(spec: AnyModel) -> bool:
    """Return whether an export has adapters of peft instead of a model."""
    return isinstance(spec, OwnModelSpec) and spec.lora is not None


def exported_config(spec: AnyModel) -> dict[str, Any] | None:
    """Return the export's config; None where transformers does not know the model."""
    if isinstance(spec, ModelSpec):
        return hugging_face_config(spec)
    assert isinstance(spec, OwnModelSpec), "there are two kinds"
    foreign = spec.description.foreign
    return None if foreign is None else dict(json.loads(foreign.config))


def by_layer(layer: int, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return the parameters of a user's layer, named as in an nn.Sequential of the layers."""
    return {f"{layer}.{name.removeprefix('module.')}": value for name, value in tensors.items()}


def hugging_face_config(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of the model as transformers reads it."""
    keys = _gpt_config(spec) if spec.kind == "gpt" else decode_config(spec.config)
    family = family_of(spec.kind) or GPT2
    return {
        "model_type": family.kind,
        "architectures": [family.architecture],
        # BERT pads with token 0 by default.
        **{name: v for name, v in keys.items() if v is not None or name == "pad_token_id"},
    }


def _gpt_config(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocabulary,
        "n_positions": spec.sequence_length,
        "n_embd": spec.hidden,
        "n_layer": spec.layers,
        "n_head": spec.heads,
        "activation_function": "gelu",
        "embd_pdrop": spec.dropout,
        "resid_pdrop": spec.dropout,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": None,
    }


# ---- the files


#: Bytes of weights per file, as in transformers.
FILE_BYTES = 5 << 30
_INDEX = "model.safetensors.index.json"


def export(
    folder: Folder,
    found: StoredCheckpoint,
    output: Path,
    *,
    file_bytes: int = FILE_BYTES,
    on_layer: Callable[[], object] = lambda: None,
) -> list[str]:
    """Write the model of the checkpoint in `folder` to `output`, a missing or empty directory, and
    return the files' names; after an error nothing stays. Raises InvalidCheckpoint, WeightsError
    (the initial weights, which have the untrained tensors), ValueError (`output`), OSError."""
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty; name a new directory")
    made_here = not output.exists()
    try:
        return _Export(folder, found, output, file_bytes).run(on_layer)
    except BaseException:
        for path in output.iterdir() if output.exists() else ():
            path.unlink()
        if made_here:
            shutil.rmtree(output, ignore_errors=True)
        raise


class _Export:
    def __init__(
        self, folder: Folder, found: StoredCheckpoint, output: Path, file_bytes: int
    ) -> None:
        self._folder = folder
        self._manifest = found.manifest
        self._output = LocalFolder(output)
        self._path = output
        self._file_bytes = file_bytes
        #: Names of the files.
        self._weights, self._config = "model", "config.json"
        if has_adapters(found.manifest.model):
            # They are small, and peft reads one file.
            self._weights, self._config = "adapter_model", "adapter_config.json"
            self._file_bytes = sys.maxsize
        #: Names of the tensors in each file.
        self._files: list[list[str]] = []
        self._waiting: dict[str, Array] = {}
        self._total = 0

    def run(self, on_layer: Callable[[], object]) -> list[str]:
        spec = self._manifest.model
        for file in self._manifest.files:
            self._add(self._converted(spec, file))
            on_layer()
        self._add(_kept(self._manifest))
        self._flush()
        names, config = self._name_files(), exported_config(spec)
        if config is None:
            return names
        text = json.dumps(config, indent=2) + "\n"
        self._output.write(self._config, [text.encode()])
        return [self._config, *names]

    def _add(self, tensors: dict[str, Array]) -> None:
        for name, value in tensors.items():
            if self._size(self._waiting) + value.nbytes > self._file_bytes:
                self._flush()
            self._waiting[name] = value

    def _converted(self, spec: AnyModel, file: LayerFile) -> dict[str, Array]:
        """Convert a layer's weights. Raises InvalidCheckpoint if the layer does not match the
        manifest."""
        content = read_layer(self._folder, file)
        try:
            check_content(content, MOST_LAYER_HEADER_BYTES)
            stored = load(content)
            # Moments have their parameter's name before their own.
            weights = {n: v for n, v in stored.items() if n.rpartition(".")[0] not in stored}
            return exported(spec, file.layer, weights)
        except (WeightsError, SafetensorError, LookupError, ValueError) as error:
            what = f"is of another model: {error}" if isinstance(error, LookupError) else str(error)
            raise InvalidCheckpoint(f"{file.name}: {what}") from error

    @staticmethod
    def _size(tensors: dict[str, Array]) -> int:
        return sum(value.nbytes for value in tensors.values())

    def _flush(self) -> None:
        if not self._waiting:
            return
        self._total += self._size(self._waiting)
        content = save(self._waiting, metadata={"format": "pt"})
        self._output.write(_temporary(len(self._files)), [content])
        self._files.append(list(self._waiting))
        self._waiting = {}

    def _name_files(self) -> list[str]:
        """Rename the files to their final names, which contain their number, known only now."""
        count = len(self._files)
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
        if count == 1:
            names = [f"{self._weights}.safetensors"]
        for number, name in enumerate(names):
            (self._path / _temporary(number)).rename(self._path / name)
        if count == 1:
            return names
        index = {
            "metadata": {"total_size": self._total},
            "weight_map": {
                tensor: name
                for name, tensors in zip(names, self._files, strict=True)
                for tensor in tensors
            },
        }
        self._output.write(_INDEX, [json.dumps(index, indent=2).encode()])
        return [*names, _INDEX]


def _kept(manifest: Manifest) -> dict[str, Array]:
    """Return the parts of the model that are only in the initial weights, since they are not
    trained. Empty for adapters, which are exported without the model. Raises WeightsError."""
    spec = manifest.model
    if not spec.rests_on_files:
        return {}
    assert isinstance(spec, OwnModelSpec), "no other model has such a part"
    assert spec.initial is not None, "only files have it"
    if has_adapters(spec) and not Path(spec.initial).is_dir():
        return {}
    files = open_weights(spec.initial)
    if manifest.base not in ("", files.fingerprint.hex()):
        away = ", or move this one away" if has_adapters(spec) else ""
        raise WeightsError(
            f"{spec.initial} is another model than the one that was trained on (fingerprint "
            f"{files.fingerprint.hex()[:12]}, and {manifest.base[:12]} in the checkpoint); put "
            f"that one there{away}"
        )
    kept = spec.description.foreign.kept if spec.description.foreign else ()
    return {name: read_tensor(files, key) for name, key in kept}


def _temporary(number: int) -> str:
    return f".model-{number:05}.safetensors"
