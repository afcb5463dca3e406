"""Wheels as a build makes them, and such as nobody should."""

import io
import zipfile
from collections.abc import Mapping

METADATA = "mine-1.0.dist-info/WHEEL"
PURE = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def wheel_of(files: Mapping[str, str | bytes], said: str = PURE) -> bytes:
    """`said`: what it says of itself; empty: nothing."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        if said:
            archive.writestr(METADATA, said)
    return made.getvalue()
