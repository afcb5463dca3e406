"""Which GPUs, CPUs, interfaces and adapters workers use, and what is refused."""

from pathlib import Path

import pytest

from oobleck.host.gpu.devices import (
    Gpu,
    check_distinct,
    chosen_gpus,
    driver_version,
    interface_address,
    near_cpus,
    network_environment,
)

BUS = "0000:3b:00.0"
MIG = "MIG-5b1a2c3d-0000-1111-2222-333344445555"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A /sys of a host with one GPU and one adapter of two ports."""
    for path, text in {
        f"bus/pci/devices/{BUS}/local_cpulist": "0-2,8,10-11\n",
        "module/nvidia/version": "570.86.15\n",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("option", "shown", "names"),
    [
        (None, None, ()),
        ("0,2", None, ("0", "2")),
        (f"GPU-12ab, {MIG}", None, ("GPU-12ab", MIG)),
        (None, "3,1,-1,0", ("3", "1")),
        (None, "", ("",)),
        ("0", "0", ("0",)),
        ("0,1", "0, 1", ("0", "1")),
    ],
)
def test_the_option_or_the_environment_says_which(
    option: str | None, shown: str | None, names: tuple[str, ...]
) -> None:
    environment = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert chosen_gpus(option, environment) == names


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("0,0", "0 is given twice"),
        ("0,", "'' is no GPU"),
        ("-1", "'-1' is no GPU"),
        ("gpu0", "give numbers, or names that begin with GPU- or MIG-"),
        ("1", "CUDA_VISIBLE_DEVICES=0 says another thing"),
    ],
)
def test_what_names_no_gpus_is_refused(option: str, reason: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "0"} if option == "1" else {}
    with pytest.raises(ValueError, match=reason):
        chosen_gpus(option, environment)


def test_two_names_of_one_gpu_are_refused() -> None:
    gpu = Gpu(name="H100", uuid="u", memory_bytes=1, visible="0")
    other = Gpu(name="H100", uuid="v", memory_bytes=1, visible="1")
    check_distinct([gpu, other], None)
    same = Gpu(name="H100", uuid="u", memory_bytes=1, visible="GPU-u")
    for option, source in ((None, "CUDA_VISIBLE_DEVICES"), ("0,GPU-u", "--gpus")):
        reason = f"^{source}: GPU-u is a GPU that another name there means too"
        with pytest.raises(ValueError, match=reason):
            check_distinct([gpu, same], option)


def test_the_kernel_says_which_cpus_are_near(root: Path) -> None:
    assert near_cpus(BUS, root) == (0, 1, 2, 8, 10, 11)
    assert driver_version(root) == "570.86.15"


def test_where_it_does_not_any_will_do(root: Path) -> None:
    for bus in ("0000:af:00.0", "", "../../.."):
        assert near_cpus(bus, root) == ()
    assert driver_version(root / "bus") == ""


def test_nccl_gets_the_interface_and_the_adapters(root: Path) -> None:
    assert network_environment(None, None, root) == {}
    assert network_environment("ib0", "mlx5_0:1,mlx5_0", root) == {
        "NCCL_SOCKET_IFNAME": "=ib0",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_0",
    }
    assert network_environment(None, "none", root) == {"NCCL_IB_DISABLE": "1"}
    with pytest.raises(ValueError, match=r"no adapter 'mlx5_1'; it has mlx5_0;"):
        network_environment(None, "mlx5_0,mlx5_1", root)


def test_an_interface_has_the_workers_address() -> None:
    assert interface_address("lo") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"no such interface; it has .*\blo\b"):
        interface_address("nosuch0")
