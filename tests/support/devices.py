"""What tests compute on: the CPU, or with `pytest --device cuda:0` a GPU, where the test can.

Chosen before any test is imported.
"""

import torch

_chosen = torch.device("cpu")


def choose(name: str) -> None:
    """Raises ValueError where this machine has no such device."""
    global _chosen
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: no GPU can be used here")
    _chosen = device


def device() -> torch.device:
    return _chosen
