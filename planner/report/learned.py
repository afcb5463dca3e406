"""Costs of interruptions as a job's records tell them, for simulations of the same cluster.

Owns which record tells which cost. Must not know how records are read.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from oobleck.planner.recovery.course import MORPH, SETTLE_S
from oobleck.planner.recovery.outlook import REJOIN_S, corrected, received_s

Record = Mapping[str, Any]

#: Names of costs by phase of a change that something forced.
_PHASES = {"detect": "detect_s", "plan": "plan_s", "abort": "abort_s", "rendezvous": "meeting_s"}
#: Least expected seconds of a transfer that tells the speed of links.
_LEAST_MOVE_S = 0.02


def learn_costs(
    events: Sequence[Record],
    metrics: Iterable[Record],
    *,
    link_bytes_per_s: float | None = None,
    microbatches: int | None = None,
) -> dict[str, float]:
    """Return the costs of which there are records, by their names in `--costs`. Each is a median;
    shares, ratios and the pause of a switch are means.

    `events` and `metrics`: the records of the job's files. `link_bytes_per_s`: speed of a node's
    link that its plans were made with; `microbatches`: those of a step.
    """
    found: defaultdict[str, list[float]] = defaultdict(list)
    steps_s, between = _steps(metrics)
    #: Seconds of steps whose plan expected some, and the expected ones.
    happened_s = expected_s = 0.0
    #: Factor that the master had on the expected times of transfers (`outlook.corrected`).
    factor = 1.0
    made = [one for one in events if one["event"] == "reconfigured" and "superseded_by" not in one]
    for change in made:
        phases, expected = change["phases"], change.get("expected")
        own_s = steps_s.get(change["to_generation"], ())
        if expected is not None:
            happened_s += sum(own_s)
            expected_s += len(own_s) * expected["step_s"]
        if change["boundary"]:
            if "master_restarted" in change:  # its phases were not seen
                continue
            late_s = 0.0 if expected is None else expected["stall_s"]
            found["switch_s"].append(phases["rendezvous"] + phases["transfer"] - late_s)
            continue
        move_s = 0.0
        if expected is not None:
            transfer_s = expected.get("transfer_s")
            move_s = received_s(
                expected["stall_s"] - REJOIN_S if transfer_s is None else transfer_s,
                expected_bytes=expected.get("moved_bytes", 0),
                received_bytes=change["received_bytes"],
            )
        took_s, link_s = phases.get("transfer", 0.0), move_s / factor
        if change["policy"] != MORPH:
            factor = corrected(factor, expected_s=move_s, happened_s=took_s)
        if change["cause"] == "worker lost":  # it also waits for the new process
            continue
        for phase, name in _PHASES.items():
            if change["policy"] != MORPH or phase != "rendezvous":
                found[name].append(phases[phase])
        if change["policy"] == MORPH:  # workers load before they say that they have met
            found["load_s"].append(phases["rendezvous"] + phases["transfer"])
        elif link_bytes_per_s and link_s >= _LEAST_MOVE_S and took_s > 0:
            found["bytes_per_s"].append(link_bytes_per_s * link_s / took_s)
        if microbatches and change["redo_step"] is not None and change["policy"] != MORPH:
            kept = change["salvaged_microbatches"] / microbatches
            # Losses come at any time of a step, so half of it was done on average.
            found["salvage"].append(2 * kept)
            if own_s:
                found["first_step_s"].append(phases["first_step"] - (1 - kept) * median(own_s))
    found["join_s"] = list(_joins(events))
    saved = [one for one in events if one["event"] == "checkpoint_saved"]
    found["save_s"] = _pauses(saved, between)
    times = [one["time"] for one in saved if not one["request"]]
    found["checkpoint_every_s"] = [later - sooner for sooner, later in pairwise(times)]
    if found["load_s"] and found["meeting_s"]:
        met_s = median(found["meeting_s"])
        found["load_s"] = [own - met_s for own in found["load_s"]]
    costs = {name: max(0.0, median(each)) for name, each in found.items() if each}
    if found["switch_s"]:
        # Many pause for nothing, some for most of a second; what counts is their sum.
        costs["switch_s"] = max(0.0, sum(found["switch_s"]) / len(found["switch_s"]))
    if found["salvage"]:
        share = sum(found["salvage"]) / len(found["salvage"])
        costs["salvage"] = min(1.0, share)
    if expected_s:
        costs["step_ratio"] = happened_s / expected_s
    return costs


def _steps(metrics: Iterable[Record]) -> tuple[Mapping[int, Sequence[float]], dict[int, float]]:
    """Return the seconds of steps by generation, without each one's first, and by step the seconds
    between its commit and the begin of the next one."""
    of: defaultdict[int, list[float]] = defaultdict(list)
    between: dict[int, float] = {}
    for before, line in pairwise(metrics):
        if before["generation"] == line["generation"]:
            of[line["generation"]].append(line["step_seconds"])
            between[before["step"]] = line["time"] - line["step_seconds"] - before["time"]
    return of, between


def _joins(events: Iterable[Record]) -> Iterator[float]:
    """Yield the times from a node's coming until it could take part, where no change was under way
    meanwhile."""
    came: dict[str, float] = {}
    changed = 0.0
    for one in events:
        if one["event"] == "node_joined":
            came[one["node"]] = one["time"]
        elif one["event"] == "reconfigured":
            since = max((came.get(node, 0.0) for node in one["nodes_joined"]), default=0.0)
            if one["boundary"] and since > changed:
                yield one["time"] - one["total_s"] - since - SETTLE_S
            changed = one["time"]


def _pauses(saved: Collection[Record], between: Mapping[int, float]) -> list[float]:
    """Return by how much the pauses after saved steps are longer than the others."""
    steps = {one["step"] for one in saved}
    others = [pause for step, pause in between.items() if step not in steps]
    usual = median(others) if others else 0.0
    return [max(0.0, between[step] - usual) for step in steps if step in between]
