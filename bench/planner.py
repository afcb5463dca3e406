"""How long it takes to generate all templates, and how much memory.

    python -m bench.planner [--runs 5] [--slow]

A case is layers/nodes/GPUs per node; all templates of 1 .. nodes nodes (of n0 .. where memory is
tight). Each case runs in a process of its own: the median of several runs, and the peak of the
process's memory beyond what it had before the first run. `first` is the first run, in which numpy
is cold. `ties` counts the numbers of nodes for which several cuts have the least T.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

from bench.support.models import profile
from oobleck.planner.cost.stages import StageTable
from oobleck.planner.search.templates import feasible_sizes, generate_templates, least_cuts

CASES = ("26/13/1", "26/13/4", "50/24/1", "50/30/1", "98/64/1", "98/64/8")
SLOW_CASES = ("200/256/8",)
#: Kind of profile, and the nodes that its memory needs.
VARIANTS = (("gpt", 1), ("random", 1), ("gpt", 4), ("random", 4))


def measure(case: str, kind: str, nodes_needed: int, runs: int) -> dict[str, float]:
    layers, nodes, gpus = map(int, case.split("/"))
    given = profile(layers, gpus, kind=kind, nodes_needed=nodes_needed)
    fitting = feasible_sizes(given, min(nodes, layers))
    sizes = range(fitting[0], fitting[-1] + 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    taken = []
    for _ in range(runs):
        begun = time.perf_counter()
        generate_templates(given, sizes)
        taken.append(time.perf_counter() - begun)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    cuts_of = least_cuts(StageTable(given), sizes)
    return {
        "n0": sizes.start,
        "templates": len(sizes),
        "first_s": taken[0],
        "median_s": statistics.median(taken),
        "peak_mib": peak / 1024,
        "ties": sum(len(cuts) > 1 for cuts in cuts_of.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--slow", action="store_true", help="also those of many seconds")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, kind, needed = options.one
        sys.stdout.write(json.dumps(measure(case, kind, int(needed), options.runs)))
        return
    line = "{:>10} {:>7} {:>3} {:>9} {:>9} {:>9} {:>9} {:>9}\n"
    sys.stdout.write(
        line.format("case", "kind", "n0", "templates", "ties", "first s", "median s", "peak MiB")
    )
    for case in CASES + SLOW_CASES * options.slow:
        for kind, needed in VARIANTS:
            runs = 1 if case in SLOW_CASES else options.runs
            command = [sys.executable, "-m", "bench.planner", "--runs", str(runs)]
            done = subprocess.run(
                [*command, "--one", case, kind, str(needed)],
                check=True,
                capture_output=True,
                text=True,
            )
            found = json.loads(done.stdout)
            sys.stdout.write(
                line.format(
                    case,
                    kind,
                    found["n0"],
                    found["templates"],
                    found["ties"],
                    f"{found['first_s']:.3f}",
                    f"{found['median_s']:.3f}",
                    f"{found['peak_mib']:.0f}",
                )
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
