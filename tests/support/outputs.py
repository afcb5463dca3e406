"""Final weights as a reader of the output finds them."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from oobleck.core.checkpoint import MANIFEST
from oobleck.core.codec import decode
from oobleck.worker.checkpoint.output import Manifest


def read_manifest(directory: str | Path) -> Manifest:
    """Return the manifest of an output."""
    return decode(Manifest, (Path(directory) / MANIFEST).read_bytes())


def read_output(directory: str | Path) -> dict[str, NDArray[np.floating]]:
    """Return all weights of an output, by `<layer>.<parameter>`, such as `3.qkv.weight`."""
    return {
        f"{layer}.{key}": value
        for layer, name in enumerate(read_manifest(directory).files)
        for key, value in load_file(Path(directory) / name).items()
    }
