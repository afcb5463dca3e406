"""Racks of a cluster: rows of a trace may name a rack, and then hit all of its nodes at once.

Owns the form of the file, and the rows of nodes that replace a rack's row. Must not know what
events mean.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from oobleck.planner.simulate.trace import Row

#: Nodes of each rack, in the order of the file.
Racks = Mapping[str, Sequence[str]]


def parse_racks(text: str) -> Racks:
    """Parse lines `node,rack` below that header. Raises ValueError with the line and the fix."""
    lines = text.splitlines()
    first = lines[0].lstrip("\ufeff").split(",") if lines else []
    if [cell.strip() for cell in first] != ["node", "rack"]:
        raise ValueError("line 1: no header; it must be node,rack")
    racks: dict[str, list[str]] = defaultdict(list)
    places: dict[str, int] = {}
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != 2 or not all(cells) or not line.strip().isprintable():
            raise ValueError(f"line {number}: {line.strip()!r}; give a node and its rack, as n1,r1")
        node, rack = cells
        if node in places:
            raise ValueError(f"line {number}: {node} is in line {places[node]}, too; remove one")
        places[node] = number
        racks[rack].append(node)
    for rack in racks:
        if rack in places:
            raise ValueError(f"line {places[rack]}: {rack} is a rack as well; name one differently")
    if not racks:
        raise ValueError("line 2: no nodes; give a node and its rack, as n1,r1")
    return dict(racks)


def with_racks(rows: Iterable[Row], racks: Racks) -> Iterator[Row]:
    """Yield the rows, each row of a rack replaced by rows of its nodes: for `add` its absent nodes,
    otherwise its present ones. Raises ValueError with the line and the fix."""
    present: set[str] = set()
    #: Nodes that got a notice, and when it ends unless a row removes them later.
    leaving: dict[str, float] = {}

    def takes(node: str, row: Row) -> bool:
        """Return whether a rack's row applies to this node of the rack."""
        left = node not in present or leaving.get(node, math.inf) <= row.time_s
        match row.event:
            case "add":
                return left
            case "remove":
                return node in present
            case _:
                return not left

    for row in rows:
        named = racks.get(row.node)
        if named is None:
            hit = [row.node]
        else:
            hit = [node for node in named if takes(node, row)]
            if not hit:
                state = "already there" if row.event == "add" else "not there"
                raise ValueError(
                    f"line {row.line}: {row.event} of rack {row.node}, whose nodes are all {state}"
                    "; remove the row"
                )
        for node in hit:
            if row.event == "notice" and row.value is not None:
                leaving.setdefault(node, row.time_s + row.value)
            elif row.event in ("add", "remove"):
                leaving.pop(node, None)
                (present.add if row.event == "add" else present.discard)(node)
            yield replace(row, node=node)
