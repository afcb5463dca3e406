"""What this host computes with, by the names that its kernel gives: no torch, no CUDA context."""

import re
from collections.abc import Mapping
from pathlib import Path

_MODEL = re.compile(r"^model name\s*:\s*(.+)$", re.MULTILINE)
_GPU = re.compile(r"^Model:\s*(.+)$", re.MULTILINE)
_SPACES = re.compile(r"\s+")


def device_kind(device: str, environment: Mapping[str, str]) -> str:
    """Name of what one worker computes on; equal names mean equal speed.

    `device`: cpu or cuda. `environment`: of the workers, for their number of threads.
    """
    if device == "cuda":
        return f"cuda {_gpu_name()}"
    threads = environment.get("OMP_NUM_THREADS", "all")
    return f"cpu {_cpu_name()}, {threads} {'thread' if threads == '1' else 'threads'}"


def _cpu_name() -> str:
    return _first(_MODEL, Path("/proc/cpuinfo")) or "unknown"


def _gpu_name() -> str:
    found = (
        _first(_GPU, path)
        for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    )
    return ", ".join(sorted({name for name in found if name})) or "unknown"


def _first(pattern: re.Pattern[str], path: Path) -> str:
    try:
        match = pattern.search(path.read_text(errors="replace"))
    except OSError:
        return ""
    return _SPACES.sub(" ", match[1].strip()) if match else ""
