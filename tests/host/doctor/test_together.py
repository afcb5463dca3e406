"""What is concluded from what was seen of several hosts, and of the ways between them."""

import itertools
from collections.abc import Iterable, Iterator

import pytest
from msgspec.structs import replace

from oobleck.core.orders import Finding, Looked, Seen, Way
from oobleck.host.doctor import together, ways
from oobleck.host.versions import Versions

NODES = ("n1", "n2", "n3", "n4")
WELL = Way(
    least_s=1e-4,
    median_s=2e-4,
    there_bytes_per_s=1e9,
    back_bytes_per_s=1e9,
    sent_bytes=64 << 20,
    mtu=1500,
    arrived=1500,
)


def told(found: Iterable[Finding]) -> list[tuple[str, str, str]]:
    """What is not well: check, level, and where."""
    bad = [finding for finding in found if finding.level != "pass"]
    assert all(finding.what and finding.fix for finding in bad), bad
    return [(f.check, f.level, f"{f.node}-{f.other}" if f.other else f.node) for f in bad]


def among(*nodes: str) -> Iterator[tuple[str, str]]:
    return itertools.permutations(nodes, 2)


def with_bad(way: Way, *bad: tuple[str, str]) -> list[tuple[str, str, str]]:
    """Of ways between all nodes, where these are such."""
    return told(ways.conclude({end: way if end in bad else WELL for end in among(*NODES)}))


GONE = Way(problem="no answer within 3 s")


def test_ways_that_are_well() -> None:
    found = list(ways.conclude(dict.fromkeys(among(*NODES), WELL)))
    assert {finding.level for finding in found} == {"pass"}
    assert [finding.check for finding in found] == ["ports", "mtu", "latency", "bandwidth"]
    assert list(ways.conclude({})) == []


def test_rates_are_told_as_people_write_them() -> None:
    slower = replace(WELL, there_bytes_per_s=6e8)
    found = ways.conclude(
        {
            ("n1", "n2"): replace(WELL, there_bytes_per_s=1.1e9, back_bytes_per_s=2e9),
            ("n2", "n1"): slower,
        }
    )
    (told,) = (finding.what for finding in found if finding.check == "bandwidth")
    assert told.startswith("0.6 to 1.1 GB/s get through one connection")


def test_where_there_is_no_way() -> None:
    assert with_bad(GONE, ("n2", "n3"), ("n3", "n2")) == [("ports", "fail", "n2-n3")]
    assert with_bad(GONE, ("n3", "n2")) == [("ports", "fail", "n3-n2")]
    of_n4 = [end for end in among(*NODES) if "n4" in end]
    assert with_bad(GONE, *of_n4) == [("ports", "fail", "n4")]
    to_n4 = [end for end in among(*NODES) if end[1] == "n4"]
    assert with_bad(GONE, *to_n4) == [("ports", "fail", "n4")]
    assert with_bad(GONE, *among(*NODES)) == [("ports", "fail", "")]
    # Of two nodes nobody knows whose fault it is.
    alone = dict.fromkeys(among("n1", "n2"), GONE)
    assert told(ways.conclude(alone)) == [("ports", "fail", "n1-n2")]


def test_two_faults_are_told_apart() -> None:
    bad = [*(end for end in among(*NODES) if "n4" in end), ("n1", "n2")]
    assert with_bad(GONE, *bad) == [("ports", "fail", "n4"), ("ports", "fail", "n1-n2")]


def test_packets_that_get_lost() -> None:
    small = Way(least_s=1e-4, median_s=1e-4, mtu=1500, arrived=1400)
    from_n3 = [end for end in among(*NODES) if end[0] == "n3"]
    assert with_bad(small, *from_n3) == [("mtu", "fail", "n3")]
    # No datagram at all may be a firewall's wish.
    assert with_bad(Way(least_s=1e-4, median_s=1e-4, mtu=1500), *from_n3) == []


def test_ways_that_are_slow() -> None:
    of_n2 = [end for end in among(*NODES) if "n2" in end]
    late = Way(least_s=8e-3, median_s=9e-3, mtu=1500, arrived=1500)
    assert with_bad(late, *of_n2) == [("latency", "slow", "n2")]
    thin = Way(least_s=1e-4, there_bytes_per_s=1e9, back_bytes_per_s=3e8, mtu=1500, arrived=1500)
    assert with_bad(thin, *of_n2) == [("bandwidth", "slow", "n2")]
    far = Way(least_s=0.03, there_bytes_per_s=2e7, back_bytes_per_s=2e7, mtu=1500, arrived=1500)
    everywhere = dict.fromkeys(among(*NODES), far)
    all_slow = [("latency", "slow", ""), ("bandwidth", "slow", "")]
    assert told(ways.conclude(everywhere)) == all_slow
    # Where all are slow, one that is slower by far stands out.
    farther = Way(least_s=0.3, there_bytes_per_s=2e6, back_bytes_per_s=2e6, mtu=1500, arrived=1500)
    mixed = {end: farther if "n2" in end else far for end in among(*NODES)}
    of_each = [
        ("latency", "slow", "n2"),
        ("latency", "slow", ""),
        ("bandwidth", "slow", "n2"),
        ("bandwidth", "slow", ""),
    ]
    assert told(ways.conclude(mixed)) == of_each


def test_clocks() -> None:
    assert told(together.of_clocks({"n1": 0.01, "n2": -0.02})) == []
    assert told(together.of_clocks({"n1": 0.0, "n2": 5.0})) == [("clock", "warn", "n2")]
    assert told(together.of_clocks({"n1": 0.0, "n2": -500.0})) == [("clock", "fail", "n2")]
    heads = together.of_clocks({"n1": 30.0, "n2": 30.1, "n3": 30.2, "n4": 0.0})
    assert told(heads) == [("clock", "warn", together.HEAD), ("clock", "warn", "n4")]


def test_versions() -> None:
    def of(*torch: str, head: str = "0.1.0") -> list[tuple[str, str, str]]:
        hosts = [
            (f"n{number}", Versions(oobleck="0.1.0", python="3.12.1", torch=version))
            for number, version in enumerate(torch, start=1)
        ]
        return told(together.of_versions(hosts, head))

    assert of("2.8.0", "2.8.0") == []
    assert of("2.8.0", "2.8.0", "2.8.1") == [("versions", "warn", "n3")]
    assert of("2.9.0", "2.8.0", "2.8.0") == [("versions", "fail", "n1")]
    assert of("2.8.0", "2.8.0", head="0.2.0") == [("versions", "warn", together.HEAD)]
    two = [("a", Versions(engine="1")), ("b", Versions(engine="1")), ("c", Versions(engine="2"))]
    assert told(together.of_versions(two, "")) == [("versions", "fail", "c")]
    gpus = Versions(torch="2.8.0", cuda="12.8", nccl="2.27", driver="570")
    assert told(together.of_versions([("a", Versions(torch="2.8.0")), ("b", gpus)], "")) == []


def test_interfaces_that_differ() -> None:
    sizes = {"n1": 9000, "n2": 9000, "n3": 1500}
    looked = {name: Looked(interface="eth0", mtu=mtu) for name, mtu in sizes.items()}
    assert told(together.of_packets(looked)) == [("mtu", "warn", "n3")]


def test_folders_and_data_that_differ() -> None:
    def of(**seen: Seen) -> list[tuple[str, str, str]]:
        return told(together.of_places({n: Looked(seen=(one,)) for n, one in seen.items()}))

    saved = Seen(path="/s/saved", use="checkpoints", at="/s/saved")
    missing = Seen(path="/s/saved", use="checkpoints", at="/s")
    assert of(n1=saved, n2=saved) == []
    assert of(n1=saved, n2=saved, n3=missing) == [("shared", "fail", "n3")]
    assert of(n1=missing, n2=missing, n3=saved) == [("shared", "fail", "")]
    # What cannot be used there has been told.
    assert of(n1=saved, n2=Seen(path="/s/saved", use="checkpoints")) == []
    data = Seen(path="/d", use="data", at="/d", digest="aa", files=3)
    other = Seen(path="/d", use="data", at="/d", digest="bb", files=2)
    assert of(n1=data, n2=data, n3=other) == [("data", "fail", "n3")]


def test_folders_that_are_not_shared() -> None:
    def of(**marks: str) -> list[tuple[str, str, str]]:
        seen = {name: tuple(found.split()) for name, found in marks.items()}
        return told(together.of_marks("/s", seen))

    assert of(n1="n1 n2 n3", n2="n1 n2 n3", n3="n1 n2 n3") == []
    assert of(n1="n1 n2", n2="n1 n2", n3="n3") == [("shared", "fail", "n3")]
    assert of(n1="n1", n2="n2") == [("shared", "fail", "")]
    # Whose answer did not come is told elsewhere, and what others left counts for nothing.
    assert of(n1="n1 n2 n9", n2="n1 n2") == []


@pytest.mark.parametrize("count", range(2, ways.ALL_UP_TO + 1))
def test_of_few_nodes_all_pairs_come_once(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    found = ways.rounds(names)
    pairs = [pair for one in found for pair in one]
    assert sorted(pairs) == sorted(itertools.combinations(sorted(names), 2))
    for one in found:
        ends = [name for pair in one for name in pair]
        assert len(ends) == len({*ends})


@pytest.mark.parametrize("count", [17, 40, 101, 1000])
def test_of_many_nodes_each_has_its_neighbours_and_some_others(count: int) -> None:
    names = sorted(f"n{number}" for number in range(count))
    found = ways.rounds(names)
    assert len(found) <= 7
    for one in found:
        ends = [name for pair in one for name in pair]
        assert len(ends) == len({*ends})
    pairs = [frozenset(pair) for one in found for pair in one]
    assert len(pairs) == len({*pairs})
    assert {frozenset((names[i], names[i - 1])) for i in range(count)} <= {*pairs}
    met = [sum(name in pair for pair in pairs) for name in names]
    assert min(met) >= 4
    (left_out,) = ways.unmeasured(names, len(pairs))
    assert f"{len(pairs)} of {count * (count - 1) // 2} pairs" in left_out.what
    assert list(ways.unmeasured(names[:16], 120)) == []


def test_no_pair_of_one() -> None:
    assert ways.rounds(["n1"]) == []
