"""Faults of hosts compared with each other: clocks, versions, packet sizes, shared
folders. Pure."""

import statistics
from collections.abc import Iterator, Mapping, Sequence

from oobleck.core.orders import Finding, Level, Looked, Seen
from oobleck.core.units import comma_separated
from oobleck.host.versions import Versions, differences, series

#: Clock differences that matter: for people who compare logs, and for the validity of certificates.
_APART_S, _FAR_APART_S = 1.0, 60.0
#: Name of the master's host, which no node can have.
HEAD = "(head)"


def of_clocks(offsets: Mapping[str, float]) -> Iterator[Finding]:
    """Report clocks that are wrong. `offsets`: seconds that each node's clock is ahead of the
    head's. If most nodes agree with each other and not with the head, its clock is wrong."""
    if not offsets:
        return
    usual = statistics.median(offsets.values())
    agree = [offset for offset in offsets.values() if abs(offset - usual) <= _APART_S]
    errors = dict(offsets)
    if abs(usual) > _APART_S and len(offsets) > 2 and 2 * len(agree) > len(offsets):
        errors = {name: offset - usual for name, offset in offsets.items()} | {HEAD: -usual}
    wrong = {name: error for name, error in errors.items() if abs(error) > _APART_S}
    for name, offset in sorted(wrong.items()):
        way = "ahead" if offset > 0 else "behind"
        what = f"its clock is {abs(offset):.1f} s {way}"
        fix = "have it set by the network (timedatectl set-ntp true, or chrony)"
        level: Level = "warn"
        if abs(offset) > _FAR_APART_S:
            level = "fail"
            what += ", so certificates begin and end at wrong times there"
        figures = {"offset_s": offset}
        yield Finding(check="clock", level=level, what=what, fix=fix, node=name, figures=figures)
    if not wrong:
        most = max(abs(offset) for offset in offsets.values())
        what = f"all clocks are within {max(most, 0.001):.3f} s of the head's"
        yield Finding(check="clock", level="pass", what=what, figures={"most_s": most})


def of_versions(hosts: Sequence[tuple[str, Versions]], head: str) -> Iterator[Finding]:
    """Report versions that differ. `hosts`: of nodes; `head`: oobleck's version at the head, which
    computes nothing."""
    found = differences(hosts)
    theirs = {versions.oobleck for _, versions in hosts}
    if hosts and theirs != {head} and len(theirs) == 1:
        what = f"the master is oobleck {head}, and all nodes are {', '.join(theirs)}"
        fix = "install the same version everywhere"
        yield Finding(check="versions", level="warn", what=what, fix=fix, node=HEAD)
    for package, by_version in found.items():
        # Nodes with GPUs have some packages that the others cannot have.
        known = {version: names for version, names in by_version.items() if version != "none"}
        if len(known) < 2 and package not in ("torch", "oobleck", "transformers"):
            continue
        usual = max(by_version, key=lambda version: len(by_version[version]))
        listed = ", ".join(
            f"{version} on {comma_separated(names)}" for version, names in by_version.items()
        )
        # The same as in oobleck.master.state.node.Build.
        torches = package == "torch" and len({series(version) for version in by_version}) > 1
        apart = torches or package == "engine"
        what = f"{package} differs: {listed}"
        if apart:
            what += f"; a job takes nodes of one {'engine' if package == 'engine' else 'series'}"
        others = [
            name for version, names in by_version.items() if version != usual for name in names
        ]
        node = others[0] if len(others) == 1 else ""
        wanted = "the same oobleck" if package == "engine" else f"{package} {usual}"
        fix = f"install {wanted} on {comma_separated(others)}"
        level: Level = "fail" if apart else "warn"
        yield Finding(check="versions", level=level, what=what, fix=fix, node=node)
    if not found and hosts:
        versions = hosts[0][1]
        what = f"all nodes have oobleck {versions.oobleck}, torch {versions.torch or 'none'}"
        yield Finding(check="versions", level="pass", what=what)


def of_packets(looked: Mapping[str, Looked]) -> Iterator[Finding]:
    """Report interfaces that are set to different packet sizes."""
    sizes: dict[int, list[str]] = {}
    for name, found in sorted(looked.items()):
        if found.mtu and found.interface != "lo":
            sizes.setdefault(found.mtu, []).append(name)
    if len(sizes) < 2:
        return
    usual = max(sizes, key=lambda size: (len(sizes[size]), size))
    for size, names in sorted(sizes.items()):
        if size != usual:
            for name in names:
                interface = looked[name].interface
                what = f"{interface} sends packets of {size} bytes, where most nodes' have {usual}"
                fix = f"ip link set {interface} mtu {usual}, and in the host's network settings"
                figures = {"mtu": float(size)}
                yield Finding(
                    check="mtu", level="warn", what=what, fix=fix, node=name, figures=figures
                )


# ---- folders that nodes should share


def of_places(looked: Mapping[str, Looked]) -> Iterator[Finding]:
    by_path: dict[str, dict[str, Seen]] = {}
    for name, found in sorted(looked.items()):
        for seen in found.seen:
            by_path.setdefault(seen.path, {})[name] = seen
    for path, on in sorted(by_path.items()):
        # A node without the place has a finding of its own.
        by_node = {name: seen for name, seen in on.items() if seen.at}
        if len(by_node) < 2:
            continue
        data = next(iter(by_node.values())).use == "data"
        groups: dict[str, list[str]] = {}
        for name, seen in by_node.items():
            groups.setdefault(seen.digest if data else seen.at, []).append(name)
        if len(groups) < 2:
            continue
        yield _differing(path, by_node, list(groups.values()), data=data)


def _differing(
    path: str, by_node: Mapping[str, Seen], groups: Sequence[Sequence[str]], *, data: bool
) -> Finding:
    usual, *rest = sorted(groups, key=len, reverse=True)
    others = [name for group in rest for name in group]
    node = others[0] if len(others) == 1 else ""
    if data:
        files = {name: by_node[name].files for name in (*others, *usual)}
        counted = f" ({files[others[0]]} files and {files[usual[0]]})" if _unlike(files) else ""
        what = (
            f"data at {path} are not the same on {comma_separated(others)} as on "
            f"{comma_separated(usual)}{counted}"
        )
        fix = "copy them anew: workers with other data are left out of a job"
        return Finding(check="data", level="fail", what=what, fix=fix, node=node)
    # The group that sees the longest part of the path has the most of it.
    have = max(groups, key=lambda group: len(by_node[group[0]].at))
    lack = [name for group in groups if group is not have for name in group]
    node = lack[0] if len(lack) == 1 else ""
    what = (
        f"{path}: only {by_node[lack[0]].at} exists on {comma_separated(lack)}, and "
        f"{by_node[have[0]].at} on {comma_separated(have)}"
    )
    fix = f"mount it on {comma_separated(lack)} too"
    return Finding(check="shared", level="fail", what=what, fix=fix, node=node)


def _unlike(files: Mapping[str, int]) -> bool:
    return len({*files.values()}) > 1


def of_marks(folder: str, marks: Mapping[str, Sequence[str]]) -> Iterator[Finding]:
    """Report whether nodes share the folder. `marks`: by node, the nodes whose marks it sees in the
    folder; each has left one."""
    if len(marks) < 2:
        return
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, seen in sorted(marks.items()):
        groups.setdefault(tuple(sorted({*seen} & {*marks})), []).append(name)
    if {*groups} == {tuple(sorted(marks))}:
        what = f"{folder} is one folder for {comma_separated(marks)}"
        yield Finding(check="shared", level="pass", what=what)
        return
    usual, *rest = sorted(groups.values(), key=len, reverse=True)
    others = [name for group in rest for name in group]
    alone = len(usual) == 1
    what = (
        f"{folder} is another folder on each of {comma_separated(marks)}"
        if alone
        else f"{folder} is not the same folder on {comma_separated(others)} as on "
        f"{comma_separated(usual)}"
    )
    fix = "mount one file server there on all nodes, or name a folder that they share"
    node = others[0] if len(others) == 1 and not alone else ""
    yield Finding(check="shared", level="fail", what=what, fix=fix, node=node)
