"""What workers on GPUs get in their environment."""

import psutil
import pytest

from oobleck.host.gpu.devices import worker_environment


def test_nccl_talks_by_the_interface_of_the_agents_address() -> None:
    loopback = next(
        name
        for name, has in psutil.net_if_addrs().items()
        if any(one.address == "127.0.0.1" for one in has)
    )
    assert worker_environment("cuda", "127.0.0.1")["NCCL_SOCKET_IFNAME"] == f"={loopback}"


@pytest.mark.parametrize("address", ["", "192.0.2.1"])
def test_an_address_of_no_interface_leaves_the_choice_to_nccl(address: str) -> None:
    assert "NCCL_SOCKET_IFNAME" not in worker_environment("cuda", address)


def test_workers_on_cpus_get_nothing_of_nccls() -> None:
    told = worker_environment("cpu", "127.0.0.1")
    assert not [name for name in told if name.startswith(("NCCL", "TORCH_NCCL", "CUDA"))]
