"""What a doctor's process is asked, and what it answers, as data that goes through the master.

Must not know how anything is looked at, nor what is concluded.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from oobleck.host.finding import Finding

#: checkpoints, output: the same on all nodes, and written; data: the same, and read; own: of this
#: host alone, and written; journal: likewise, by the master, which waits for each write.
Use = Literal["checkpoints", "output", "data", "own", "journal"]
#: Begins the names of files that a look leaves in a shared folder until all have looked.
MARK = ".oobleck-doctor-"


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A folder or files to look at; of `data` it may be a pattern."""

    path: str
    use: Use


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What the daemon on a host knows of it: what is looked at is held against that."""

    #: By which other nodes reach its workers; empty: not known.
    address: str = ""
    #: Of the master, as this host was told it; empty: this is its host.
    master: str = ""
    workers: int = 0
    memory_per_worker_bytes: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    #: Where the workers' GPUs are; none: all.
    gpus: tuple[str, ...] = ()
    #: Sessions or links that it must be able to hold.
    connections: int = 0
    #: Its own folders.
    places: tuple[Place, ...] = ()
    #: Of its workers' environment: what tells NCCL and Gloo by which way to talk.
    variables: Mapping[str, str] = {}


# ---- orders


class Look(msgspec.Struct, frozen=True, kw_only=True, tag="look"):
    """At the host, and at these places."""

    places: tuple[Place, ...] = ()
    #: Addresses of the other nodes.
    peers: tuple[str, ...] = ()
    #: A job trains: take as little as can be.
    gently: bool = False
    #: Ends the name of the file that is left in shared folders; empty: none is.
    mark: str = ""


class FindMarks(msgspec.Struct, frozen=True, kw_only=True, tag="find marks"):
    """Which files of that examination are in these folders."""

    folders: tuple[str, ...]
    examination: str


class RemoveMarks(msgspec.Struct, frozen=True, kw_only=True, tag="remove marks"):
    folders: tuple[str, ...]
    #: Files of this examination go, and those that were left behind by others long ago.
    examination: str


class ReadClock(msgspec.Struct, frozen=True, kw_only=True, tag="clock"):
    pass


class Listen(msgspec.Struct, frozen=True, kw_only=True, tag="listen"):
    """Take calls from who has the secret, for so long, at a port of the kernel's choice."""

    secret: str
    seconds: float


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Measure the way to one that listens; the process that does is the one that listens here."""

    address: str
    port: int
    #: At most so much is sent each way to see how much gets through; 0: nothing.
    most_bytes: int
    #: And for so long.
    seconds: float


class Hush(msgspec.Struct, frozen=True, kw_only=True, tag="hush"):
    """Listen no more."""


Order = Look | FindMarks | RemoveMarks | ReadClock | Listen | Call | Hush


# ---- answers


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What is held against the same place on other nodes."""

    path: str
    use: Use
    #: The nearest folder above it that is there, or itself; empty: it cannot be used.
    at: str = ""
    #: Of names, sizes and some of the content; empty: there is nothing.
    digest: str = ""
    files: int = 0


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    findings: tuple[Finding, ...] = ()
    seen: tuple[Seen, ...] = ()
    #: The network interface that has the node's address, and the largest packet that it sends;
    #: empty and 0: none has.
    interface: str = ""
    mtu: int = 0


class Marks(msgspec.Struct, frozen=True, kw_only=True, tag="marks"):
    """By folder: whose files are there."""

    found: Mapping[str, tuple[str, ...]]


class Clock(msgspec.Struct, frozen=True, kw_only=True, tag="time"):
    #: Seconds of the calendar.
    unix: float
    #: Nodes with the same are one machine.
    boot: str = ""


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag="listening"):
    #: Of TCP and of UDP.
    port: int


class Way(msgspec.Struct, frozen=True, kw_only=True, tag="way"):
    """What one host measured of the way to another one."""

    #: Why there is no way, in the kernel's words; empty: there is.
    problem: str = ""
    #: The least and the median of some round trips.
    least_s: float = 0.0
    median_s: float = 0.0
    #: What got through, by whoever received it; 0: not measured.
    there_bytes_per_s: float = 0.0
    back_bytes_per_s: float = 0.0
    #: Most bytes that were sent for that, each way.
    sent_bytes: int = 0
    #: What an interface here sends at most as one packet, and the largest that arrived unsplit; 0:
    #: not even the smallest did.
    mtu: int = 0
    arrived: int = 0


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    pass


class Unable(msgspec.Struct, frozen=True, kw_only=True, tag="unable"):
    reason: str


Answer = Looked | Marks | Clock | Listening | Way | Done | Unable


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a doctor's process's standard input."""

    order: Order
    about: About = About()
