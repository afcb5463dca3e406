"""The reader of NVML as a process of its own, over a library that stands for the driver's."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

from oobleck.host.gpu.sample import READER, Sample

LIBRARY = "libnvidia-ml.so.1"


def watch(driver: Path, samples: int, every_s: float = 60, **more: str) -> list[Sample]:
    """The first of what it prints. `driver`: the library's folder."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), **more}
    command = [sys.executable, "-m", READER, str(every_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(samples)]
        finally:
            process.kill()
    return [msgspec.json.decode(line, type=Sample) for line in lines]
