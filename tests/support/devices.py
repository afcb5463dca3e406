"""What tests compute on, and what goes between workers that do not say it.

The CPU, or with `pytest --device cuda:0` a GPU, where the test can: chosen before any test is
imported. Links or a fake of NCCL, also in tests that have nothing to do with GPUs, by turns or as
`pytest --transport` says: chosen before each test.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

#: What goes between workers on CPUs.
Transport = Literal["links", "staged", "nccl"]

_chosen = "cpu"
_transport: Transport = "links"


def choose(name: str) -> None:
    """Raises ValueError where this machine has no such device."""
    global _chosen
    if name != "cpu":  # torch takes seconds to load, and most that look here compute nothing
        import torch

        if torch.device(name).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device {name}: no GPU can be used here")
    _chosen = name


def device() -> "torch.device":
    import torch

    return torch.device(_chosen)


def choose_transport(name: Transport) -> None:
    global _transport
    _transport = name


def transport() -> Transport:
    return _transport
