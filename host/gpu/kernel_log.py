"""Xids that NVIDIA's driver has written into the kernel's log (docs.nvidia.com/deploy/xid-errors).

The log also has those from before any process listened to NVML. Must not know their meaning.
"""

import errno
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from oobleck.host.gpu.sample import Xid

#: NVRM: Xid (PCI:0000:3b:00): 79, pid=...
_XID = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})[^)]*\): (\d+)"
)
_LOG = Path("/dev/kmsg")
_RECORD_BYTES = 8 << 10
#: The kernel keeps a few hundred KiB.
_MOST_RECORDS = 100_000


def read_xids(log: Path = _LOG) -> tuple[Xid, ...]:
    """Read each Xid once, in order; none if this user may not read the log."""
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        return xids(_records(descriptor))
    finally:
        os.close(descriptor)


def _records(descriptor: int) -> Iterator[str]:
    """Yield the records of a kernel log, one read each (dev-kmsg in the kernel's ABI
    documentation)."""
    for _ in range(_MOST_RECORDS):
        try:
            record = os.read(descriptor, _RECORD_BYTES)
        except OSError as error:
            if error.errno == errno.EPIPE:  # overwritten meanwhile; read the next one
                continue
            return
        if not record:
            return
        yield record.decode(errors="replace")


def xids(lines: Iterable[str]) -> tuple[Xid, ...]:
    found = (_XID.search(line) for line in lines)
    read = (
        Xid(bus=f"{int(m[1], 16):04x}:{m[2]}:{m[3]}.0".lower(), code=int(m[4])) for m in found if m
    )
    return tuple(dict.fromkeys(read))
