"""Orders to the process of `oobleck doctor` on a node, its answers and findings, as data that the
master forwards.

Must not know how a host is examined, nor the conclusions.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

Level = Literal["pass", "slow", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    #: Name of the check.
    check: str
    #: slow: it works, but slowly; warn: it may fail later; fail: it does not work.
    level: Level
    what: str
    #: Empty: there is nothing to fix.
    fix: str = ""
    #: Node of the finding; empty: this host.
    node: str = ""
    #: Other node of a finding between two; empty: it is about one.
    other: str = ""
    #: Measurements, by names with their unit.
    figures: Mapping[str, float] = {}

    def __str__(self) -> str:
        where = f"{self.node} - {self.other}" if self.other else self.node
        return (
            f"{self.level.upper():4}  {where}{': ' if where else ''}{self.check}: {self.what}"
            + (f"; {self.fix}" if self.fix else "")
        )


#: Uses of a folder.
#: - checkpoints, output: the same on all nodes, and written;
#: - data: the same on all nodes, and read;
#: - own: of this host alone, and written;
#: - journal: likewise, by the master, which waits for each write.
Use = Literal["checkpoints", "output", "data", "own", "journal"]
#: Begins the names of mark files, which stay in a shared folder until all hosts are examined.
MARK = ".oobleck-doctor-"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Folder or files to examine; for `data` it may be a pattern."""

    path: str
    use: Use


class About(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a host's daemon knows of it; the examination checks them against the host."""

    #: Address by which other nodes reach its workers; empty: unknown.
    address: str = ""
    #: Address of the master, as given to this host; empty: this is its host.
    master: str = ""
    workers: int = 0
    memory_per_worker_bytes: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    #: Places of the workers' GPUs; none: all GPUs.
    gpus: tuple[str, ...] = ()
    #: Sessions or links that it must be able to hold.
    connections: int = 0
    #: Its own folders.
    places: tuple[Place, ...] = ()
    #: Folder of the agent's credentials, or of the authority at the head; empty: there is none.
    credentials: str = ""
    #: Variables of its workers that choose the interfaces of NCCL and Gloo.
    variables: Mapping[str, str] = {}


# ---- orders


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """Order to examine the host and these places."""

    places: tuple[Place, ...] = ()
    #: Addresses of the other nodes.
    peers: tuple[str, ...] = ()
    #: True if a job trains: take as little as possible.
    gently: bool = False
    #: End of the name of the mark file to leave in shared folders; empty: leave none.
    mark: str = ""


class FindMarks(msgspec.Struct, frozen=True, kw_only=True, tag="find marks"):
    """Order to list the mark files that an examination has left in these folders."""

    folders: tuple[str, ...]
    examination: str


class RemoveMarks(msgspec.Struct, frozen=True, kw_only=True, tag="remove marks"):
    folders: tuple[str, ...]
    #: Files of this examination are removed, and old ones that others left behind.
    examination: str


class ReadClock(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    pass


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag="listen"):
    """Order to accept calls from holders of the secret, for so long, at a port that the kernel
    chooses."""

    secret: str
    seconds: float


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Order to measure the network path to a listening host; the process that listens here
    does so."""

    address: str
    port: int
    #: Most bytes to send each way to measure the throughput; 0: none.
    most_bytes: int
    #: Most seconds for that.
    seconds: float


class Hush(msgspec.Struct, frozen=True, kw_only=True, tag="hush"):
    """Order to stop listening."""


Order = Look | FindMarks | RemoveMarks | ReadClock | Listen | Call | Hush


# ---- answers


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """State of a place, to compare with the same place on other nodes."""

    path: str
    use: Use
    #: The nearest existing folder above it, or itself; empty: it cannot be used.
    at: str = ""
    #: Hash of names, sizes and some of the content; empty: there is nothing.
    digest: str = ""
    files: int = 0


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    findings: tuple[Finding, ...] = ()
    seen: tuple[Seen, ...] = ()
    #: The network interface with the node's address, and the largest packet that it sends; empty
    #: and 0: no interface has it.
    interface: str = ""
    mtu: int = 0


class Marks(msgspec.Struct, frozen=True, kw_only=True, tag="marks"):
    """Marks found in each folder, by the names of the nodes that left them."""

    found: Mapping[str, tuple[str, ...]]


class Clock(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    #: Unix time.
    unix: float
    #: Boot id; nodes with the same one are one machine.
    boot: str = ""


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag="listening"):
    #: Port of TCP and of UDP.
    port: int


class Way(msgspec.Struct, frozen=True, kw_only=True, tag="way"):
    """Measurements by one host of the network path to another one."""

    #: Reason why there is no connection, in the kernel's words; empty: there is one.
    problem: str = ""
    #: Least and median of some round trips.
    least_s: float = 0.0
    median_s: float = 0.0
    #: Throughput, measured by the receiver; 0: not measured.
    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    #: Most bytes that were sent for that, each way.
    sent_bytes: int = 0
    #: Largest packet of the interface here, and the largest one that arrived unsplit; 0: not even
    #: the smallest did.
    mtu: int = 0
    arrived: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    pass


class Unable(msgspec.Struct, frozen=True, kw_only=True, tag="unable"):
    reason: str


Answer = Looked | Marks | Clock | Listening | Way | Done | Unable


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Line of a doctor's process's standard input."""

    order: Order
    about: About = About()
