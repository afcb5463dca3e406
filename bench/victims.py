"""How well `auto` chooses on a trace, whichever nodes it is that die.

    python -m bench.victims --trace T.csv --profile P.json [--nodes 32] [--draws 30]

On a harsh trace one node, or a minute, decides about a return to the checkpoint, so one replay says
little: samples per second scatter by 10 % and more. Each draw keeps the order of the trace's events
and the number of nodes that go and come. It draws each event's time between the midpoints to its
neighbours, and live nodes in place of those named. Draw 0 is the trace as it is. Printed are, for
each policy, the mean over the draws, and the last policy against it with the standard error of the
paired differences.
"""

import argparse
import math
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from oobleck.core.job.spec import RecoveryPolicy
from oobleck.core.profile import parse_profile
from oobleck.planner.recovery.terms import Terms
from oobleck.planner.search.firstplan import node_specification
from oobleck.planner.simulate.compare import set_up
from oobleck.planner.simulate.costs import Costs
from oobleck.planner.simulate.replay import Replay
from oobleck.planner.simulate.shapes import Shapes
from oobleck.planner.simulate.trace import Row, parse_rows, trace_of


def at_drawn_times(rows: Sequence[Row], rng: random.Random) -> Iterator[Row]:
    """Return the rows at times between the midpoints to the times before and after; the first and
    the last time stay."""
    times = sorted({row.time_s for row in rows})
    moved = dict(zip(times, times, strict=True))
    for before, time, after in zip(times, times[1:], times[2:], strict=False):
        moved[time] = rng.uniform((before + time) / 2, (time + after) / 2)
    return (replace(row, time_s=moved[row.time_s]) for row in rows)


def drawn(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    """Yield the rows at drawn times, with live nodes drawn for those that are removed; seed 0: as
    they are. A node that joins is a new one."""
    if seed == 0:
        yield from rows
        return
    rng = random.Random(seed)
    rows = list(at_drawn_times(rows, rng))
    live: list[tuple[str, float]] = []
    for number, row in enumerate(rows):
        if row.event == "add":
            name = f"drawn-{number}"
            live.append((name, row.time_s))
        elif row.event == "remove":
            # A node that arrives at this time is not lost at once.
            before = [index for index, (_, since) in enumerate(live) if since < row.time_s]
            name, _ = live.pop(rng.choice(before or range(len(live))))
        else:
            raise SystemExit(f"line {row.line}: {row.event}: only add and remove can be drawn anew")
        yield replace(row, node=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--global-batch", type=int, default=1024)
    parser.add_argument("--fault-tolerance", type=int, default=1)
    parser.add_argument("--draws", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--policies", default="templates,reroute,auto", help="the last one is held")
    options = parser.parse_args()
    known = get_args(RecoveryPolicy)
    policies: list[RecoveryPolicy] = options.policies.split(",")
    if unknown := [policy for policy in policies if policy not in known]:
        parser.error(f"--policies: no policy {unknown[0]!r}; one of {', '.join(known)}")
    profile = parse_profile(options.profile.read_text())
    rows = list(parse_rows(options.trace.read_text()))
    most = max(options.nodes, *(live for _, live in trace_of(rows).live()))
    sizes = node_specification(profile, nodes=most, fault_tolerance=options.fault_tolerance)
    terms = Terms(
        profile=profile,
        sizes=sizes,
        fault_tolerance=options.fault_tolerance,
        tied=False,
        schedule=None,
        shadows=False,
    )
    shapes = Shapes(terms, microbatches=options.global_batch // profile.microbatch)
    found: dict[RecoveryPolicy, list[float]] = {policy: [] for policy in policies}
    for seed in range(options.first, options.first + options.draws):
        trace = trace_of(drawn(rows, seed))
        setting = set_up(trace, shapes, nodes=options.nodes, costs=Costs(), until_s=None)
        for policy in policies:
            found[policy].append(Replay(setting, policy).run().samples_per_s)
        told = "  ".join(f"{policy} {found[policy][-1]:.4f}" for policy in policies)
        print(f"draw {seed}: {told}", flush=True)
    held = found[policies[-1]]
    print(f"\n{'policy':<12}{'samples/s':>10}  {policies[-1]} against it")
    for policy, values in found.items():
        mean = statistics.mean(values)
        ahead = [own - other for own, other in zip(held, values, strict=True)]
        error = statistics.stdev(ahead) / math.sqrt(len(ahead)) if len(ahead) > 1 else math.nan
        against = f"{statistics.mean(ahead) / mean:+.1%} ± {error / mean:.1%}"
        print(f"{policy:<12}{mean:>10.4f}  {'' if policy == policies[-1] else against}")


if __name__ == "__main__":
    main()
