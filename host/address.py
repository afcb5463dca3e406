"""HOST:PORT as users write it. Must not know who listens there."""

import re

#: A name or an IPv4 address; an IPv6 address needs its brackets, or its end is not to be seen.
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9_.-]+|\[[0-9A-Za-z:.%]+\]):(?P<port>[0-9]{1,5})")


def split_address(text: str) -> tuple[str, int]:
    """Host (without brackets) and port; raises ValueError if `text` is anything else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT, such as 127.0.0.1:4600")
    return match["host"].strip("[]"), int(match["port"])
