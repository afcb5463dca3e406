"""Measured network paths between nodes: the rounds of measuring, and conclusions from them.

A path is bad if it cannot be connected, or is much worse than the others. If all paths of a node
are bad, one finding names the node. Pure.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from oobleck.core.orders import Finding, Level, Way
from oobleck.core.units import comma_separated, count

# ---- rounds: each node is in one pair at a time


#: Most nodes of which all pairs are measured. Of more nodes, only a ring and some other pairs are.
ALL_UP_TO = 16
_FURTHER_ROUNDS = 4

Pair = tuple[str, str]


def rounds(nodes: Sequence[str]) -> list[list[Pair]]:
    """Return rounds of pairs; no node is in two pairs of a round.

    A few nodes get all pairs, once each (the circle method). In a large cluster each node meets its
    two neighbours in the order of names, and others across.
    """
    names = sorted(nodes)
    if len(names) < 2:
        return []
    if len(names) <= ALL_UP_TO:
        return _all(names)
    ring = [names[i : i + 2] for i in range(0, len(names) - 1, 2)]
    others = [names[i : i + 2] for i in range(1, len(names) - 1, 2)]
    if len(names) % 2:
        found = [ring, others, [[names[-1], names[0]]]]
    else:
        found = [ring, [*others, [names[-1], names[0]]]]
    chosen = [[(pair[0], pair[1]) for pair in one] for one in found]
    everything = _all(names)
    # Spread over the rounds of all pairs, so that near and far pairs are included.
    step = len(everything) // _FURTHER_ROUNDS
    known = {frozenset(pair) for one in chosen for pair in one}
    for index in range(_FURTHER_ROUNDS):
        pairs = [p for p in everything[index * step] if frozenset(p) not in known]
        known |= {frozenset(pair) for pair in pairs}
        chosen.append(pairs)
    return chosen


def _all(names: Sequence[str]) -> list[list[Pair]]:
    circle: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(a, b) if a < b else (b, a) for a, b in facing if a and b])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


#: Measuring node, and the other one.
End = tuple[str, str]
Ways = Mapping[End, Way]

#: Limits of time and rate: relative to the median of all, and absolute.
_TIMES_LATER, _LATE_S = 5.0, 2e-3
_FAR_S = 10e-3
_PART_OF_RATE = 0.5
_SLOW_BYTES_PER_S = 100e6
#: Most findings of a kind.
_MOST_FINDINGS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """Group of paths that are bad for one reason."""

    #: Empty: the group is all paths.
    node: str = ""
    other: str = ""
    words: str
    ways: tuple[End, ...]


def with_rates(way: Way, carried: Way) -> Way:
    """Return `way` with the throughput of `carried`, whichever of the two hosts measured that."""
    return msgspec.structs.replace(
        way,
        there_bytes_per_s=carried.there_bytes_per_s,
        back_bytes_per_s=carried.back_bytes_per_s,
        sent_bytes=carried.sent_bytes,
    )


def conclude(ways: Ways) -> Iterator[Finding]:
    yield from _of_reach(ways)
    reached = {end: way for end, way in ways.items() if not way.problem}
    if not reached:
        return
    yield from _of_size(reached)
    yield from _of_time(reached)
    yield from _of_rate(reached)


def scopes(bad: Sequence[End], ways: Ways) -> Iterator[_Scope]:
    """Yield the fewest scopes that cover the bad paths: all nodes, else single nodes in both
    directions or one, else pairs."""
    uncovered = set(bad)
    if uncovered and uncovered == {*ways} and len({*(node for end in ways for node in end)}) > 2:
        yield _Scope(words="between all nodes", ways=tuple(sorted(uncovered)))
        return
    kinds: tuple[tuple[str, Callable[[str, End], bool]], ...] = (
        ("between {} and the others", lambda node, end: node in end),
        ("from the others to {}", lambda node, end: end[1] == node),
        ("from {} to the others", lambda node, end: end[0] == node),
    )
    for words, touches in kinds:
        for node in sorted({name for end in ways for name in end}):
            paths = {end for end in ways if touches(node, end)}
            has_peers = len({*(name for end in paths for name in end)}) > 2
            if has_peers and paths <= {*bad} and paths & uncovered:
                uncovered -= paths
                yield _Scope(node=node, words=words.format(node), ways=tuple(sorted(paths)))
    for source, target in sorted(uncovered):
        if (target, source) in uncovered:
            if source < target:
                both = ((source, target), (target, source))
                words = f"between {source} and {target}"
                yield _Scope(node=source, other=target, words=words, ways=both)
        else:
            words = f"from {source} to {target}"
            yield _Scope(node=source, other=target, words=words, ways=((source, target),))


def _first_scopes(bad: Sequence[End], ways: Ways) -> Sequence[_Scope]:
    return list(scopes(bad, ways))[:_MOST_FINDINGS]


def _of_reach(ways: Ways) -> Iterator[Finding]:
    bad = [end for end, way in ways.items() if way.problem]
    for scope in _first_scopes(bad, ways):
        reasons = sorted({ways[end].problem for end in scope.ways})
        what = f"no connection {scope.words}: {', '.join(reasons)}"
        fix = (
            "open all ports between the nodes for TCP (workers listen at ports of the kernel's "
            "choice), in the firewalls of the hosts and on the way, and check their routes"
        )
        if any("refused" in reason for reason in reasons):
            fix = "something on the path answers in the node's place: check its --address and NAT"
        yield _finding(scope, "ports", "fail", what, fix)
    if len(bad) < len(ways):
        what = f"{count(len(ways) - len(bad), 'path')} between nodes can be connected"
        yield Finding(check="ports", level="pass", what=what)


def _of_size(ways: Ways) -> Iterator[Finding]:
    silent = [end for end, way in ways.items() if not way.arrived]
    split = [end for end, way in ways.items() if 0 < way.arrived < way.mtu]
    for scope in _first_scopes(split, ways):
        sent = max(ways[end].mtu for end in scope.ways)
        least = min(ways[end].arrived for end in scope.ways)
        what = (
            f"packets of {sent} bytes get lost {scope.words}, those of {least} arrive: large "
            "messages hang"
        )
        fix = (
            f"set the interfaces to its packet size (ip link set DEV mtu {least}), or the "
            f"network to {sent}"
        )
        figures = {"mtu": float(sent), "arrived": float(least)}
        yield _finding(scope, "mtu", "fail", what, fix, figures)
    if silent:
        what = f"{count(len(silent), 'path')} let no datagram through, so packet sizes are unknown"
        yield Finding(check="mtu", level="pass", what=what)
    if not split and len(silent) < len(ways):
        sizes = sorted({way.arrived for way in ways.values() if way.arrived})
        what = f"packets of {', '.join(map(str, sizes))} bytes arrive, as interfaces send them"
        yield Finding(check="mtu", level="pass", what=what)


def _of_time(ways: Ways) -> Iterator[Finding]:
    times = {end: way.least_s for end, way in ways.items()}
    usual = statistics.median_low(times.values())
    late = max(_TIMES_LATER * usual, usual + _LATE_S)
    unlike = [end for end, time_s in times.items() if time_s > late]
    slow = [end for end, time_s in times.items() if _FAR_S < time_s <= late]
    for scope in _two_kinds(unlike, slow, ways):
        worst = max(times[end] for end in scope.ways)
        what = f"a round trip {scope.words} takes {_ms(worst)}"
        if worst > late:
            what += f", and {_ms(usual)} elsewhere"
        fix = "check the path between them; for sites that are far apart, use --detection wan"
        yield _finding(scope, "latency", "slow", what, fix, {"round_trip_s": worst})
    if not (unlike or slow):
        least, most = min(times.values()), max(times.values())
        what = f"round trips take {_ms(least)} to {_ms(most)}"
        figures = {"least_s": least, "most_s": most}
        yield Finding(check="latency", level="pass", what=what, figures=figures)


def _of_rate(ways: Ways) -> Iterator[Finding]:
    rates = {
        end: min(way.there_bytes_per_s, way.back_bytes_per_s)
        for end, way in ways.items()
        if way.there_bytes_per_s and way.back_bytes_per_s
    }
    if not rates:
        return
    measured = {end: ways[end] for end in rates}
    usual = statistics.median_high(rates.values())
    few = _PART_OF_RATE * usual
    unlike = [end for end, rate in rates.items() if rate < few]
    slow = [end for end, rate in rates.items() if few <= rate < _SLOW_BYTES_PER_S]
    for scope in _two_kinds(unlike, slow, measured):
        worst = min(rates[end] for end in scope.ways)
        what = f"{_rate(worst)} get through {scope.words}"
        if worst < few:
            what += f", and {_rate(usual)} elsewhere"
        fix = (
            "check the link's speed (ethtool DEV), errors (ip -s link), other users of it, "
            "and whether --interface names the fast network"
        )
        yield _finding(scope, "bandwidth", "slow", what, fix, {"bytes_per_s": worst})
    if not (unlike or slow):
        sent = max(way.sent_bytes for way in measured.values())
        what = (
            f"{_rates(min(rates.values()), max(rates.values()))} get through one "
            f"connection, each way, by at most {sent >> 20} MiB"
        )
        figures = {
            "least_bytes_per_s": min(rates.values()),
            "most_bytes_per_s": max(rates.values()),
        }
        yield Finding(check="bandwidth", level="pass", what=what, figures=figures)


def _two_kinds(unlike: Sequence[End], slow: Sequence[End], ways: Ways) -> Iterator[_Scope]:
    """Yield the scopes of paths that differ from the others, then of the remaining ones that are
    slow anywhere."""
    yield from _first_scopes(unlike, ways)
    yield from _first_scopes(slow, {end: way for end, way in ways.items() if end not in unlike})


def _finding(
    scope: _Scope,
    check: str,
    level: Level,
    what: str,
    fix: str,
    figures: Mapping[str, float] | None = None,
) -> Finding:
    return Finding(
        check=check,
        level=level,
        what=what,
        fix=fix,
        node=scope.node,
        other=scope.other,
        figures=figures or {},
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2g} ms"


def _rate(rate: float) -> str:
    unit, factor = _unit(rate)
    return f"{_figure(rate / factor)} {unit}"


def _rates(least: float, most: float) -> str:
    """Format a range in the unit of its larger end, as `0.6 to 1.1 GB/s`."""
    unit, factor = _unit(most)
    return f"{_figure(least / factor)} to {_figure(most / factor)} {unit}"


def _unit(rate: float) -> tuple[str, float]:
    return ("GB/s", 1e9) if rate >= 1e9 else ("MB/s", 1e6)


def _figure(number: float) -> str:
    """Format a figure with two digits at least."""
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def unmeasured(names: Sequence[str], pairs: int) -> Iterator[Finding]:
    """Report how many of all pairs were left out."""
    every = len(names) * (len(names) - 1) // 2
    if pairs < every:
        what = (
            f"{pairs} of {every} pairs were measured: of {len(names)} nodes each one's neighbours "
            "by name, and a few others"
        )
        fix = f"to measure all pairs of some, name them: --node {comma_separated(names[:2])}"
        yield Finding(check="pairs", level="pass", what=what, fix=fix)
