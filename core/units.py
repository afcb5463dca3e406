"""Numbers as people write and read them."""

import math
import re
from collections.abc import Callable, Iterable

#: Most names in a line for people.
_MOST_LISTED = 10

#: Longest reason for people; it begins with the place and the cause.
MOST_REASON_BYTES = 1024
_CUT = "…"

_UNITS: dict[str, int] = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("", 1024), ("b", 1000), ("ib", 1024))
}
_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_SPAN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d|)\s*", re.IGNORECASE)
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def count(number: int, noun: str) -> str:
    """Return `1 node`, `2 nodes`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def comma_separated(names: Iterable[str]) -> str:
    """Return `n1, n2`, sorted; of many names the first few and the count of the rest."""
    ordered = sorted(names)
    if len(ordered) <= _MOST_LISTED:
        return ", ".join(ordered)
    return f"{', '.join(ordered[:_MOST_LISTED])} and {len(ordered) - _MOST_LISTED} more"


def runs(layers: Iterable[int]) -> list[list[int]]:
    """Group layers into runs of consecutive ones."""
    groups: list[list[int]] = []
    for layer in sorted(layers):
        if groups and groups[-1][-1] == layer - 1:
            groups[-1].append(layer)
        else:
            groups.append([layer])
    return groups


def head(text: str, most_bytes: int = MOST_REASON_BYTES) -> str:
    """Return `text` cut to `most_bytes` of UTF-8; a cut text ends in `…`."""
    data = text[: most_bytes + 1].encode(errors="replace")  # a character takes at least one byte
    if len(data) <= most_bytes:
        return text
    return data[: most_bytes - len(_CUT.encode())].decode(errors="ignore") + _CUT


def are(number: int) -> str:
    """Return `1 is`, `2 are`."""
    return f"{number} {'is' if number == 1 else 'are'}"


def parse_bytes(text: str) -> int:
    """Parse `64MiB`, `1.5 GB` or `4096` as bytes; a bare `K`, `M`, `G` is a power of 1024."""
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size; write it like 64MiB, 1.5GB or 4096")
    whole, _, fraction = match[1].partition(".")
    return int(whole) * unit + int(fraction or 0) * unit // int(10 ** len(fraction))


def parse_seconds(text: str) -> float:
    """Parse `30s`, `1.5m`, `2h`, `7d`, `500ms` or bare seconds; raises ValueError unless
    positive."""
    match = _SPAN.fullmatch(text)
    span_s = float(match[1]) * _SECONDS[match[2].lower()] if match else 0.0
    if span_s <= 0:
        raise ValueError(f"{text!r} is not a time; write it like 30s, 10m or 1.5h")
    return span_s


def format_bytes(number: int) -> str:
    """Format bytes for messages, such as `1.5 GiB`."""
    return _short(number, round)


def enough_bytes(number: int) -> str:
    """Format bytes, rounded up, so that a limit set to the shown size is enough."""
    return _short(number, math.ceil)


def _short(number: int, rounded: Callable[[float], int]) -> str:
    """Format the number in its largest whole unit, to a tenth."""
    if abs(number) < 1024:
        return f"{number} B"
    size = number / 1024
    units = ["KiB", "MiB", "GiB", "TiB"]
    while abs(rounded(size * 10)) >= 10240 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{rounded(size * 10) / 10:.1f} {units[0]}"
