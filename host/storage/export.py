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
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save

from oobleck.core.checkpoint import MOST_LAYER_HEADER_BYTES, InvalidCheckpoint, LayerFile, Manifest
from oobleck.core.job.model import AnyModel, OwnModelSpec
from oobleck.host.storage.checkpoints import StoredCheckpoint, read_layer
from oobleck.host.storage.exported import Array, exported, exported_config, has_adapters
from oobleck.host.storage.folder import Folder, LocalFolder
from oobleck.host.storage.weight_files import (
    WeightsError,
    check_content,
    open_weights,
    read_tensor,
)

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
    return the files' names.

    Raises InvalidCheckpoint where a layer is damaged, ValueError where `output` is not empty, and
    OSError. Raises WeightsError where the initial weights, which have the untrained tensors, cannot
    be read. After an error the written files are removed.
    """
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
