"""What is concluded from what was seen of one host."""

from msgspec.structs import replace

from oobleck.core.orders import About, Finding
from oobleck.host.doctor import gpus, network, system
from oobleck.host.doctor.network import Interface, Network, nccl_choice
from oobleck.host.doctor.system import System
from oobleck.host.gpu.nvml import Peers
from oobleck.host.gpu.sample import GpuSample, Sample, Xid, xids

GIB = 1 << 30
LOOPBACK = Interface(name="lo", addresses=("127.0.0.1",), mtu=65536)
ETH = Interface(name="eth0", addresses=("10.0.0.3",), mtu=1500)
OTHER = Interface(name="eth1", addresses=("192.168.0.3",), mtu=1500)
DOCKER = Interface(name="docker0", addresses=("172.17.0.1",), mtu=1500)
HOST = Network(
    hostname="host3",
    named=("10.0.0.3",),
    interfaces=(LOOPBACK, ETH, OTHER, DOCKER),
    sources={"10.0.0.1": "10.0.0.3", "10.0.0.2": "10.0.0.3"},
    ports=28232,
)
NODE = About(
    address="10.0.0.3",
    master="10.0.0.1:7070",
    workers=2,
    memory_per_worker_bytes=8 * GIB,
    connections=64,
)
ROOMY = System(
    memory_bytes=64 * GIB, free_bytes=60 * GIB, processors=16.0, files=1 << 20, threads=None
)


def told(found: list[Finding]) -> list[tuple[str, str]]:
    """Check and level of what is not well; each says the fix."""
    bad = [finding for finding in found if finding.level != "pass"]
    assert all(finding.what and finding.fix for finding in bad), bad
    return [(finding.check, finding.level) for finding in bad]


def of_network(about: About = NODE, **changes: object) -> list[tuple[str, str]]:
    return told(list(network.conclude(replace(HOST, **changes), about)))


def of_system(about: About = NODE, *, gently: bool = False, **changes: object) -> list[object]:
    return told(list(system.conclude(replace(ROOMY, **changes), about, gently=gently)))


def test_a_host_that_is_well() -> None:
    assert of_network() == []
    assert of_system() == []


def test_names() -> None:
    assert of_network(named=("127.0.1.1",)) == [("names", "warn")]
    assert of_network(named=()) == [("names", "warn")]
    # Some other address is nobody's business, nor is loopback where all is on one host.
    assert of_network(named=("127.0.1.1", "10.0.0.3")) == []
    alone = About(address="127.0.0.1")
    assert of_network(alone, named=("127.0.1.1",)) == []
    assert of_network(master=()) == [("names", "fail")]


def test_addresses_and_routes() -> None:
    assert ("address", "fail") in of_network(replace(NODE, address="10.9.9.9"))
    down = replace(ETH, up=False)
    assert of_network(interfaces=(LOOPBACK, down)) == [("address", "fail")]
    away = {"10.0.0.1": "10.0.0.3", "10.0.0.2": "192.168.0.3"}
    assert of_network(sources=away) == [("routes", "warn")]
    assert of_network(sources={"10.0.0.2": ""}) == [("routes", "fail")]
    assert of_network(ports=512) == [("ports", "warn")]
    assert of_network(adapters={"mlx5_0:1": "DOWN", "mlx5_1:1": "ACTIVE"}) == [("adapters", "warn")]


def test_what_nccl_chooses() -> None:
    def chosen(told: str) -> tuple[str, ...]:
        return nccl_choice(told, HOST.interfaces)

    assert chosen("") == ("eth0", "eth1")
    assert chosen("eth") == ("eth0", "eth1")
    assert chosen("=eth1") == ("eth1",)
    assert chosen("^lo,docker,eth1") == ("eth0",)
    assert chosen("^=eth0") == ("lo", "eth1", "docker0")
    assert chosen("ens") == ()
    ib = Interface(name="ib0", addresses=("10.1.0.3",), mtu=2044)
    assert nccl_choice("", (*HOST.interfaces, ib)) == ("ib0",)
    assert nccl_choice("", (LOOPBACK, DOCKER)) == ("lo", "docker0")


def test_the_choice_against_the_nodes_address() -> None:
    def of(device: str = "cpu", **variables: str) -> list[tuple[str, str]]:
        return of_network(replace(NODE, device=device, variables=variables))

    assert of(NCCL_SOCKET_IFNAME="=eth0") == []
    assert of(NCCL_SOCKET_IFNAME="docker0") == [("interface", "fail")]
    assert of(NCCL_SOCKET_IFNAME="eth") == [("interface", "warn")]
    assert of(NCCL_SOCKET_IFNAME="ens5") == [("interface", "fail")]
    assert of(GLOO_SOCKET_IFNAME="eth1") == [("interface", "fail")]
    # Nobody has chosen, and workers on CPUs do not ask NCCL.
    assert of() == []
    assert of("cuda") == [("interface", "warn")]


def test_memory() -> None:
    assert of_system(memory_bytes=12 * GIB) == [("memory", "fail")]
    assert of_system(free_bytes=4 * GIB) == [("memory", "warn")]
    assert of_system(free_bytes=4 * GIB, gently=True) == []
    assert of_system(free_bytes=GIB // 8, gently=True) == [("memory", "fail")]
    # What plans may use of a GPU is not the host's.
    assert of_system(replace(NODE, device="cuda"), memory_bytes=12 * GIB) == []


def test_limits() -> None:
    assert of_system(files=256) == [("files", "fail")]
    assert of_system(files=1024) == [("files", "warn")]
    assert of_system(files=None) == []
    assert of_system(threads=100) == [("threads", "warn")]
    assert of_system(processors=1.5) == [("processors", "warn")]


def test_gpus_of_the_agent_alone_count() -> None:
    one, other = "0000:3b:00.0", "0000:b3:00.0"
    sick = Sample(
        gpus=(GpuSample(bus=one, name="H100"), GpuSample(bus=other, name="H100", error="lost")),
        xids=(Xid(bus=other, code=79), Xid(bus="", code=94)),
    )
    about = About(device="cuda", gpus=(one,))
    mine = gpus.of_agent(sick, about)
    assert [board.bus for board in mine.gpus] == [one]
    assert mine.xids == (Xid(bus="", code=94),)
    assert told(list(gpus.health(mine, busy=True))) == [("gpus", "warn")]
    assert told(list(gpus.health(gpus.of_agent(sick, About(device="cuda"))))) == [
        *[("gpus", "fail")] * 2,
        ("gpus", "warn"),
    ]
    apart = Peers(apart=((one, other, "not supported"),), without_ecc=(one,))
    assert told(list(gpus.peers(apart, about))) == [("ecc", "warn")]
    assert told(list(gpus.peers(apart, About(device="cuda")))) == [("p2p", "slow"), ("ecc", "warn")]


def test_errors_in_the_kernels_log() -> None:
    lines = [
        "6,1234,99,-;usb 1-1: new device",
        "4,1235,99,-;NVRM: Xid (PCI:0000:3B:00): 79, pid='<unknown>', name=<unknown>, GPU has fal",
        "4,1236,99,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1",
        "4,1237,99,-;NVRM: Xid (PCI:0000:b3:00 GPU-I:02): 48, pid=12",
    ]
    assert xids(lines) == (Xid(bus="0000:3b:00.0", code=79), Xid(bus="0000:b3:00.0", code=48))
